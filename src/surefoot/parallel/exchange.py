"""Work on whole matrices, shared out over ranks: pieces go to the rank that works on their matrix, and results come back as pieces."""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor

from surefoot.parallel.boxes import Box, box_of, boxes_over


class Matrix(NamedTuple):
    """Rows ``start`` to ``stop`` of a tensor (of one part of a stack of matrices, where it has three dims), and the rank that works on them."""

    tensor: int
    """Place of the tensor in the list."""
    part: int
    start: int
    stop: int
    columns: int
    owner: int


class Window(NamedTuple):
    """Rows ``top`` to ``bottom`` and columns ``left`` to ``right`` of a matrix, counted from its own first."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left


Pieces = list[tuple[Matrix, Window]]


@dataclass(frozen=True)
class Peers:
    """The ranks that share out the work on some tensors."""

    rank: int = 0
    """This one's place among them."""
    size: int = 1
    axes: tuple[int, ...] = ()
    """Ranks along each axis of the tensors' mesh; empty where they are plain."""
    group: GroupName | None = None
    """Name of their process group; None is all ranks. A name: an object that outlives the group aborts the process."""
    device: torch.device | None = None
    """Where they meet; None is where the tensors lie."""


def peers_of(tensors: Sequence[Tensor], *, replicas: int = 1) -> Peers:
    """The ranks of the tensors' mesh, or all ``replicas`` that hold plain ones alike; 1 shares with none. Collective over the mesh, and
    silent to ranks outside of it.

    Raises ValueError where tensors lie on several meshes, or only some on one.
    """
    placed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if placed and len(placed) < len(tensors):
        raise ValueError(f"{len(placed)} of {len(tensors)} tensors are on a mesh: all are, or none")
    if not placed:
        if replicas == 1:
            return Peers()
        if not dist.is_initialized() or dist.get_world_size() != replicas:
            raise ValueError(f"replicas={replicas} is not the number of ranks that there are")
        return Peers(rank=dist.get_rank(), size=replicas)
    mesh = placed[0].device_mesh
    for tensor in placed:
        if tensor.device_mesh != mesh:
            raise ValueError(f"tensors lie on {mesh} and on {tensor.device_mesh}: work is shared out over one mesh")
    ranks, device = mesh.mesh.flatten().tolist(), torch.device(mesh.device_type)
    group = None
    if ranks != list(range(dist.get_world_size())):
        patience = dist.group.WORLD._get_backend(device).options._timeout if dist.group.WORLD is not None else None
        made = dist.new_group(ranks, timeout=patience, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        group = made.group_name
    return Peers(ranks.index(dist.get_rank()), len(ranks), tuple(mesh.shape), group, device)


class MatrixExchange:
    """Who works on which matrix of some tensors, and how it gets there and back, however the tensors lie over their mesh.

    Every matrix is worked on once, so that all ranks hold the same bits of it. A piece that several ranks hold comes from the one that
    is nearest to the matrix's owner, and goes back to all of them. Both ways are collective over the peers; of tensors that are whole on
    every rank only the results travel.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[Sequence[int]],
        cost: Callable[[int, int], float],
        peers: Peers,
    ) -> None:
        """``tensors``: of two or three dims, on the peers' mesh. ``rows``: of each matrix of every tensor, in order, along its last dim but
        one and over the stack. ``cost``: of a matrix of so many rows and columns, by which work is shared out."""
        self.peers = peers
        cuts: list[tuple[int, int, int, int]] = []
        for place, (tensor, lengths) in enumerate(zip(tensors, rows, strict=True)):
            end = 0
            for length in lengths:
                part, start = divmod(end, tensor.shape[-2])
                cuts.append((place, part, start, start + length))
                end += length
        columns = [tensor.shape[-1] for tensor in tensors]
        owners = share_out([cost(stop - start, columns[at]) for at, _, start, stop in cuts], peers.size)
        self.matrices = [
            Matrix(at, part, start, stop, columns[at], owner)
            for (at, part, start, stop), owner in zip(cuts, owners, strict=True)
        ]
        self.work: list[list[Matrix]] = [[] for _ in range(peers.size)]
        """The matrices of every rank."""
        for matrix in self.matrices:
            self.work[matrix.owner].append(matrix)
        boxes = [boxes_over(t) if isinstance(t, DTensor) else [box_of(t)] * peers.size for t in tensors]
        self._held = [held[peers.rank] for held in boxes]
        self.is_whole = all(box.sizes == box.whole for held in boxes for box in held)
        """Whether every rank holds everything."""
        ranks = range(0 if self.is_whole else peers.size)
        mine = self.work[peers.rank]
        self._parts_here = [_windows(self.work[owner], boxes, peers.rank) for owner in ranks]
        """Of the matrices of every rank what this one holds."""
        self._parts_there = [_windows(mine, boxes, rank) for rank in ranks]
        """Of the matrices that this rank works on what every one holds."""
        coordinates = list(itertools.product(*(range(size) for size in peers.axes)))
        holders = [_holders(held) for held in boxes]

        def is_source(rank: int, matrix: Matrix) -> bool:
            alike = holders[matrix.tensor][boxes[matrix.tensor][rank]]
            return rank == _nearest(coordinates[matrix.owner], alike, coordinates)

        self._given = [[piece for piece in of if is_source(peers.rank, piece[0])] for of in self._parts_here]
        """What of it this rank gives to the owners."""
        self._taken = [
            [piece for piece in of if is_source(rank, piece[0])] for rank, of in enumerate(self._parts_there)
        ]
        """What this rank takes from every one, once each."""

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The whole matrices (rows, columns) that this rank works on, from what each rank holds of the tensors; on the peers' device."""
        parts = [part.to(self.peers.device or part.device) for part in parts]
        mine = self.work[self.peers.rank]
        if self.is_whole:
            return [self._within(parts, matrix, _all_of(matrix)) for matrix in mine]
        out = [[self._within(parts, *piece) for piece in given] for given in self._given]
        arrived = self._swap(out, self._taken, parts[0].new_empty(0))
        found = {matrix: parts[0].new_empty(_all_of(matrix).shape) for matrix in mine}
        for (matrix, window), piece in arrived:
            found[matrix][window.top : window.bottom, window.left : window.right] = piece
        return [found[matrix] for matrix in mine]

    def spread(
        self, results: Sequence[Tensor], factors: Sequence[float], like: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """What this rank holds of the tensors (shapes, dtypes and devices of ``like``): the results of all ranks, in ``dtype``, each times its
        factor.

        ``results``: of the matrices that ``gather`` gave. ``factors``: one for each of ``matrices``.
        """
        mine, empty = self.work[self.peers.rank], like[0].new_empty(0, dtype=dtype, device=self.peers.device)
        if self.peers.size == 1:
            arrived = [((matrix, _all_of(matrix)), result) for matrix, result in zip(mine, results, strict=True)]
        elif self.is_whole:
            arrived = self._to_all(results, empty)
        else:
            mine_done = dict(zip(mine, results, strict=True))
            out = [
                [mine_done[m][window.top : window.bottom, window.left : window.right] for m, window in of]
                for of in self._parts_there
            ]
            arrived = self._swap(out, self._parts_here, empty)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in like]
        scales = dict(zip(self.matrices, factors, strict=True))
        for (matrix, window), piece in arrived:
            self._within(parts, matrix, window).copy_(piece).mul_(scales[matrix])
        return parts

    def _swap(
        self, out: Sequence[Sequence[Tensor]], due: Sequence[Pieces], empty: Tensor
    ) -> list[tuple[tuple[Matrix, Window], Tensor]]:
        """Send ``out[r]`` to rank r; what is ``due`` here from each rank. ``empty``: of their dtype and device."""
        flat = torch.cat([empty, *(piece.reshape(-1) for pieces in out for piece in pieces)])
        sent = [sum(piece.numel() for piece in pieces) for pieces in out]
        lengths = [sum(math.prod(window.shape) for _, window in of) for of in due]
        arrived = flat.new_empty(sum(lengths))
        dist.all_to_all_single(arrived, flat, lengths, sent, group=self._group())
        return _cut(arrived, [piece for of in due for piece in of])

    def _to_all(self, results: Sequence[Tensor], empty: Tensor) -> list[tuple[tuple[Matrix, Window], Tensor]]:
        """The results of every rank, on every rank: each sends as much as the one that has most."""
        pieces = [[(matrix, _all_of(matrix)) for matrix in work] for work in self.work]
        lengths = [sum(math.prod(window.shape) for _, window in of) for of in pieces]
        everyone = empty.new_zeros((self.peers.size, max(lengths)))
        mine = torch.cat([empty, *(result.reshape(-1) for result in results)])
        mine = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
        dist.all_gather(list(everyone.unbind()), mine, group=self._group())
        shares = zip(everyone, lengths, pieces, strict=True)
        return [found for row, length, of in shares for found in _cut(row[:length], of)]

    def _group(self) -> dist.ProcessGroup | None:
        return None if self.peers.group is None else _resolve_process_group(self.peers.group)

    def _within(self, parts: Sequence[Tensor], matrix: Matrix, window: Window) -> Tensor:
        """The window of a matrix, which this rank holds, as a view of what it holds of the tensors."""
        box = self._held[matrix.tensor]
        part, top, _ = _in_stack(box.offsets, 0)
        local = parts[matrix.tensor].reshape(_in_stack(box.sizes, 1))[matrix.part - part]
        start = matrix.start - top
        return local[start + window.top : start + window.bottom]  # a window has all columns of its box


def share_out(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each piece of work: the dearest first, always to the rank that has least to do (Graham 1969, at most 4/3 of the best)."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        load, owners[place] = heapq.heappop(loads)
        heapq.heappush(loads, (load + costs[place], owners[place]))
    return owners


def _windows(matrices: Sequence[Matrix], boxes: Sequence[Sequence[Box]], rank: int) -> Pieces:
    """What a rank holds of these matrices, those left out of which it holds nothing."""
    found = []
    for matrix in matrices:
        box = boxes[matrix.tensor][rank]
        part, top, left = _in_stack(box.offsets, 0)
        parts, height, width = _in_stack(box.sizes, 1)
        first, last = max(top, matrix.start), min(top + height, matrix.stop)
        if part <= matrix.part < part + parts and first < last and width:
            found.append((matrix, Window(first - matrix.start, last - matrix.start, left, left + width)))
    return found


def _holders(boxes: Sequence[Box]) -> dict[Box, list[int]]:
    """The ranks that hold each box."""
    found: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        found.setdefault(box, []).append(rank)
    return found


def _nearest(owner: tuple[int, ...], ranks: Sequence[int], coordinates: Sequence[tuple[int, ...]]) -> int:
    """Of these ranks the one that differs from the owner latest, in the order of axes: the last ones are the neighbours."""
    return min(ranks, key=lambda rank: [mine != other for mine, other in zip(coordinates[rank], owner, strict=True)])


def _in_stack(numbers: tuple[int, ...], missing: int) -> tuple[int, int, int]:
    """Numbers by dim of a matrix or of a stack of them, as of a stack."""
    part, row, column = numbers if len(numbers) == 3 else (missing, *numbers)
    return part, row, column


def _all_of(matrix: Matrix) -> Window:
    return Window(0, matrix.stop - matrix.start, 0, matrix.columns)


def _cut(flat: Tensor, pieces: Pieces) -> list[tuple[tuple[Matrix, Window], Tensor]]:
    """What lies in a row, as matrices."""
    parts = torch.split(flat, [math.prod(window.shape) for _, window in pieces])
    return [(piece, part.view(piece[1].shape)) for piece, part in zip(pieces, parts, strict=True)]
