"""QK-clip: after an update, heads whose largest attention logit was too large have their queries and keys scaled back (Kimi K2)."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from surefoot.config.layout import Layout
from surefoot.config.model import GroupedQueryAttention, ModelConfig
from surefoot.model.attention_maxima import AttentionMaxima
from surefoot.optim.clip import local_part
from surefoot.parallel.boxes import box_of
from surefoot.parallel.context import whole_heads

SINGLE = Layout()


class QKClip:
    """Query and key matrices by layer, and the largest logits that are watched for them (arXiv:2507.20534 section 2.1).

    Where key heads are shared, scaling one would bend the other heads that read it, so the query alone takes all of it.
    """

    def __init__(
        self,
        threshold: float,
        attention: GroupedQueryAttention,
        layers: Mapping[int, tuple[Tensor, Tensor]],
        maxima: AttentionMaxima,
    ) -> None:
        """``layers``: weights of query (N H, D) and key (K H, D) of the layers that this rank has, plain or in shards."""
        self.threshold, self.maxima = threshold, maxima
        self.layers, self.d_head = dict(layers), attention.d_head
        self.shared = attention.num_kv_heads != attention.num_heads

    @torch.no_grad()
    def apply(self, largest_LN: Sequence[Sequence[float]]) -> int:
        """Scale back every head whose largest logit is finite and above the threshold, and count them, those of other stages too; all others
        keep their bits.

        Weights are rounded to nearest, bf16 ones too. Moments are left alone.
        """
        clipped = 0
        for layer, largest_N in enumerate(largest_LN):
            for head, largest in enumerate(largest_N):
                if not self.threshold < largest < math.inf:
                    continue
                clipped += 1
                if layer not in self.layers:
                    continue
                query, key = self.layers[layer]
                if self.shared:
                    self._scale(query, head, self.threshold / largest)
                else:
                    self._scale(query, head, math.sqrt(self.threshold / largest))
                    self._scale(key, head, math.sqrt(self.threshold / largest))
        return clipped

    def _scale(self, weight: Tensor, head: int, factor: float) -> None:
        """The rows of one head, as far as this rank holds them."""
        local = local_part(weight)
        before, held = (of[0] for of in (box_of(weight).offsets, local.shape))
        first, last = (min(max(row - before, 0), held) for row in (head * self.d_head, (head + 1) * self.d_head))
        local[first:last].mul_(factor)


def build_qk_clip(
    parameters: Mapping[str, nn.Parameter],
    model: ModelConfig,
    threshold: float,
    *,
    compiled: bool,
    layout: Layout = SINGLE,
    tp_rank: int = 0,
) -> QKClip | None:
    """Over the built-in attention of every block that this rank has; None where ``threshold`` is 0. ``compiled``: blocks are."""
    if threshold == 0 or not isinstance(model.attention, GroupedQueryAttention):
        return None
    names = {layer: f"blocks.{layer}.attention" for layer in range(model.num_layers)}
    layers = {
        layer: (parameters[f"{name}.query.weight"], parameters[f"{name}.key.weight"])
        for layer, name in names.items()
        if f"{name}.query.weight" in parameters
    }
    num_heads = model.attention.num_heads
    maxima = AttentionMaxima(
        threshold,
        model.num_layers,
        num_heads,
        compiled=compiled,
        first_head=tp_rank * num_heads // layout.tp,
        whole_heads=whole_heads,
    )
    return QKClip(threshold, model.attention, layers, maxima)


def watched(clip: QKClip | None) -> AbstractContextManager[None]:
    """The forwards of a step whose update may be applied."""
    return nullcontext() if clip is None else clip.maxima.watch()
