"""A model made ready for its layout, in one order: precision, compile each block in place, shard or replicate, fill with initial values."""

import shutil
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.config.parallel import ParallelConfig
from surefoot.parallel.forward_backward import PlainForwardBackward, WideForwardBackward, sum_hook
from surefoot.parallel.mesh import EnvironmentFault, World
from surefoot.parallel.precision import apply_precision, policy_of
from surefoot.parallel.shard import fill_parameters, shard_parameters


def apply_layout(
    model: nn.Module,
    blocks: nn.ModuleList,
    config: ParallelConfig,
    world: World,
    *,
    draw: Callable[[str, torch.Size, torch.dtype], Tensor],
    fixed_order: bool,
) -> PlainForwardBackward | WideForwardBackward:
    """Materialise a model built on the meta device under the layout, and return how it is run.

    Raises what ``apply_precision`` raises. ``fixed_order`` keeps DDP from regrouping its buckets after the first step: a resumed process would otherwise sum in another order.
    """
    policy = policy_of(config)
    apply_precision(model, config, world.device)
    if compiles(config):
        for block in blocks:
            block.compile()
    if world.size > 1 and config.data_parallel == "fsdp":
        shard_parameters(model, blocks, world, policy.compute, policy.reduce)
    model.to_empty(device=world.device)
    fill_parameters(dict(model.named_parameters()), draw)
    if policy.weights != policy.reduce and (world.size == 1 or config.data_parallel == "ddp"):
        return WideForwardBackward(model, world.size)
    if world.size > 1 and config.data_parallel == "ddp":
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=fixed_order,
        )
        wrapped.register_comm_hook(torch.distributed.group.WORLD, sum_hook)
        return PlainForwardBackward(wrapped)
    return PlainForwardBackward(model)


def compiles(config: ParallelConfig) -> bool:
    """Whether blocks are compiled. Raises EnvironmentFault when that is asked for and there is no C++ compiler."""
    if config.compile == "off":
        return False
    if torch.cuda.is_available() or any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return True
    if config.compile == "on":
        raise EnvironmentFault(
            "parallel.compile=on, but there is no C++ compiler (c++, g++ or clang++); install one (Debian: apt-get install g++) or use --parallel.compile off"
        )
    return False
