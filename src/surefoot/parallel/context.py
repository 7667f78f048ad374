"""Tokens of rows over context parallel ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.config.parallel import ParallelConfig
from surefoot.model.attention_backends import AttentionBackend, InSingle
from surefoot.model.transformer import Transformer, bare_kernel
from surefoot.parallel.context_operators import define_operator
from surefoot.parallel.context_pieces import Pieces, SharedRows, group_of
from surefoot.parallel.mesh import World
from surefoot.parallel.ring import RingAttention


def split_rows(model: Transformer, config: ParallelConfig, world: World) -> SharedRows:
    """Put a kernel that meets the other ranks' keys around the model's, and return how rows are cut for it.

    The weights are not concerned: context ranks hold the same ones, and their gradients are summed with those of data parallel ranks.
    """
    assert world.tokens is not None
    ring = config.cp_attention == "ring"
    pieces = Pieces(world.tokens["cp"].get_group().group_name, world.place.cp, config.cp, balanced=ring)

    def around(kernel: AttentionBackend) -> AttentionBackend:
        if ring:
            return RingAttention(pieces, in_single=isinstance(kernel, InSingle))
        return ExchangedHeads(kernel, pieces)

    model.around_kernel = around
    return SharedRows(pieces)


class ExchangedHeads:
    """A kernel for this rank's stretch of every row: it hands away the tokens of most heads for all tokens of a few (arXiv:2309.14509), so
    that any kernel sees whole rows. Every rank needs a key head at least."""

    def __init__(self, kernel: AttentionBackend, pieces: Pieces) -> None:
        self.kernel, self.pieces = kernel, pieces

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Any:
        """The kernel's own mask, of whole rows; ``like_BTD`` has this rank's tokens."""
        rows, tokens, _ = like_BTD.shape
        return self.kernel.prepare(documents_BT, like_BTD[:, :1].expand(rows, tokens * self.pieces.size, -1))

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Any) -> Tensor:
        (rows, tokens, heads, width), kv_heads, size = q_BTNH.shape, k_BSKH.shape[2], self.pieces.size
        if heads % size or kv_heads % size:
            raise ValueError(f"{heads} query and {kv_heads} key heads do not divide over {size} context parallel ranks")
        # all three cross together: for each rank its heads of q, then of k, then of v
        for_rank = [x.reshape(rows, tokens, size, -1, width) for x in (q_BTNH, k_BSKH, v_BSKH)]
        few_BTnH = _tokens_for_heads(torch.cat(for_rank, dim=3).view(rows, tokens, -1, width), self.pieces)
        q, k, v = torch.split(few_BTnH, [heads // size, kv_heads // size, kv_heads // size], dim=2)
        return _heads_for_tokens(self.kernel(q, k, v, mask), self.pieces)

    def whole(self, x_BTNH: Tensor) -> Tensor:
        """(B, T, heads, H) in the order of the row from every rank's (B, T/cp, heads, H), without gradient. Collective."""
        return self.pieces.whole(x_BTNH)


@contextmanager
def on_whole_rows(model: nn.Module) -> Iterator[None]:
    """Meanwhile every rank that is given whole rows computes them whole, by itself."""
    before = {part: part.around_kernel for part in model.modules() if isinstance(part, Transformer)}
    for part in before:
        part.around_kernel = bare_kernel
    try:
        yield
    finally:
        for part, around in before.items():
            part.around_kernel = around


def whole_heads(kernel: AttentionBackend, x_BTNH: Tensor) -> Tensor:
    """Queries or keys of whole rows, in their order and without gradient, from what a kernel is given. Collective where tokens lie over ranks."""
    return kernel.whole(x_BTNH) if isinstance(kernel, ExchangedHeads | RingAttention) else x_BTNH


def _tokens_for_heads(x_BTNH: Tensor, pieces: Pieces) -> Tensor:
    """(B, T/cp, N, H) to (B, T, N/cp, H)."""
    rows, tokens, _, width = x_BTNH.shape
    for_rank = x_BTNH.reshape(rows, tokens, pieces.size, -1, width).permute(2, 0, 1, 3, 4)
    received: Tensor = torch.ops.surefoot.exchange(for_rank, pieces.group_name)
    return received.transpose(0, 1).flatten(1, 2)


def _heads_for_tokens(x_BTNH: Tensor, pieces: Pieces) -> Tensor:
    """The inverse."""
    rows, tokens, heads, width = x_BTNH.shape
    for_rank = x_BTNH.reshape(rows, pieces.size, tokens // pieces.size, heads, width).transpose(0, 1)
    received: Tensor = torch.ops.surefoot.exchange(for_rank, pieces.group_name)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchange(for_rank: Tensor, group_name: str) -> Tensor:
    """Part r goes to rank r; what rank r sent is part r of the result, contiguous. Its gradient goes the same way back."""
    for_rank = for_rank.contiguous()
    received = torch.empty_like(for_rank)
    dist.all_to_all_single(received, for_rank, group=group_of(group_name))
    return received


def _like(for_rank: Tensor, group_name: str) -> Tensor:
    return for_rank.new_empty(for_rank.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.surefoot.exchange(grad, ctx.group_name), None


# one operator: torch.compile leaves it whole in its graph, and compiles the kernel beside it
define_operator("exchange", _exchange, _like, gradient=(_gradient, _keep))
