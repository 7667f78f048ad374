"""Weights over ranks: FSDP2 sharding, and the same initial values whatever the sharding."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from surefoot.config.errors import ConfigError
from surefoot.config.parallel import ParallelConfig
from surefoot.model.transformer import Transformer
from surefoot.parallel.boxes import box_of
from surefoot.parallel.mesh import World
from surefoot.parallel.precision import policy_of


def shard_parameters(model: Transformer, config: ParallelConfig, world: World) -> None:
    """Shard every block and then the rest over the data and context ranks of this stage (FSDP2), in place; replicas are shards of one rank.

    Gradients are summed, not averaged: every loss is already divided by its global count. gloo has no pre-multiplied sum, hence the
    plain one is forced. Under offload the shards lie in the host's memory (pinned, where a GPU fetches them), and their gradients go there.
    """
    assert world.mesh is not None
    policy = policy_of(config)
    precision = MixedPrecisionPolicy(param_dtype=policy.compute, reduce_dtype=policy.reduce)
    mesh = world.mesh["replicate", "shard"]
    # only ZeRO-3 lets go of the weights between forward and backward
    again = config.data_parallel == "fsdp" and config.pp == 1
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if config.offload else OffloadPolicy()
    for module in (*model.blocks.children(), model):
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=again, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def home_of_weights(config: ParallelConfig, world: World) -> torch.device:
    """Where master weights and moments lie; one rank alone keeps them where it computes. A model has no buffers to lie elsewhere."""
    return torch.device("cpu") if config.offload and world.size > 1 else world.device


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
                parameter.to_local().copy_(full[box_of(parameter).slices])
            else:
                parameter.copy_(full)


def check_placed(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError naming the parameters that are not DTensors: no plan has said where they lie."""
    loose = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    if loose:
        raise ConfigError(
            [f"{name} lies on no mesh: no plan has placed it, and ranks would train it apart" for name in loose]
        )
