"""The largest attention logit of every query head, exact where a cheap bound says that it may be above a threshold."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from surefoot.model.attention_backends import AttentionBackend

SLACK = 1e-4
"""Relative rounding of norms and of products in fp32: a sum of H terms errs by H/2 units in the last place, 1.5e-5 at H = 256."""
LOGITS = 1 << 22
"""Most logits that exist at once; at least LEAST_QUERIES queries are taken together."""
LEAST_QUERIES = 16


WholeHeads = Callable[[AttentionBackend, Tensor], Tensor]
"""What a kernel is given, as it stands in whole rows."""


def as_given(kernel: AttentionBackend, x_BTNH: Tensor) -> Tensor:
    """Rows are whole."""
    return x_BTNH


class AttentionMaxima:
    """Largest logits by layer and query head, over the forwards of one step on this rank.

    A logit counts as the softmax sees it, q k / sqrt(H) with every multiplier, between tokens that see each other and are not blanked.
    Heads whose bound is not above ``threshold`` are not looked at: their largest stays -inf.
    """

    def __init__(
        self,
        threshold: float,
        num_layers: int,
        num_heads: int,
        *,
        compiled: bool = False,
        first_head: int = 0,
        whole_heads: WholeHeads = as_given,
    ) -> None:
        """``compiled``: blocks are, and must leave their graph to show their queries and keys. ``first_head``: of those that are seen here."""
        self.threshold, self.shape = threshold, (num_layers, num_heads)
        self.first_head, self.whole_heads = first_head, whole_heads
        self.watching = False
        """A forward that begins now counts."""
        self.largest_LN = torch.full(self.shape, -math.inf, dtype=torch.float64)
        self.see: Callable[[Tensor, Tensor], None] = self._see
        """What an attention hands its kernel: queries (B, T, N, H) and keys (B, S, K, H), layer after layer."""
        if compiled:
            self.see = torch.compiler.disable(self._see)  # type: ignore[no-untyped-call]
        self._open = False
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._layers: Sequence[int] = ()
        self._kernel: AttentionBackend | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """The forwards inside count, and no others: ``largest_LN`` is theirs when it ends."""
        self.watching = True
        self.largest_LN = torch.full(self.shape, -math.inf, dtype=torch.float64)
        try:
            yield
        finally:
            self.watching, self._open = False, False
            self._seen.clear()

    def begin(self, layers: Sequence[int], kernel: AttentionBackend) -> None:
        """A forward through these layers begins, with this kernel."""
        self._open, self._layers, self._kernel = True, layers, kernel
        self._seen.clear()

    def settle(self, documents_BT: Tensor | None) -> None:
        """The forward is over: read all bounds at once, and compute what is above. What a backward computes again is not looked at."""
        self._open = False
        seen, self._seen = self._seen, []
        self.largest_LN = self.largest_LN.to(seen[0][0].device)
        bounds_LN = torch.stack([bounds_N for *_, bounds_N in seen]).tolist()
        for layer, (q_BTNH, k_BSKH, _), bounds_N in zip(self._layers, seen, bounds_LN, strict=True):
            # a bound that is NaN comes with a loss that is NaN, and nothing is to be known
            heads = [head for head, bound in enumerate(bounds_N) if bound > self.threshold]
            if heads:
                found = largest_logits(q_BTNH, k_BSKH, documents_BT, heads)
                at = [self.first_head + head for head in heads]
                self.largest_LN[layer, at] = torch.maximum(self.largest_LN[layer, at], found.double())

    def _see(self, q_BTNH: Tensor, k_BSKH: Tensor) -> None:
        """No copies: kernels keep both for their backward anyway."""
        if self._open:
            assert self._kernel is not None
            with torch.no_grad():
                q_BTNH, k_BSKH = (self.whole_heads(self._kernel, x.detach()) for x in (q_BTNH, k_BSKH))
                self._seen.append((q_BTNH, k_BSKH, logit_bounds(q_BTNH, k_BSKH)))


def logit_bounds(q_BTNH: Tensor, k_BSKH: Tensor) -> Tensor:
    """(N,), no logit of the head is larger: the longest query times the longest key of each row, over sqrt(H); fp32 at least.

    Norms rather than the log-sum-exp, which of our kernels only flex_attention hands out: elsewhere it costs a pass over all T x S scores,
    10 to 100 % of the kernel's forward on a CPU, and norms 0.1 to 8 %. They are close where it matters: 1.1 to 2.6 times the largest
    logit, 1.3 in the middle, in a run whose logits grew to 5,000 (d_model 128, 4 layers, rate 3e-2).
    """
    wide = torch.promote_types(q_BTNH.dtype, torch.float32)
    q_BN, k_BK = (torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax(1) for x in (q_BTNH, k_BSKH))
    k_BN = k_BK.repeat_interleave(q_BN.shape[1] // k_BK.shape[1], dim=1)
    bounds_N: Tensor = (q_BN * k_BN).amax(0) * (q_BTNH.shape[-1] ** -0.5 * (1 + SLACK))
    return bounds_N


@torch.no_grad()
def largest_logits(q_BTNH: Tensor, k_BSKH: Tensor, documents_BT: Tensor | None, heads: Sequence[int]) -> Tensor:
    """Largest logit of each of some query heads over the pairs that see each other, fp32 at least: a block of queries after another.

    -inf where all tokens are blanked, NaN where a logit is.
    """
    wide = torch.promote_types(q_BTNH.dtype, torch.float32)
    rows, tokens, num_heads, width = q_BTNH.shape
    group = num_heads // k_BSKH.shape[2]
    q_BnTH = q_BTNH[:, :, list(heads)].to(wide).transpose(1, 2) * width**-0.5
    k_BnHS = k_BSKH[:, :, [head // group for head in heads]].to(wide).permute(0, 2, 3, 1)
    at_T = torch.arange(tokens, device=q_BTNH.device)
    top: Tensor = q_BnTH.new_full((len(heads),), -math.inf)
    step = max(LEAST_QUERIES, LOGITS // (rows * len(heads) * tokens))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        logits = q_BnTH[:, :, start:stop] @ k_BnHS[..., :stop]
        hidden = (at_T[:stop] > at_T[start:stop, None])[None]
        if documents_BT is not None:
            own = documents_BT[:, start:stop, None]
            hidden = hidden | (own != documents_BT[:, None, :stop]) | (own < 0)
        top = torch.maximum(top, logits.masked_fill_(hidden[:, None], -math.inf).amax((0, 2, 3)))
    return top
