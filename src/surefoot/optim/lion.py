"""Lion: every weight moves by the rate, in the direction of an interpolated momentum."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from surefoot.config.optim import Lion
from surefoot.optim.clip import local_part
from surefoot.optim.elementwise import Elementwise, Piece, before_decay, wide
from surefoot.optim.optimizer import Setting, Update


class LionRule:
    """arXiv:2302.06675 algorithm 2:

    c_t = beta1 m_{t-1} + (1 - beta1) g_t;   w_t = w_{t-1} - lr (sign(c_t) + decay w_{t-1});   m_t = beta2 m_{t-1} + (1 - beta2) g_t
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Mapping[str, Setting],
        config: Lion,
        *,
        narrow_moments: bool,
    ) -> None:
        self.memory = Elementwise(parameters, settings, ("exp_avg",), narrow_moments=narrow_moments)
        self.parameters, self.config, self.beta2 = self.memory.parameters, config, math.nan
        self.kind: str = config.kind
        self._moved: set[str] = set()

    def tensors(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def step_count(self) -> Tensor:
        return self.memory.step_count()

    def set_step_count(self, step: int) -> None:
        self.memory.steps = step
        self._moved = set()

    def apply(self, update: Update) -> None:
        """The host reads ``skip``; gradients are divided by ``scale`` in place."""
        names, config = self.memory.begin(update), self.config
        self._moved = set(names)

        def move(piece: Piece) -> None:
            rate, (mean,) = update.lr * piece.setting.lr, piece.moments
            direction = mean.lerp(piece.gradient, 1.0 - config.beta1).sign_()
            piece.weights.sub_(piece.weights, alpha=rate * piece.setting.weight_decay).sub_(direction, alpha=rate)
            mean.lerp_(piece.gradient, 1.0 - config.beta2)

        self.memory.change(names, move, update)

    def last_updates(self, names: Sequence[str], lr: float) -> list[Tensor]:
        """From the momentum that the applied gradient, still there, is taken back out of:

            c_t = beta1 / beta2 m_t + (1 - beta1 / beta2) g_t

        NaN where the gradient is gone or was refused, and with beta2 = 0, which forgets m_{t-1}. A sign whose argument is lost in
        rounding may come out as the other one: its size, the rate, is right.
        """
        ratio = self.config.beta1 / self.config.beta2 if self.config.beta2 else math.nan
        updates = []
        for name, (weights, mean) in zip(names, self.memory.read(names), strict=True):
            gradient, setting = self.parameters[name].grad, self.memory.settings[name]
            if gradient is None or name not in self._moved or math.isnan(ratio):
                updates.append(torch.full_like(weights, math.nan))
                continue
            rate = lr * setting.lr
            direction = mean.lerp(wide(local_part(gradient)), 1.0 - ratio).sign_()
            updates.append(before_decay(direction.mul_(-rate), weights, rate * setting.weight_decay))
        return updates

    def second_moments(self, names: Sequence[str]) -> None:
        return None
