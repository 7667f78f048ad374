"""The attention kernels, and the seam where another one plugs in."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

QUERY_BLOCK = 64
"""Fewest queries whose scores the eager kernel holds at once; smaller skips more of the keys they cannot see, larger has bigger products."""
MAX_BLOCKS = 8
"""Most blocks a row is cut into: the gradient of keys and values is summed over blocks in the dtype of the queries, one rounding each."""


class AttentionBackend(Protocol):
    """A kernel. Which token sees which is decided once per forward, the weighted sum of values once per layer."""

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Any:
        """The mask all layers share: a token sees itself and the earlier tokens of its own document. No documents: plain causal.

        ``like_BTD``: rows, tokens, dtype and device of what comes; its values and its last dim mean nothing. Blanked tokens (BLANK) form one document of their own: every token sees at least itself, so no softmax is empty.
        """

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Any) -> Tensor:
        """softmax(q k^T / sqrt(H)) v (arXiv:1706.03762 eq. 1) as B T N H; query head n reads key and value head n // (N/K)."""


class EagerAttention:
    """Batched products around a softmax, one block of queries after another.

    A block only meets the keys up to its own last token, so that most of what causality forbids is never computed. Scores, weights and
    their gradients are rounded to the dtype of the queries, the softmax is computed in fp32 (as transformers' eager attention does).
    On the CPU in bf16 about twice as fast as SDPA, in fp32 a little faster (benchmarks/model_parts.py).
    """

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Tensor:
        """Added to the scores: 0 where visible, -inf elsewhere, (B or 1, 1, T, S)."""
        seen = visible(documents_BT, like_BTD)
        return torch.zeros(seen.shape, dtype=like_BTD.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor) -> Tensor:
        return cast(Tensor, _BlockedAttention.apply(q_BTNH, k_BSKH, v_BSKH, mask))  # type: ignore[no-untyped-call]


class _BlockedAttention(torch.autograd.Function):
    """Queries and keys lie as (B K, G, T, H) and (B K, S, H): the G query heads of one key head are rows of one product.

    Written out because autograd pads the gradient of every block's keys to full length and adds: a fifth of the time.
    """

    @staticmethod
    def forward(ctx: Any, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor) -> Tensor:
        (rows, tokens, heads, width), kv_heads = q_BTNH.shape, k_BSKH.shape[2]
        q = heads_first(q_BTNH, kv_heads) * width**-0.5
        k, v = heads_first(k_BSKH, kv_heads)[:, 0], heads_first(v_BSKH, kv_heads)[:, 0]
        out = torch.empty_like(q)
        kept = []
        step = max(QUERY_BLOCK, -(-tokens // MAX_BLOCKS))
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            q_block = q[:, :, start:stop].flatten(1, 2)
            scores = torch.bmm(q_block, k[:, :stop].transpose(1, 2))
            scores.view(rows, heads, stop - start, stop).add_(mask[:, :, start:stop, :stop])
            kept.append(torch.softmax(scores, dim=-1))
            out[:, :, start:stop] = torch.bmm(kept[-1], v[:, :stop]).view_as(out[:, :, start:stop])
        ctx.save_for_backward(q, k, v, *kept)
        return heads_last(out, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        rows = grad_BTNH.shape[0]
        grad = heads_first(grad_BTNH, k.shape[0] // rows)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        start = 0
        for weights in kept:
            stop = weights.shape[2]
            q_block, grad_block = q[:, :, start:stop].flatten(1, 2), grad[:, :, start:stop].flatten(1, 2)
            grad_weights = torch.bmm(grad_block, v[:, :stop].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            grad_q[:, :, start:stop] = torch.bmm(grad_scores, k[:, :stop]).view_as(grad_q[:, :, start:stop])
            grad_k[:, :stop] += torch.bmm(grad_scores.transpose(1, 2), q_block)
            grad_v[:, :stop] += torch.bmm(weights.transpose(1, 2), grad_block)
            start = stop
        grad_q = heads_last(grad_q.mul_(q.shape[-1] ** -0.5), rows)
        return grad_q, heads_last(grad_k[:, None], rows), heads_last(grad_v[:, None], rows), None


def heads_first(x_BTNH: Tensor, kv_heads: int) -> Tensor:
    """(B K, G, T, H), contiguous."""
    rows, tokens, heads, width = x_BTNH.shape
    grouped = x_BTNH.reshape(rows, tokens, kv_heads, heads // kv_heads, width).permute(0, 2, 3, 1, 4)
    return grouped.reshape(rows * kv_heads, heads // kv_heads, tokens, width).contiguous()


def heads_last(x: Tensor, rows: int) -> Tensor:
    """The inverse: (B, T, N, H), contiguous."""
    group, tokens, width = x.shape[1:]
    return x.view(rows, -1, group, tokens, width).permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1, width)


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


class InSingle:
    """A kernel given its inputs in fp32, its result rounded back: CPUs without fp16 units multiply fp16 a hundred times slower."""

    def __init__(self, kernel: AttentionBackend) -> None:
        self.kernel = kernel

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Any:
        """The kernel's own mask, for fp32."""
        return self.kernel.prepare(documents_BT, like_BTD.float())

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Any) -> Tensor:
        return self.kernel(q_BTNH.float(), k_BSKH.float(), v_BSKH.float(), mask).to(q_BTNH.dtype)


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
    kernel = cast(AttentionBackend, kinds[name]())
    return InSingle(kernel) if device.type == "cpu" and dtype == torch.float16 else kernel


def visible(documents_BT: Tensor | None, like_BTD: Tensor) -> Tensor:
    """(B or 1, 1, T, S), true where the query may see the key: same document, not later."""
    if documents_BT is None:
        tokens = like_BTD.shape[1]
        return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=like_BTD.device).tril()
    return (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()[:, None]
