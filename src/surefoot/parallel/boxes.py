"""What ranks hold of a tensor: boxes, cut out of the whole along its dims.

The tensor is cut dim by dim, along one axis of its mesh after the other, into pieces of equal length (rounded up, so that the last may be
shorter or empty). Where FSDP2 shards what tensor parallelism has cut along the same dim, its axis comes first in the mesh and last in the
cutting: the placement is then a ``_StridedShard``, whose ``split_factor`` is the number of pieces that are there already. It is no
subclass of ``Shard``, and its ``is_shard()`` is False.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard


@dataclass(frozen=True)
class Box:
    """A part of a tensor: of every dim a stretch. Elements are counted row after row, in the box and in the whole."""

    whole: tuple[int, ...]
    """Shape of the tensor."""
    offsets: tuple[int, ...]
    """In an empty box they say nothing."""
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the whole."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def run(self) -> int:
        """Elements that follow one another in the whole as they do in the box, from one gap to the next; ``numel`` where there is none."""
        cut = [dim for dim, size in enumerate(self.sizes) if size != self.whole[dim]]
        return math.prod(self.sizes[cut[-1] :]) if cut else self.numel

    @property
    def first(self) -> int:
        """Place in the whole of its first element."""
        return sum(offset * step for offset, step in zip(self.offsets, _steps(self.whole), strict=True))

    def places(self, held: Tensor) -> Tensor:
        """Places in the whole of the elements at these places in the box (int64, any shape)."""
        found = torch.full_like(held, self.first)
        rest = held
        for size, step in zip(reversed(self.sizes), reversed(_steps(self.whole)), strict=True):
            found += (rest % size) * step
            rest = rest // size
        return found

    def held(self, places: Tensor) -> Tensor:
        """Places in the box of those of the elements at these places in the whole that lie in it, in their order (int64, one dim)."""
        inside = torch.ones_like(places, dtype=torch.bool)
        found = torch.zeros_like(places)
        steps = _steps(self.whole)
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            at = places // steps[dim] % self.whole[dim] - offset
            inside &= (at >= 0) & (at < size)
            found = found * size + at
        return found[inside]


def box_of(tensor: Tensor) -> Box:
    """What this rank holds of a tensor: a plain one is whole. Raises ValueError for partial sums, and where the rank is not of its mesh."""
    if not isinstance(tensor, DTensor):
        return Box(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is none of the {tensor.device_mesh.size()} that a tensor is placed on")
    return cut_box(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tensor.placements, coordinate)


def boxes_over(tensor: DTensor) -> list[Box]:
    """What every rank of the tensor's mesh holds of it, in the order of the mesh, row after row: arithmetic, no word to other ranks."""
    axes = tuple(tensor.device_mesh.shape)
    coordinates = itertools.product(*(range(size) for size in axes))
    return [cut_box(tuple(tensor.shape), axes, tensor.placements, at) for at in coordinates]


def cut_box(
    whole: tuple[int, ...], axes: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Box:
    """What the rank at a coordinate of a mesh with so many ranks along each axis holds of a tensor of this shape."""
    offsets, sizes = [0] * len(whole), list(whole)
    for axis in _in_order(axes, placements):
        dim = dim_cut_by(placements[axis])
        assert dim is not None
        length = -(-sizes[dim] // axes[axis])
        start = min(length * coordinate[axis], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(length, sizes[dim] - start)
    return Box(whole, tuple(offsets), tuple(sizes))


def dim_cut_by(placement: Placement) -> int | None:
    """The dim that an axis cuts a tensor along; None where it holds replicas. Raises ValueError for partial sums."""
    if isinstance(placement, Shard | _StridedShard):
        return placement.dim
    if placement.is_partial():
        raise ValueError(f"a tensor placed as {placement} is a partial sum, of which no rank holds a part")
    return None


def _in_order(axes: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The axes that cut, in the order in which they do: a strided one after as many later ones of its dim as its factor speaks of."""
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if dim_cut_by(placement) is None:
            continue
        ahead, pieces = 0, 1
        while isinstance(placement, _StridedShard) and pieces < placement.split_factor and ahead < len(order):
            if dim_cut_by(placements[order[ahead]]) == placement.dim:
                pieces *= axes[order[ahead]]
            ahead += 1
        if isinstance(placement, _StridedShard) and pieces != placement.split_factor:
            raise ValueError(
                f"placements {tuple(placements)} on a mesh of {tuple(axes)}: what a rank holds is no box, since "
                f"{placement} is not cut after axes of {placement.split_factor} ranks"
            )
        order.insert(ahead, axis)
    return order


def _steps(whole: tuple[int, ...]) -> list[int]:
    """Of every dim how far apart in the whole two neighbours along it are."""
    return [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
