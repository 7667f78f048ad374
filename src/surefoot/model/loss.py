"""Next-token cross-entropy in nats, with the output projection folded in so that all logits never exist at once."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""A target that is not predicted."""
CPU_ROWS = 128
"""Rows of logits whose softmax is computed at once on the CPU: 2 MB in fp32 at 4,096 ids, about the second-level cache."""


class LossSums(NamedTuple):
    """Sums over the targets of one micro-batch, not divided: the caller knows the global count. All but ``objective`` are detached."""

    objective: Tensor
    """What is minimised: ce_sum + z_loss * z_sum."""
    ce_sum: Tensor
    """Cross-entropy in nats."""
    z_sum: Tensor
    """Squared log-normaliser of the logits (arXiv:2204.02311 section 5)."""
    lse_sum: Tensor
    """Log-normaliser of the logits."""
    lse_max: Tensor
    """Its largest value; -inf where nothing is predicted."""
    token_losses_BT: Tensor
    """Cross-entropy of each token, 0 where nothing is predicted."""


class NextTokenLoss(Protocol):
    """Cross-entropy of logits hidden weight^T, and its sums."""

    def __call__(
        self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, *, z_loss: float, chunk_tokens: int
    ) -> LossSums: ...


Normalise = Callable[[Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
"""Logits (rows, V), labels (rows, 1), which rows count, and the weight of the squared log-normaliser, or None where no gradient is wanted,
to the log-normaliser and the label's logit of each row. With a weight the logits become their own gradient, in place."""


def next_token_loss(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    z_loss: float,
    chunk_tokens: int,
    normalise: Normalise | None = None,
) -> LossSums:
    """Cross-entropy of logits hidden weight^T, and z_loss times the squared log-normaliser.

    Gradients are computed chunk by chunk along with the loss, when any is needed. Precision: the product is rounded to the dtype of hidden
    (as a plain ``F.linear`` is); normaliser, losses and sums are fp32; the logits' gradient is rounded to the dtype of hidden for its two
    products, whose results are summed over chunks in fp32 for the weight. In fp64 everything is fp64. Tokens with target IGNORE contribute
    nothing, whatever their hidden state holds. ``normalise``: for logits that are not the whole vocabulary's; None is ``_normalise``.
    """
    needs_grad = torch.is_grad_enabled() and (hidden_BTD.requires_grad or weight_VD.requires_grad)
    flat = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    outputs = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, weight_VD, targets_BT.reshape(-1), z_loss, chunk_tokens, needs_grad, normalise or _normalise
    )
    objective, ce_sum, z_sum, lse_sum, lse_max, losses = outputs
    return LossSums(objective, ce_sum, z_sum, lse_sum, lse_max, losses.view(targets_BT.shape))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The backward only scales what the forward already computed: the objective is a scalar, so its gradient is known up to a factor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_loss: float,
        chunk_tokens: int,
        needs_grad: bool,
        normalise: Normalise,
    ) -> tuple[Tensor, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        valid = targets != IGNORE
        # dropped before any product: a NaN in an ignored row would otherwise reach the weight's gradient as 0 x NaN
        hidden = torch.where(valid[:, None], hidden, 0)
        labels = torch.where(valid, targets, 0)[:, None]
        product_weight = weight.to(hidden.dtype)
        losses, normalisers = hidden.new_empty((2, len(targets)), dtype=wide)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs_grad else None
        # one buffer for all chunks: on CPU fresh pages cost more than the arithmetic
        buffer = hidden.new_empty(min(chunk_tokens, len(targets)), len(weight))
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            rows = hidden[chunk]
            logits = torch.mm(rows, product_weight.t(), out=buffer[: len(rows)])
            lse, picked = normalise(logits, labels[chunk], valid[chunk], z_loss if needs_grad else None)
            losses[chunk] = torch.where(valid[chunk], lse - picked, 0)
            normalisers[chunk] = torch.where(valid[chunk], lse, 0)
            if grad_hidden is not None and grad_weight is not None:
                torch.mm(logits, product_weight, out=grad_hidden[chunk])
                grad_weight += logits.t() @ rows
        ce_sum, z_sum = losses.sum(), normalisers.square().sum()
        lse_max = torch.where(valid, normalisers, float("-inf")).max()
        outputs = (ce_sum + z_loss * z_sum, ce_sum, z_sum, normalisers.sum(), lse_max, losses)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.weight_dtype = weight.dtype
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if scale is None:
            return (None,) * 7
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = (grad_hidden * scale.to(grad_hidden.dtype), (grad_weight * scale).to(ctx.weight_dtype))
        return (*scaled, None, None, None, None, None)


def _normalise(logits: Tensor, labels: Tensor, valid: Tensor, z_loss: float | None) -> tuple[Tensor, Tensor]:
    """Log-normaliser and label's logit of each row, in fp32 or wider; with ``z_loss``, turns the logits into their gradient in place.

    d(ce + z lse^2)/d logits = softmax (1 + 2 z lse) - onehot. A few rows at a time on the CPU, so that the passes hit the cache.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    rows_at_once = CPU_ROWS if logits.device.type == "cpu" else len(logits)
    lse, picked = logits.new_empty((2, len(logits), 1), dtype=wide)
    scratch = logits.new_empty((rows_at_once, logits.shape[1]), dtype=wide) if logits.dtype != wide else None
    for start in range(0, len(logits), rows_at_once):
        some = slice(start, start + rows_at_once)
        narrow, label = logits[some], labels[some]
        largest = narrow.amax(dim=1, keepdim=True).to(wide)
        values = narrow if scratch is None else scratch[: len(narrow)].copy_(narrow)
        picked[some] = values.gather(1, label)
        total = values.sub_(largest).exp_().sum(dim=1, keepdim=True)
        lse[some] = largest + total.log()
        if z_loss is not None:
            counted = valid[some, None].to(wide)
            values.mul_(counted * (1 + 2 * z_loss * lse[some]) / total).scatter_add_(1, label, -counted)
            if scratch is not None:
                narrow.copy_(values)
    return lse[:, 0], picked[:, 0]
