"""Attention whose keys and values go round the ranks that share a row (arXiv:2310.01889), balanced for causal masks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.model.attention_backends import heads_first, heads_last
from surefoot.parallel.context_operators import define_operator
from surefoot.parallel.context_pieces import Pieces
from surefoot.parallel.ring_kernel import Pair, Upstream, add_gradients, attend, merge


class RingAttention:
    """A kernel for this rank's two chunks of every row (``Pieces.balanced``): the other ranks' keys and values come by, one rank's at a time,
    and the next ones travel while the present ones are looked at.

    A rank holds its own keys and those in transit, never a whole row's. Pairs of chunks that causality forbids are not computed; of the
    others every rank has 2 cp + 1. Partial results are merged by their log-sum-exp in fp32 (fp64 for fp64). The backward computes scores
    again and sends keys round once more, gradients with them. Products and softmax are the same plain ones on every device
    (``ring_kernel``): on a GPU slower than a flash kernel.
    """

    def __init__(self, pieces: Pieces, *, in_single: bool = False) -> None:
        """``in_single``: compute in fp32 what comes narrower, as the model's own kernel does where narrow products are slow."""
        self.pieces, self.in_single = pieces, in_single

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Tensor | None:
        """The documents, of whole rows: masks are made block by block."""
        return documents_BT

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None) -> Tensor:
        dtype, pieces = q_BTNH.dtype, self.pieces
        if self.in_single:
            q_BTNH, k_BSKH, v_BSKH = q_BTNH.float(), k_BSKH.float(), v_BSKH.float()
        out_BTNH: Tensor = torch.ops.surefoot.ring(
            q_BTNH, k_BSKH, v_BSKH, mask, pieces.group_name, pieces.rank, pieces.size
        )[0]
        return out_BTNH.to(dtype)

    def whole(self, x_BTNH: Tensor) -> Tensor:
        """(B, T, heads, H) in the order of the row from every rank's (B, T/cp, heads, H), without gradient. Collective."""
        return self.pieces.whole(x_BTNH)


def pairs(pieces: Pieces, step: int) -> list[tuple[int, int]]:
    """Places of a query chunk and of a key chunk, 0 or 1 in each rank's order, that a rank multiplies after ``step`` hand-overs: all but
    those whose keys are later. At step 0 every query meets itself first."""
    queries, keys = pieces.chunks(pieces.rank), pieces.chunks(_holder(pieces, step))
    allowed = [(i, j) for i, query in enumerate(queries) for j, key in enumerate(keys) if key <= query]
    return sorted(allowed, key=lambda at: keys[at[1]] != queries[at[0]])


def _holder(pieces: Pieces, step: int) -> int:
    """Whose keys this rank has after ``step`` hand-overs."""
    return (pieces.rank - step) % pieces.size


def what_is_seen(documents_BT: Tensor | None, pieces: Pieces, step: int, at: tuple[int, int]) -> Pair:
    """Of the chunks at these places after ``step`` hand-overs."""
    query, key = pieces.chunks(pieces.rank)[at[0]], pieces.chunks(_holder(pieces, step))[at[1]]
    if documents_BT is None:
        return Pair(None, query == key)
    numbers = documents_BT.chunk(pieces.num_chunks, dim=1)
    return Pair((numbers[query], numbers[key]), query == key)


@dataclass
class _Passing:
    """A tensor on its way to the next rank, and the one that comes from the rank before."""

    coming: Tensor
    leaving: Tensor
    """Held until it is gone."""
    works: list[dist.Work]

    def arrived(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.coming


def _pass_on(x: Tensor, pieces: Pieces) -> _Passing:
    """Start to send to the next rank, and to receive as much from the one before. All ranks call this in the same order."""
    coming = torch.empty_like(x)
    after, before = (pieces.rank + 1) % pieces.size, (pieces.rank - 1) % pieces.size
    operations = [
        dist.P2POp(dist.isend, x, group=pieces.group, group_peer=after),
        dist.P2POp(dist.irecv, coming, group=pieces.group, group_peer=before),
    ]
    return _Passing(coming, x, dist.batch_isend_irecv(operations))


def _ring(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, documents_BT: Tensor | None, group_name: str, rank: int, size: int
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries, and the log-sum-exp of their scores (B K, G, T/cp, 1).

    Queries lie as (B K, G, 2 C, H), keys and values together as (2, B K, 2 C, H).
    """
    pieces, kv_heads = Pieces(group_name, rank, size, balanced=True), k_BSKH.shape[2]
    q_of, kv = _scaled(q_BTNH, kv_heads).chunk(2, dim=2), _together(k_BSKH, v_BSKH)
    merged: list[tuple[Tensor, Tensor]] = []
    for step in range(size):
        passing = _pass_on(kv, pieces) if step < size - 1 else None
        for i, j in pairs(pieces, step):
            k, v = kv.chunk(2, dim=2)[j]
            found = attend(q_of[i], k, v, what_is_seen(documents_BT, pieces, step, (i, j)))
            if step == 0 and i == j:
                merged.append(found)
            else:
                merge(*merged[i], *found)
        if passing is not None:
            kv = passing.arrived()
    out, lse = (torch.cat(halves, dim=2) for halves in zip(*merged, strict=True))
    return _finished(out, q_BTNH), lse


def _ring_backward(
    grad_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    documents_BT: Tensor | None,
    out_BTNH: Tensor,
    lse: Tensor,
    group_name: str,
    rank: int,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Those of keys and values follow them round, one hand-over behind, added to in fp32 (fp64 for fp64)."""
    pieces, kv_heads = Pieces(group_name, rank, size, balanced=True), k_BSKH.shape[2]
    q, kv, grad = _scaled(q_BTNH, kv_heads), _together(k_BSKH, v_BSKH), heads_first(grad_BTNH, kv_heads)
    along = (grad.to(lse.dtype) * heads_first(out_BTNH, kv_heads)).sum(-1, keepdim=True)
    upstream = [Upstream(*halves) for halves in zip(*(x.chunk(2, dim=2) for x in (grad, along, lse)), strict=True)]
    q_of, grad_q = q.chunk(2, dim=2), torch.zeros_like(q, dtype=lse.dtype)
    returning: _Passing | None = None
    for step in range(size):
        passing = _pass_on(kv, pieces) if step < size - 1 else None
        grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
        for i, j in pairs(pieces, step):
            (k, v), pair = kv.chunk(2, dim=2)[j], what_is_seen(documents_BT, pieces, step, (i, j))
            grad_k, grad_v = grad_kv.chunk(2, dim=2)[j]
            add_gradients(q_of[i], k, v, pair, upstream[i], (grad_q.chunk(2, dim=2)[i], grad_k, grad_v))
        if returning is not None:
            # what the ranks before have added for these keys came while this rank's part was computed
            grad_kv += returning.arrived()
        returning = _pass_on(grad_kv, pieces)
        if passing is not None:
            kv = passing.arrived()
    assert returning is not None
    # that of the keys has the queries' 1/sqrt(H) in it already
    grad_q.mul_(q.shape[-1] ** -0.5)
    grad_k, grad_v = returning.arrived()[:, :, None]
    return _finished(grad_q, q_BTNH), _finished(grad_k, k_BSKH), _finished(grad_v, v_BSKH)


def _scaled(q_BTNH: Tensor, kv_heads: int) -> Tensor:
    q: Tensor = heads_first(q_BTNH, kv_heads)
    return q * q_BTNH.shape[-1] ** -0.5  # type: ignore[no-any-return]


def _together(k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
    return torch.stack([heads_first(x, x.shape[2])[:, 0] for x in (k_BSKH, v_BSKH)])


def _finished(x: Tensor, like_BTNH: Tensor) -> Tensor:
    """In the dtype and shape of another, contiguous and new, as operators' results have to be."""
    x_BTNH: Tensor = heads_last(x.to(like_BTNH.dtype), len(like_BTNH))
    return x_BTNH.clone(memory_format=torch.contiguous_format)


def _shapes(q_BTNH: Tensor, k_BSKH: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, tokens, heads = q_BTNH.shape[:3]
    kv_heads = k_BSKH.shape[2]
    wide = torch.promote_types(q_BTNH.dtype, torch.float32)
    lse = q_BTNH.new_empty((rows * kv_heads, heads // kv_heads, tokens, 1), dtype=wide)
    return q_BTNH.new_empty(q_BTNH.shape), lse


def _shapes_backward(_: Tensor, *qkv: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in qkv[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.place = inputs[4:]


def _gradients(ctx: Any, grad_BTNH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.surefoot.ring_backward(grad_BTNH, *ctx.saved_tensors, *ctx.place), None, None, None, None)


# one operator: torch.compile leaves it whole in its graph, and recomputation computes it again as a whole
define_operator("ring", _ring, _shapes, gradient=(_gradients, _keep))
define_operator("ring_backward", _ring_backward, _shapes_backward)
RING = torch.ops.surefoot.ring.default
"""Attention and log-sum-exp, for policies that go by operator."""
