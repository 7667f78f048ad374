"""How activations go over tensor parallel ranks: gathered, summed and cut again, each with the backward that belongs to it.

Functional collectives, which torch.compile traces, recomputation repeats and a copy of a module survives: a group is known by its name.
Forward and backward come in pairs (arXiv:2205.05198 section 4.2.2). What is whole is either summed over ranks in the backward, because
each rank went on with its own part of a product, or cut, because all ranks went on alike.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from surefoot.parallel.mesh import World

_collectives = torch.ops._c10d_functional
TOKENS = 1
"""The dim of tokens in (B, T, ...)."""


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that share out matrices, and which of them this is."""

    group: str
    """Name of their process group."""
    size: int
    rank: int

    @classmethod
    def of(cls, world: World) -> "TensorRanks":
        """The tensor parallel peers of this rank."""
        assert world.mesh is not None
        return cls(world.mesh.get_group("tp").group_name, world.layout.tp, world.place.tp)


def local_view(weight: Tensor) -> Tensor:
    """What this rank holds of a weight on the tensor parallel axis; its gradient is that of the part, complete."""
    return weight.to_local(grad_placements=weight.placements) if isinstance(weight, DTensor) else weight


def reduced(x: Tensor, op: str, ranks: TensorRanks) -> Tensor:
    """The sum or the maximum over ranks, the same bits on all; no gradient goes through it."""
    return cast(Tensor, _collectives.wait_tensor(_collectives.all_reduce(x.contiguous(), op, ranks.group)))


def _gathered(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    """The pieces of all ranks, one after another along a dim."""
    flat = _collectives.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.group)
    pieces: Tensor = _collectives.wait_tensor(flat).view(ranks.size, *x.shape)
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def _summed_piece(x: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's piece by tokens of the sum over ranks."""
    rows, tokens, *rest = x.shape
    pieces = x.reshape(rows, ranks.size, tokens // ranks.size, *rest).movedim(TOKENS, 0).contiguous().flatten(0, 1)
    scattered = _collectives.reduce_scatter_tensor(pieces, "sum", ranks.size, ranks.group)
    return cast(Tensor, _collectives.wait_tensor(scattered))


def _piece(x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    return x.chunk(ranks.size, dim)[ranks.rank].clone(memory_format=torch.contiguous_format)


class _GatherToShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _gathered(x, TOKENS, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed_piece(grad, ctx.ranks), None


class _SumToPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _summed_piece(x, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, TOKENS, ctx.ranks), None


class _GatherToRepeat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return _gathered(x, dim, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _piece(grad, ctx.dim, ctx.ranks), None, None


class _KeepPiece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return _piece(x, TOKENS, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, TOKENS, ctx.ranks), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return reduced(wide, "sum", ctx.ranks).to(grad.dtype), None


def gather_to_share(x_BTD: Tensor, ranks: TensorRanks) -> Tensor:
    """All tokens from every rank's piece, for a computation of which each rank does its own part: gradients are summed, and cut again."""
    return cast(Tensor, _GatherToShare.apply(x_BTD, ranks))  # type: ignore[no-untyped-call]


def sum_to_pieces(x_BTD: Tensor, ranks: TensorRanks) -> Tensor:
    """Of the sum of what ranks have of all tokens, this rank's piece; gradients are gathered. The inverse of ``gather_to_share``."""
    return cast(Tensor, _SumToPieces.apply(x_BTD, ranks))  # type: ignore[no-untyped-call]


def gather_to_repeat(x: Tensor, ranks: TensorRanks, dim: int = TOKENS) -> Tensor:
    """The whole from every rank's piece, for a computation that all ranks repeat: each has the whole gradient, and keeps its piece."""
    return cast(Tensor, _GatherToRepeat.apply(x, dim, ranks))  # type: ignore[no-untyped-call]


def keep_piece(x_BTD: Tensor, ranks: TensorRanks) -> Tensor:
    """This rank's piece of what all ranks have alike; gradients are gathered. The inverse of ``gather_to_repeat``."""
    return cast(Tensor, _KeepPiece.apply(x_BTD, ranks))  # type: ignore[no-untyped-call]


def sum_gradient(weight: Tensor, ranks: TensorRanks) -> Tensor:
    """A weight that every rank has whole, and uses on other tokens or heads: its gradient is summed, in fp32 at least."""
    return cast(Tensor, _SumGradient.apply(weight, ranks))  # type: ignore[no-untyped-call]
