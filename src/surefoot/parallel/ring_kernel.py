"""Attention of the queries of one chunk of a row to the keys of another, in a form that adds up over chunks of keys."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.model.attention_backends import MAX_BLOCKS, QUERY_BLOCK

SCORES = 1 << 22
"""Most scores that exist at once; at least LEAST_QUERIES queries are taken together."""
LEAST_QUERIES = 16


class Pair(NamedTuple):
    """What is known of a chunk of queries and one of keys that is not later: the rule of ``attention_backends.visible``."""

    documents: tuple[Tensor, Tensor] | None
    """Document numbers of the queries and of the keys, (B, C) each; None where every row is one document."""
    same: bool
    """Both are the same chunk, so that the later keys are hidden; all keys of an earlier chunk come before all queries."""

    def hide(self, scores: Tensor, start: int) -> Tensor:
        """-inf where queries from ``start`` on may not see the key; scores (B K, G, C', S), a new tensor where anything is hidden."""
        (queries, keys), device = scores.shape[2:], scores.device
        hidden = None
        if self.documents is not None:
            mine, theirs = self.documents
            hidden = mine[:, start : start + queries, None] != theirs[:, None, :keys]
        if self.same:
            later = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(start + 1)[None]
            hidden = later if hidden is None else hidden | later
        if hidden is None:
            return scores
        by_row = scores.view(len(hidden), -1, *scores.shape[1:])
        return by_row.masked_fill(hidden[:, None, None], float("-inf")).view_as(scores)


def attend(q: Tensor, k: Tensor, v: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    """softmax(q k^T) v over the keys of this chunk alone (B K, G, C, H), and the log-sum-exp of its scores (B K, G, C, 1).

    q (B K, G, C, H) with 1/sqrt(H) in it; k and v (B K, C, H), read by all G query heads. Scores and weights are rounded to the dtype of q,
    the softmax and both results are in fp32 (fp64 for fp64). A query that sees no key gets 0 and -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, dtype=wide)
    lse = out.new_empty((*q.shape[:-1], 1))
    for start, stop, keys in _blocks(q, pair):
        scores = _scores(q, k, pair, start, stop, keys).to(wide)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == float("-inf"), 0.0)
        weights = (scores - top).exp_()
        # the largest term is 1: only where nothing is seen is the sum less
        total = weights.sum(-1, keepdim=True)
        values = torch.bmm(weights.to(q.dtype).flatten(1, 2), v[:, :keys]).view(*weights.shape[:3], -1)
        out[:, :, start:stop] = values / total.clamp_min(1.0)
        lse[:, :, start:stop] = total.log_() + top
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Take further keys into attention that has seen some, in place: a mean weighted by what each part's softmax was divided by
    (arXiv:2310.01889 section 3). Every query must have seen a key already."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_()).add_(more * (more_lse - total).exp_())
    lse.copy_(total)


class Upstream(NamedTuple):
    """What the gradients of every pair with these queries need, (B K, G, C, .) each."""

    grad: Tensor
    """Of the output, in the dtype of q."""
    along: Tensor
    """Its product with the output, summed over the head, fp32 at least (arXiv:2205.14135 appendix B.4)."""
    lse: Tensor
    """Of all scores of the query, over all chunks."""


def add_gradients(
    q: Tensor, k: Tensor, v: Tensor, pair: Pair, upstream: Upstream, into: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add what this pair contributes to the gradients of q, k and v, in fp32 or wider, computing its scores again.

    Weights and the scores' gradients are rounded to the dtype of q for the products.
    """
    grad_q, grad_k, grad_v = into
    for start, stop, keys in _blocks(q, pair):
        block = slice(start, stop)
        weights = (_scores(q, k, pair, start, stop, keys).to(upstream.lse.dtype) - upstream.lse[:, :, block]).exp_()
        rows, grad = q[:, :, block].flatten(1, 2), upstream.grad[:, :, block].flatten(1, 2)
        grad_weights = torch.bmm(grad, v[:, :keys].transpose(1, 2)).view_as(weights)
        grad_v[:, :keys] += torch.bmm(weights.to(q.dtype).flatten(1, 2).transpose(1, 2), grad)
        grad_scores = weights.mul_(grad_weights - upstream.along[:, :, block]).to(q.dtype).flatten(1, 2)
        grad_q[:, :, block] += torch.bmm(grad_scores, k[:, :keys]).view_as(grad_q[:, :, block])
        grad_k[:, :keys] += torch.bmm(grad_scores.transpose(1, 2), rows)


def _blocks(q: Tensor, pair: Pair) -> Iterator[tuple[int, int, int]]:
    """First query, the one after the last, and how many keys they meet."""
    batch, group, chunk, _ = q.shape
    step = max(LEAST_QUERIES, SCORES // (batch * group * chunk))
    if pair.same:
        # smaller ones skip more of the keys they cannot see
        step = min(step, max(QUERY_BLOCK, -(-chunk // MAX_BLOCKS)))
    for start in range(0, chunk, step):
        stop = min(start + step, chunk)
        yield start, stop, stop if pair.same else chunk


def _scores(q: Tensor, k: Tensor, pair: Pair, start: int, stop: int, keys: int) -> Tensor:
    """(B K, G, C', S), in the dtype of q, hidden ones -inf."""
    block = q[:, :, start:stop]
    scores = torch.bmm(block.flatten(1, 2), k[:, :keys].transpose(1, 2)).view(*block.shape[:3], keys)
    return pair.hide(scores, start)
