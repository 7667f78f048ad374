"""Adam and AdamW with moments or weights held in bf16: computed in fp32, written back by stochastic rounding."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from surefoot.config.optim import Adam, AdamW
from surefoot.optim.elementwise import Elementwise, Piece, before_decay
from surefoot.optim.optimizer import Setting, Update


class NarrowAdam:
    """AdamW (arXiv:1711.05101 algorithm 2) or Adam (arXiv:1412.6980 algorithm 1); the update of a step is made of its moments before they
    are rounded. With beta2 = .999 a second moment rounded to the nearest bf16 stands still, since a step changes it by less than half a
    neighbour (as arXiv:2010.06192 finds of weights); rounded at random it goes on."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Mapping[str, Setting],
        config: AdamW | Adam,
        *,
        narrow_moments: bool,
    ) -> None:
        self.memory = Elementwise(parameters, settings, ("exp_avg", "exp_avg_sq"), narrow_moments=narrow_moments)
        self.parameters, self.config, self.beta2 = self.memory.parameters, config, config.beta2
        self.kind: str = config.kind

    def tensors(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def step_count(self) -> Tensor:
        return self.memory.step_count()

    def set_step_count(self, step: int) -> None:
        self.memory.steps = step

    def apply(self, update: Update) -> None:
        """The host reads ``skip``; gradients are divided by ``scale`` in place."""
        names = self.memory.begin(update)
        config = self.config
        first = 1.0 - config.beta1**self.memory.steps
        root = math.sqrt(1.0 - config.beta2**self.memory.steps)

        def move(piece: Piece) -> None:
            setting, weights, gradient, (mean, square) = piece.setting, piece.weights, piece.gradient, piece.moments
            rate = update.lr * setting.lr
            if isinstance(config, AdamW):
                weights.sub_(weights, alpha=rate * setting.weight_decay)
            elif setting.weight_decay:
                gradient = gradient.add(weights, alpha=setting.weight_decay)
            mean.lerp_(gradient, 1.0 - config.beta1)
            square.lerp_(gradient.square(), 1.0 - config.beta2)
            weights.addcdiv_(mean, square.sqrt().div_(root).add_(setting.eps), value=-rate / first)

        self.memory.change(names, move, update)

    def last_updates(self, names: Sequence[str], lr: float) -> list[Tensor]:
        """As rounded moments have it, the rounding of weights left out: right to a bf16 digit."""
        if not self.memory.steps:
            return [torch.full_like(weights, math.nan) for weights, *_ in self.memory.read(names)]
        first = 1.0 - self.config.beta1**self.memory.steps
        updates = []
        for name, (weights, mean, _), root in zip(
            names, self.memory.read(names), self.second_moments(names), strict=True
        ):
            setting = self.memory.settings[name]
            rate = lr * setting.lr
            change = mean.div(root.add_(setting.eps)).mul_(-rate / first)
            decay = rate * setting.weight_decay if isinstance(self.config, AdamW) else 0.0
            updates.append(before_decay(change, weights, decay))
        return updates

    def second_moments(self, names: Sequence[str]) -> list[Tensor]:
        correction = math.sqrt(1.0 - self.config.beta2**self.memory.steps) or math.nan
        return [square.sqrt().div_(correction) for _, _, square in self.memory.read(names)]
