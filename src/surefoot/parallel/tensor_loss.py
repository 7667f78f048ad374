"""Logits whose vocabulary lies over tensor parallel ranks (arXiv:1909.08053 section 3)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.model.loss import LossSums, next_token_loss
from surefoot.model.parts import plain_product
from surefoot.model.transformer import Transformer
from surefoot.parallel.tensor_tokens import TensorRanks, gather_to_repeat, gather_to_share, local_view, reduced


@dataclass(frozen=True)
class VocabularyLoss:
    """Cross-entropy of all tokens from the logits of this rank's rows of the vocabulary: the sums have the same bits on every rank."""

    ranks: TensorRanks

    def __call__(
        self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, *, z_loss: float, chunk_tokens: int
    ) -> LossSums:
        """``hidden_BTD``: of this rank's tokens; the targets are those of all."""
        return next_token_loss(
            gather_to_share(hidden_BTD, self.ranks),
            local_view(weight_VD),
            targets_BT,
            z_loss=z_loss,
            chunk_tokens=chunk_tokens,
            normalise=self._normalise,
        )

    def _normalise(self, logits: Tensor, labels: Tensor, valid: Tensor, z_loss: float | None) -> tuple[Tensor, Tensor]:
        """Two collectives for a chunk of tokens: the largest logit, then the sum of exponentials with the label's logit."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        num_rows = logits.shape[1]
        at = labels - self.ranks.rank * num_rows
        here = (at >= 0) & (at < num_rows)
        at = at.clamp(0, num_rows - 1)
        # the same tensor where it is wide enough, and then turned into its gradient like the one below
        values = logits.to(wide)
        picked = torch.where(here, values.gather(1, at), 0)
        largest = reduced(values.amax(dim=1, keepdim=True), "max", self.ranks)
        # a NaN may get lost in the maximum; its exponential does not get lost in the sum
        total = values.sub_(largest).exp_().sum(dim=1, keepdim=True)
        total, picked = reduced(torch.stack([total, picked]), "sum", self.ranks).unbind()
        lse = largest + total.log()
        if z_loss is not None:
            counted = valid[:, None].to(wide)
            values.mul_(counted * (1 + 2 * z_loss * lse) / total).scatter_add_(1, at, -counted * here)
            if values is not logits:
                logits.copy_(values)
        return lse[:, 0], picked[:, 0]


@dataclass(frozen=True)
class VocabularyProduct:
    """All logits of all tokens, from this rank's tokens and rows of the vocabulary; ranks are taken to go on alike with them."""

    ranks: TensorRanks

    def __call__(self, input: Tensor, weight: Tensor) -> Tensor:
        some_BTV = plain_product(gather_to_share(input, self.ranks), local_view(weight))
        return gather_to_repeat(some_BTV, self.ranks, dim=2)


def take_any_length(model: Transformer, ranks: TensorRanks) -> None:
    """Have a model give logits for any number of tokens: it is handed some more, behind the others, whose logits are cut off again.

    Causal attention keeps them from those before. With targets the number of tokens must divide over the ranks.
    """
    asked: list[int] = []

    def lengthened(_: nn.Module, args: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        asked.clear()
        if len(args) < 3 or any(x is not None for x in args[3:]):
            return None
        tokens_BT = args[0]
        assert tokens_BT is not None
        missing = -tokens_BT.shape[1] % ranks.size
        if not missing:
            return None
        asked.append(tokens_BT.shape[1])
        return tuple(None if x is None else F.pad(x, (0, missing)) for x in args)

    def shortened(_: nn.Module, args: tuple[Tensor | None, ...], out: Tensor | LossSums) -> Tensor | LossSums:
        return out[:, : asked.pop()] if asked and isinstance(out, Tensor) else out

    model.register_forward_pre_hook(lengthened)
    model.register_forward_hook(shortened)
