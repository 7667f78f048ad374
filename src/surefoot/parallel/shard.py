"""Weights over ranks: FSDP2 sharding, and the same initial values whatever the sharding."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from surefoot.config.errors import ConfigError
from surefoot.config.parallel import ParallelConfig
from surefoot.model.transformer import Transformer
from surefoot.parallel.mesh import World
from surefoot.parallel.precision import policy_of


def shard_parameters(model: Transformer, config: ParallelConfig, world: World) -> None:
    """Shard every block and then the rest over the data and context ranks of this stage (FSDP2), in place; replicas are shards of one rank.

    Gradients are summed, not averaged: every loss is already divided by its global count. gloo has no pre-multiplied sum, hence the
    plain one is forced.
    """
    assert world.mesh is not None
    policy = policy_of(config)
    precision = MixedPrecisionPolicy(param_dtype=policy.compute, reduce_dtype=policy.reduce)
    mesh = world.mesh["replicate", "shard"]
    # only ZeRO-3 lets go of the weights between forward and backward
    again = config.data_parallel == "fsdp" and config.pp == 1
    for block in model.blocks.children():
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=again)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def fill_parameters(
    parameters: Mapping[str, nn.Parameter], draw: Callable[[str, torch.Size, torch.dtype], Tensor]
) -> None:
    """Give every parameter its initial values: ``draw(name, shape, dtype)`` makes the full tensor, a shard keeps its slice.

    The draw depends on the name alone, so no layout changes it, and no collective is needed.
    """
    with torch.no_grad():
        for name, parameter in parameters.items():
            full = draw(name, parameter.shape, parameter.dtype)
            if isinstance(parameter, DTensor):
                shape, offset = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                piece = full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                parameter.to_local().copy_(piece)
            else:
                parameter.copy_(full)


def elements_before(parameter: Tensor) -> int:
    """Elements of the whole tensor, row after row, that come before those of this rank; raises ValueError where it holds no whole rows."""
    if not isinstance(parameter, DTensor) or parameter.ndim == 0:
        return 0
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(shape[1:]) != tuple(parameter.shape[1:]):
        raise ValueError(
            f"a tensor of shape {tuple(parameter.shape)} placed as {parameter.placements} is not cut into whole rows"
        )
    return offset[0] * math.prod(parameter.shape[1:])


def check_placed(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError naming the parameters that are not DTensors: no plan has said where they lie."""
    loose = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if loose:
        raise ConfigError(
            [f"{name} lies on no mesh: no plan has placed it, and ranks would train it apart" for name in loose]
        )
