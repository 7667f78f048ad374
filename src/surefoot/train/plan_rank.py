"""One rank of a job that is not there: what it holds, counted on meta tensors, and what its step sends, recorded on a fake process group."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from surefoot.config.run import RunConfig
from surefoot.model.parametrization import fused_rows, roles
from surefoot.model.transformer import Transformer
from surefoot.optim.build import build_optimizer
from surefoot.parallel.apply import Placed, apply_layout
from surefoot.parallel.fake_world import local_bytes, unanimous_stages, unsharded_shape
from surefoot.parallel.forward_backward import MicroBatch
from surefoot.parallel.mesh import World
from surefoot.parallel.pipeline import PipelineForwardBackward
from surefoot.parallel.precision import policy_of
from surefoot.parallel.traffic import Amount, Flow, recorded_traffic


@dataclass(frozen=True)
class Held:
    """Bytes of what a rank keeps between steps, and the shapes they come from."""

    weights: int
    moments: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of every parameter on one tensor parallel rank, before it is sharded."""
    num_params: int
    """Of this rank's stages, whole."""


def hold(config: RunConfig, world: World) -> Held:
    """What this rank holds, counted from the local parts of its parameters and moments. ``world.device`` is meta: nothing is allocated."""
    policy = policy_of(config.parallel)
    with torch.device("meta"):
        model = Transformer(config.model, policy.compute, policy.weights)
    by_name, fused = roles(model), fused_rows(model)
    parameters = dict(model.named_parameters()) if replicated(config) else _placed(model, config, world).parameters
    optimizer = build_optimizer(parameters, by_name, config.optim, config.model, fused, replicas=world.size)
    return Held(
        weights=sum(map(local_bytes, parameters.values())),
        moments=sum(map(local_bytes, optimizer.tensors().values())),
        shapes={name: unsharded_shape(parameter) for name, parameter in parameters.items()},
        num_params=sum(parameter.numel() for parameter in parameters.values()),
    )


def replicated(config: RunConfig) -> bool:
    """Whether each rank has all weights, as plain tensors."""
    parallel = config.parallel
    return parallel.data_parallel == "ddp" and parallel.tp == parallel.pp == 1


def record_step(config: RunConfig, world: World) -> dict[Flow, Amount]:
    """What one forward and backward over this rank's micro-batches sends, recorded: all shapes are real, no number is.

    ``world.device`` is where the job would compute. Raises ValueError for plain replicas: torch's DDP wants real tensors. The layout is built outside the fake mode, its tensors inside.
    """
    if replicated(config):
        raise ValueError(
            "parallel.data_parallel=ddp: torch's DDP looks into its parameters as it is built, and there are none"
        )
    policy = policy_of(config.parallel)
    with torch.device("meta"):
        model = Transformer(config.model, policy.compute, policy.weights)
    placed = _placed(model, config, replace(world, device=torch.device("meta")))
    with FakeTensorMode(allow_non_fake_inputs=True):
        placed.model.to_empty(device=world.device)
        if isinstance(placed.forward_backward, PipelineForwardBackward):
            placed.forward_backward.world = world
        data = config.data
        rows = config.parallel.micro_batch_size or data.batch_size // world.data_size
        grid = (rows, data.seq_len)
        tokens = torch.zeros(grid, dtype=torch.int64, device=world.device)
        micro = MicroBatch(tokens, tokens, tokens if data.document_mask else None, tokens)
        num = data.batch_size // (world.data_size * rows)
        with unanimous_stages(), recorded_traffic(world) as found:
            placed.forward_backward([micro] * num, 1.0)
    return found


def _placed(model: Transformer, config: RunConfig, world: World) -> Placed:
    """Under its layout, but for offload, which would allocate."""

    def undrawn(_: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=world.device)

    parallel = replace(config.parallel, offload=False, compile="off")
    return apply_layout(model, parallel, world, draw=undrawn, fixed_order=True)
