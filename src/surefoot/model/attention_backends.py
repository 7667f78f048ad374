"""The attention kernels, and the seam where another one plugs in."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

QUERY_BLOCK = 128
"""Queries whose scores the eager kernel holds at once; smaller skips more of the keys they cannot see, larger has bigger products."""


class AttentionBackend(Protocol):
    """A kernel. Which token sees which is decided once per forward, the weighted sum of values once per layer."""

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Any:
        """The mask all layers share: a token sees itself and the earlier tokens of its own document. No documents: plain causal.

        Blanked tokens (BLANK) form one document of their own: every token sees at least itself, so no softmax is empty.
        """

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Any) -> Tensor:
        """softmax(q k^T / sqrt(H)) v (arXiv:1706.03762 eq. 1) as B T N H; query head n reads key and value head n // (N/K)."""


class EagerAttention:
    """Batched products around a softmax, one block of queries after another.

    A block only meets the keys up to its own last token, so that most of what causality forbids is never computed. Scores and weights are
    rounded to the compute dtype, the softmax is computed in fp32. On CPU in bf16 about twice as fast as SDPA (docs/lab/LAB.md).
    """

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Tensor:
        """Added to the scores: 0 where visible, -inf elsewhere, (B or 1, 1, T, S)."""
        seen = visible(documents_BT, like_BTD)
        return torch.zeros(seen.shape, dtype=like_BTD.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor) -> Tensor:
        rows, tokens, heads, width = q_BTNH.shape
        keys, kv_heads = k_BSKH.shape[1:3]
        group = heads // kv_heads
        q = (q_BTNH * width**-0.5).view(rows, tokens, kv_heads, group, width).permute(0, 2, 3, 1, 4)
        k = k_BSKH.permute(0, 2, 3, 1).reshape(rows * kv_heads, width, keys)
        v = v_BSKH.transpose(1, 2).reshape(rows * kv_heads, keys, width)
        blocks = []
        for start in range(0, tokens, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, tokens)
            flat = (rows * kv_heads, group * (stop - start))
            scores = torch.bmm(q[:, :, :, start:stop].reshape(*flat, width), k[:, :, :stop])
            scores = scores.view(rows, heads, stop - start, stop) + mask[:, :, start:stop, :stop]
            weights = torch.softmax(scores, dim=-1).view(*flat, stop)
            blocks.append(torch.bmm(weights, v[:, :stop]).view(rows, heads, stop - start, width))
        return torch.cat(blocks, dim=2).transpose(1, 2)


class ScaledDotProduct:
    """torch's fused kernels; the choice on a GPU when rows are one document each."""

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Tensor | None:
        """True where visible, (B, 1, T, S); None lets the kernel skip the upper half by itself."""
        return None if documents_BT is None else visible(documents_BT, like_BTD)

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
        grouped = q_BTNH.shape[2] != k_BSKH.shape[2]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return out.transpose(1, 2)


class FlexAttention:
    """torch's flex_attention, which skips whole blocks of keys in other documents. GPU only: it has no backward on the CPU."""

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Any:
        """A BlockMask."""
        rows, tokens = like_BTD.shape[:2]

        def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query >= key

        def inside_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            assert documents_BT is not None
            return (query >= key) & (documents_BT[row, query] == documents_BT[row, key])

        rule, batch = (causal, None) if documents_BT is None else (inside_document, rows)
        return create_block_mask(rule, batch, None, tokens, tokens, device=str(like_BTD.device))

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
        grouped = q_BTNH.shape[2] != k_BSKH.shape[2]
        return cast(Tensor, _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=grouped)).transpose(1, 2)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    """flex_attention is only fast, and only memory-lean, when compiled; inside an already compiled block this is traced through."""
    return torch.compile(flex_attention, dynamic=False)


def choose_backend(
    name: Literal["auto", "eager", "sdpa", "flex"], device: torch.device, dtype: torch.dtype, documents: bool
) -> AttentionBackend:
    """The kernel of that name; auto is the fastest known for the device, the dtype and whether documents are masked."""
    if name == "auto":
        on_gpu = device.type == "cuda" and dtype != torch.float64
        name = ("flex" if documents else "sdpa") if on_gpu else "eager"
    if name == "flex" and device.type == "cpu":
        raise ValueError("model.attention_backend='flex' has no backward on the CPU; take 'auto', 'eager' or 'sdpa'")
    kinds: dict[str, type] = {"eager": EagerAttention, "sdpa": ScaledDotProduct, "flex": FlexAttention}
    return cast(AttentionBackend, kinds[name]())


def visible(documents_BT: Tensor | None, like_BTD: Tensor) -> Tensor:
    """(B or 1, 1, T, S), true where the query may see the key: same document, not later."""
    if documents_BT is None:
        tokens = like_BTD.shape[1]
        return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=like_BTD.device).tril()
    return (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()[:, None]
