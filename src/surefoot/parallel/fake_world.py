"""Rank 0 of a job of any size in one process: groups that exist by name only, whose collectives carry nothing and give nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from surefoot.config.layout import layout_of
from surefoot.config.parallel import ParallelConfig
from surefoot.parallel.mesh import EnvironmentFault, World


@contextmanager
def fake_world(config: ParallelConfig, size: int, device: torch.device) -> Iterator[World]:
    """The first of ``size`` ranks; what is computed on ``device`` may be meta. Only its own groups are made: a job of 16,384 ranks has as
    many groups of replicas. Raises EnvironmentFault where this process is in a group already, and leaves none behind."""
    if dist.is_initialized():
        raise EnvironmentFault("a layout is planned by one process alone: start it without torchrun")
    if size == 1:
        yield World(rank=0, size=1, device=device, mesh=None)
        return
    layout = layout_of(config, size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        weights = {"pp": layout.pp, "replicate": layout.replicate, "shard": layout.shard, "tp": layout.tp}
        tokens = {"pp": layout.pp, "data": layout.data, "cp": layout.cp, "tp": layout.tp}
        yield World(
            rank=0,
            size=size,
            device=device,
            mesh=_mesh_of_first_rank(weights),
            tokens=_mesh_of_first_rank(tokens),
            layout=layout,
        )
    finally:
        dist.destroy_process_group()


def _mesh_of_first_rank(axes: dict[str, int]) -> DeviceMesh:
    mesh = torch.arange(dist.get_world_size()).view(tuple(axes.values()))
    groups = []
    for at in range(len(axes)):
        peers = mesh[tuple(slice(None) if axis == at else 0 for axis in range(len(axes)))]
        groups.append(dist.new_group(peers.tolist(), backend="fake", use_local_synchronization=True))
    return DeviceMesh.from_group(groups, "cpu", mesh, mesh_dim_names=tuple(axes))


@contextmanager
def unanimous_stages() -> Iterator[None]:
    """Spares a pipeline its vote before the first step, whether all ranks know their shapes: no rank answers here, and ours do."""
    voting = _PipelineSchedule._warmup_p2p

    def agreed(_: object, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    _PipelineSchedule._warmup_p2p = agreed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _PipelineSchedule._warmup_p2p = voting  # type: ignore[method-assign]


def local_bytes(tensor: Tensor) -> int:
    """Of what this rank holds of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def unsharded_shape(parameter: Tensor) -> tuple[int, ...]:
    """On one tensor parallel rank, whole over the data parallel ones."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            placement = parameter.placements[axis]
            if name == "tp" and not placement.is_replicate():
                shape[placement.dim] //= mesh.size(axis)  # type: ignore[attr-defined]
    return tuple(shape)
