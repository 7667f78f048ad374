"""Work on whole matrices, shared out over ranks: rows go to the rank that works on their matrix, and results come back as rows."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Matrix:
    """Rows ``start`` to ``stop`` of a tensor taken as rows (all dims but the last flattened), and the rank that works on them."""

    tensor: int
    """Place of the tensor in the list."""
    start: int
    stop: int
    columns: int
    owner: int


class MatrixExchange:
    """Who works on which matrix of some tensors, and how it gets there and back.

    Sharded tensors (DTensors cut on dim 0 over one axis) send rows to and fro; of replicated ones each rank has all, and results go
    to all. Every matrix is worked on once, so that all ranks hold the same bits of it. Both ways are collective, over the ranks of
    the tensors' mesh or over all ``replicas``.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[Sequence[int]],
        cost: Callable[[int, int], float],
        *,
        replicas: int = 1,
    ) -> None:
        """``rows``: of each matrix of every tensor, in order. ``cost``: of a matrix of so many rows and columns, by which work is shared out.
        ``replicas``: ranks that hold plain tensors alike; 1 works on all of them without a word to others.

        Raises ValueError for tensors that are placed in another way.
        """
        sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if sharded and len(sharded) < len(tensors):
            raise ValueError(f"{len(sharded)} of {len(tensors)} tensors are sharded: all are, or none")
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size, self.sharded = 0, replicas, bool(sharded)
        if sharded:
            mesh = sharded[0].device_mesh
            for tensor in sharded:
                if tensor.device_mesh != mesh or mesh.ndim != 1 or tensor.placements != (Shard(0),):
                    raise ValueError(
                        f"a tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} on {tensor.device_mesh}: "
                        "matrices are gathered from rows that one axis shards"
                    )
            self.rank, self.size, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
        elif replicas > 1:
            if not dist.is_initialized() or dist.get_world_size() != replicas:
                raise ValueError(f"replicas={replicas} is not the number of ranks that there are")
            self.rank = dist.get_rank()
        self.columns = [tensor.shape[-1] for tensor in tensors]
        self._held = [self._held_by(tensor) for tensor in tensors]
        cuts = []
        for place, lengths in enumerate(rows):
            ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
            cuts += [(place, end - length, end) for length, end in zip(lengths, ends, strict=True)]
        owners = share_out([cost(stop - start, self.columns[place]) for place, start, stop in cuts], self.size)
        self.matrices = [
            Matrix(place, start, stop, self.columns[place], owner)
            for (place, start, stop), owner in zip(cuts, owners, strict=True)
        ]
        self.work = [[m for m in self.matrices if m.owner == rank] for rank in range(self.size)]
        """The matrices of every rank."""

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The whole matrices (rows, columns) that this rank works on, from what each rank holds of the tensors."""
        flat = [part.reshape(-1, columns) for part, columns in zip(parts, self.columns, strict=True)]
        mine = self.work[self.rank]
        if not self.sharded or self.size == 1:
            return [flat[m.tensor][m.start : m.stop] for m in mine]
        out = [[flat[m.tensor][self._place(m)] for m in work] for work in self.work]
        shapes = [[(_length(self._within(m, rank)), m.columns) for m in mine] for rank in range(self.size)]
        arrived = self._swap(out, shapes, parts[0].new_empty(0))
        return [torch.cat(pieces) for pieces in zip(*arrived, strict=True)]

    def spread(
        self, results: Sequence[Tensor], factors: Sequence[float], like: Sequence[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """What this rank holds of the tensors (shapes and dtypes of ``like``): the results of all ranks, in ``dtype``, each times its factor.

        ``results``: of the matrices that ``gather`` gave. ``factors``: one for each of ``matrices``.
        """
        rows = self._rows_held(results, like[0].new_empty(0, dtype=dtype))
        parts = [torch.empty_like(part) for part in like]
        flat = [part.view(-1, columns) for part, columns in zip(parts, self.columns, strict=True)]
        for matrix, factor in zip(self.matrices, factors, strict=True):
            flat[matrix.tensor][self._place(matrix)].copy_(rows[matrix]).mul_(factor)
        return parts

    def _rows_held(self, results: Sequence[Tensor], empty: Tensor) -> dict[Matrix, Tensor]:
        """Of every matrix's result the rows that this rank holds."""
        ranks, mine = range(self.size), self.work[self.rank]
        if self.size == 1:
            arrived = [list(results)]
        elif self.sharded:
            out = [[r[self._within(m, rank)] for m, r in zip(mine, results, strict=True)] for rank in ranks]
            shapes = [[(_length(self._within(m, self.rank)), m.columns) for m in work] for work in self.work]
            arrived = self._swap(out, shapes, empty)
        else:
            arrived = self._to_all(results, empty)
        pairs = zip(self.work, arrived, strict=True)
        return {matrix: piece for work, pieces in pairs for matrix, piece in zip(work, pieces, strict=True)}

    def _swap(self, out: Sequence[Sequence[Tensor]], shapes: Sequence[Shapes], empty: Tensor) -> list[list[Tensor]]:
        """Send ``out[r]`` to rank r; what each rank sent here, in these shapes. ``empty``: of their dtype and device."""
        flat = torch.cat([empty, *(piece.reshape(-1) for pieces in out for piece in pieces)])
        sent = [sum(piece.numel() for piece in pieces) for pieces in out]
        due = [sum(rows * columns for rows, columns in of) for of in shapes]
        arrived = flat.new_empty(sum(due))
        dist.all_to_all_single(arrived, flat, due, sent, group=self.group)
        return [_cut(piece, of) for piece, of in zip(torch.split(arrived, due), shapes, strict=True)]

    def _to_all(self, results: Sequence[Tensor], empty: Tensor) -> list[list[Tensor]]:
        """The results of every rank, on every rank: each sends as much as the one that has most."""
        shapes = [[(m.stop - m.start, m.columns) for m in work] for work in self.work]
        due = [sum(rows * columns for rows, columns in of) for of in shapes]
        everyone = empty.new_zeros((self.size, max(due)))
        mine = torch.cat([empty, *(result.reshape(-1) for result in results)])
        dist.all_gather(list(everyone.unbind()), torch.nn.functional.pad(mine, (0, max(due) - len(mine))))
        return [_cut(row[:length], of) for row, length, of in zip(everyone, due, shapes, strict=True)]

    def _within(self, matrix: Matrix, rank: int) -> slice:
        """The rows of a matrix that a rank holds, counted from its first."""
        first, last = self._held[matrix.tensor][rank]
        start = max(first, matrix.start)
        return slice(start - matrix.start, max(min(last, matrix.stop), start) - matrix.start)

    def _place(self, matrix: Matrix) -> slice:
        """Where the rows of a matrix that this rank holds stand among all rows that it holds of the tensor."""
        within, first = self._within(matrix, self.rank), self._held[matrix.tensor][self.rank][0]
        offset = matrix.start - first
        return slice(0, 0) if _length(within) == 0 else slice(within.start + offset, within.stop + offset)

    def _held_by(self, tensor: Tensor) -> list[tuple[int, int]]:
        """First and last row (exclusive) of a tensor that each rank holds."""
        folded = math.prod(tensor.shape[1:-1])
        if not isinstance(tensor, DTensor):
            return [(0, tensor.shape[0] * folded)] * self.size
        length = -(-tensor.shape[0] // self.size)
        ends = [min(length * rank, tensor.shape[0]) * folded for rank in range(self.size + 1)]
        return list(pairwise(ends))


def share_out(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each piece of work: the dearest first, always to the rank that has least to do (Graham 1969, at most 4/3 of the best)."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        load, owners[place] = heapq.heappop(loads)
        heapq.heappush(loads, (load + costs[place], owners[place]))
    return owners


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _cut(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    pieces = torch.split(flat, [rows * columns for rows, columns in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
