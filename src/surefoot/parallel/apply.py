"""A model made ready for its layout, in one order: precision, tensor, context, recomputation, compilation in place, pipeline stages, shards or
replicas, initial values."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.config.layout_rules import SPLIT_BACKWARD
from surefoot.config.parallel import ParallelConfig
from surefoot.model.parts import has_custom_parts
from surefoot.model.transformer import Transformer
from surefoot.parallel.context import split_rows
from surefoot.parallel.forward_backward import (
    ForwardBackward,
    PlainForwardBackward,
    Rows,
    WholeRows,
    WideForwardBackward,
    sum_hook,
)
from surefoot.parallel.mesh import EnvironmentFault, World
from surefoot.parallel.pipeline import PipelineForwardBackward
from surefoot.parallel.pipeline_stages import cut_stages
from surefoot.parallel.precision import apply_precision, policy_of
from surefoot.parallel.recompute import recompute_blocks
from surefoot.parallel.shard import check_placed, fill_parameters, home_of_weights, shard_parameters
from surefoot.parallel.tensor import cut_matrices

Draw = Callable[[str, torch.Size, torch.dtype], Tensor]
"""(name, shape, dtype) to the full initial tensor of a parameter."""


@dataclass(frozen=True)
class Placed:
    """What this rank holds of a model, and how it is run."""

    forward_backward: ForwardBackward
    model: nn.Module
    """The model, or a list of this rank's stages of it."""
    parameters: dict[str, nn.Parameter]
    """This rank's, by the name that they have in the whole model, in its order."""
    blocks: dict[int, nn.Module]
    """This rank's blocks by layer."""
    rows: Rows


def apply_layout(model: Transformer, config: ParallelConfig, world: World, *, draw: Draw, fixed_order: bool) -> Placed:
    """Materialise a model built on the meta device under the layout.

    Raises what ``apply_precision`` raises, and ConfigError naming a parameter that no plan has placed. ``fixed_order`` keeps DDP from
    regrouping its buckets after the first step: a resumed process would otherwise sum in another order.
    """
    apply_precision(model, config, world.device)
    if config.tp > 1:
        cut_matrices(model, config, world)
    rows = split_rows(model, config, world) if config.cp > 1 else WholeRows()
    recompute_blocks(model, config)
    if compiles(config):
        if config.pp > 1 and config.pipeline.schedule in SPLIT_BACKWARD:
            # a backward may free the buffers of a forward only when no second one comes
            torch._functorch.config.donated_buffer = False
        for block in model.blocks.children():
            block.compile()
    if config.pp > 1:
        return _in_stages(model, config, world, rows, draw)
    plain = world.size == 1 or (config.data_parallel == "ddp" and config.tp == 1)
    if not plain:
        shard_parameters(model, config, world)
    model.to_empty(device=home_of_weights(config, world))
    parameters = dict(model.named_parameters())
    fill_parameters(parameters, draw)
    if not plain:
        check_placed(parameters)
    passes = _passes(model, config, world, rows, plain=plain, fixed_order=fixed_order)
    return Placed(passes, model, parameters, dict(enumerate(model.blocks.children())), rows)


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


def _passes(
    model: Transformer, config: ParallelConfig, world: World, rows: Rows, *, plain: bool, fixed_order: bool
) -> ForwardBackward:
    policy = policy_of(config)
    if plain and policy.weights != policy.reduce:
        return WideForwardBackward(model, rows, world.size)
    if not plain:
        # weights narrower than their sums would round at every micro-batch
        each = config.data_parallel in ("zero2", "fsdp") and policy.weights == policy.reduce
        keep = config.data_parallel in ("ddp", "zero1")
        return PlainForwardBackward(model, rows, reduce_each=each, keep_weights=keep)
    if world.size == 1:
        return PlainForwardBackward(model, rows)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # a user's part may leave some of its parameters unused
        find_unused_parameters=fixed_order or has_custom_parts(model),
    )
    wrapped.register_comm_hook(torch.distributed.group.WORLD, sum_hook)
    return PlainForwardBackward(model, rows, wrapped=wrapped)


def _in_stages(model: Transformer, config: ParallelConfig, world: World, rows: Rows, draw: Draw) -> Placed:
    stages = cut_stages(model, config, world)
    for stage in stages.modules:
        shard_parameters(stage, config, world)
        stage.to_empty(device=home_of_weights(config, world))
    parameters = stages.parameters()
    fill_parameters(parameters, draw)
    check_placed(parameters)
    passes = PipelineForwardBackward(stages, config, world, rows)
    return Placed(passes, nn.ModuleList(stages.modules), parameters, stages.blocks(), rows)
