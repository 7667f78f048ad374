"""States kept in memory: the nearest rollback targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.parallel.mesh import EnvironmentFault, World
from surefoot.parallel.reduce import max_over_ranks
from surefoot.train.state import TrainState

GIB = 1024**3


@dataclass(frozen=True)
class Snapshot:
    """A copy of one rank's state before a batch."""

    batch_index: int
    tensors: dict[str, Tensor]
    counters: dict[str, Any]


@dataclass
class SnapshotRing:
    """The newest ``capacity`` snapshots of this rank; the buffers of a dropped one are filled again."""

    capacity: int
    kept: list[Snapshot] = field(default_factory=list)
    """Oldest first."""

    def take(self, state: TrainState) -> None:
        """Copy the state as it is now, dropping the oldest copy when full."""
        if self.capacity == 0:
            return
        live = {name: _local(t) for name, t in state.tensors().items()}
        if len(self.kept) >= self.capacity:
            buffers = self.kept.pop(0).tensors
            for name, tensor in live.items():
                buffers[name].copy_(tensor)
        else:
            buffers = {name: tensor.clone() for name, tensor in live.items()}
        self.kept.append(Snapshot(state.batch_index, buffers, state.counters()))

    def newest_common(self, at_or_before: int, world: World) -> Snapshot | None:
        """The newest snapshot at or before a batch that every rank has; None, on every rank, when there is none."""
        mine = {s.batch_index: s for s in self.kept if s.batch_index <= at_or_before}
        limit = at_or_before
        while True:
            best = max((b for b in mine if b <= limit), default=-1)
            # -max(-x) is the minimum: the newest batch that no rank is already below
            low = -int(max_over_ranks([float(-best)], world)[0].item())
            high = int(max_over_ranks([float(best)], world)[0].item())
            if low < 0:
                return None
            if low == high:
                return mine[best]
            limit = low

    def restore(self, snapshot: Snapshot, state: TrainState) -> None:
        """Put a snapshot back, in place, and forget the later ones."""
        with torch.no_grad():
            for name, tensor in state.tensors().items():
                _local(tensor).copy_(snapshot.tensors[name])
        state.restore_counters(snapshot.counters)
        self.kept = [s for s in self.kept if s.batch_index <= snapshot.batch_index]

    def forget_after(self, batch_index: int) -> None:
        """Drop snapshots of batches beyond this one: they are no longer on the surviving path."""
        self.kept = [s for s in self.kept if s.batch_index <= batch_index]


def check_budget(tensors: Mapping[str, Tensor], capacity: int, budget_gib: float, world: World) -> float:
    """GiB of memory that ``capacity`` snapshots take on the rank where they take the most. Raises EnvironmentFault, on every rank, when that is
    over the budget. Collective."""
    mine = sum(_local(t).numel() * t.element_size() for t in tensors.values()) / GIB
    one = float(max_over_ranks([mine], world)[0].item())
    if one * capacity > budget_gib:
        fits = int(budget_gib / one)
        where = " on the rank that holds most" if world.size > 1 else ""
        raise EnvironmentFault(
            f"guard.snapshots={capacity} take {one * capacity:.2f} GiB{where}, over guard.snapshot_budget_gib={budget_gib:g}; "
            f"{fits} fit, or 0 goes back to checkpoints on disk only"
        )
    return one * capacity


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
