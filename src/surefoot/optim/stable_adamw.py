"""StableAdamW: AdamW whose rate is divided, tensor by tensor, by how far the second moment lags behind the gradient."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from surefoot.config.optim import StableAdamW
from surefoot.optim.elementwise import Elementwise, Piece, before_decay
from surefoot.optim.optimizer import Setting, Update
from surefoot.parallel.reduce import sum_over_shards


class StableAdamWRule:
    """arXiv:2304.13013 algorithm 2, with u_t the second moment:

    b_t = beta (1 - beta^(t-1)) / (1 - beta^t);   m_t = b1_t m_{t-1} + (1 - b1_t) g_t;   u_t = b2_t u_{t-1} + (1 - b2_t) g_t^2
    RMS_t = sqrt(mean(g_t^2 / max(u_t, eps^2)));   lr_t = lr / max(1, RMS_t)
    w_t = w_{t-1} - lr_t decay w_{t-1} - lr_t m_t / (sqrt(u_t) + eps)

    As published, decay follows the divided rate too. The mean is over the whole tensor, whatever its sharding; a matrix that stacks
    several is one tensor. Moments are free of bias as they are stored.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Mapping[str, Setting],
        config: StableAdamW,
        *,
        narrow_moments: bool,
    ) -> None:
        self.memory = Elementwise(parameters, settings, ("exp_avg", "exp_avg_sq"), narrow_moments=narrow_moments)
        self.parameters, self.config, self.beta2 = self.memory.parameters, config, config.beta2
        self.kind: str = config.kind
        self._divisors: dict[str, float] = {}
        """max(1, RMS_t) of the update that was asked for last; empty where it was refused."""

    def tensors(self) -> dict[str, Tensor]:
        return self.memory.tensors()

    def step_count(self) -> Tensor:
        return self.memory.step_count()

    def set_step_count(self, step: int) -> None:
        self.memory.steps = step
        self._divisors = {}

    def apply(self, update: Update) -> None:
        """The host reads ``skip``; gradients are divided by ``scale`` in place. Collective: one sum for all tensors."""
        names = self.memory.begin(update)
        if not names:
            self._divisors = {}
            return
        beta1, beta2 = (_without_bias(beta, self.memory.steps) for beta in (self.config.beta1, self.config.beta2))
        divisors = self._divisors = self._lags(names, beta2)

        def move(piece: Piece) -> None:
            setting, weights, gradient, (mean, square) = piece.setting, piece.weights, piece.gradient, piece.moments
            rate = update.lr * setting.lr / divisors[piece.name]
            mean.lerp_(gradient, 1.0 - beta1)
            _follow(square, gradient, beta2)
            weights.sub_(weights, alpha=rate * setting.weight_decay)
            weights.addcdiv_(mean, square.sqrt().add_(setting.eps), value=-rate)

        self.memory.change(names, move, update)

    def _lags(self, names: Sequence[str], beta2: float) -> dict[str, float]:
        """max(1, RMS_t) of every tensor, with the second moment that this gradient will make; nothing is changed."""
        place = {name: at for at, name in enumerate(names)}
        parameters = [self.parameters[name] for name in names]
        shares = torch.zeros(len(names), dtype=torch.float64, device=self.memory.step_count().device)
        for piece in self.memory.pieces(names):
            root = _follow(piece.moments[1].clone(), piece.gradient, beta2).sqrt_().clamp_min_(piece.setting.eps)
            shares[place[piece.name]] += root.reciprocal_().mul_(piece.gradient).square_().sum(dtype=torch.float64)
        squares = sum_over_shards(shares, parameters).tolist()
        sizes = [parameter.numel() for parameter in parameters]
        lags = (math.sqrt(total / size) for total, size in zip(squares, sizes, strict=True))
        return {name: max(lag, 1.0) for name, lag in zip(names, lags, strict=True)}

    def last_updates(self, names: Sequence[str], lr: float) -> list[Tensor]:
        """At the divided rate; NaN where the last one asked for was refused, or the state restored since. The rounding of narrow weights is left out."""
        updates = []
        for name, (weights, mean, square) in zip(names, self.memory.read(names), strict=True):
            setting = self.memory.settings[name]
            rate = lr * setting.lr / self._divisors.get(name, math.nan)
            change = mean.div(square.sqrt().add_(setting.eps)).mul_(-rate)
            updates.append(before_decay(change, weights, rate * setting.weight_decay))
        return updates

    def second_moments(self, names: Sequence[str]) -> list[Tensor]:
        unseen = math.nan if self.memory.steps == 0 else 1.0
        return [square.sqrt().mul_(unseen) for _, _, square in self.memory.read(names)]


def _without_bias(beta: float, step: int) -> float:
    """Weight of the past at update ``step`` that leaves no bias towards the zeros before the first: 0 at the first."""
    return beta * (1.0 - beta ** (step - 1)) / (1.0 - beta**step)


def _follow(square: Tensor, gradient: Tensor, beta2: float) -> Tensor:
    """The second moment brought up to date, in place: the same bits whether it is kept or only looked at."""
    return square.lerp_(gradient.square(), 1.0 - beta2)
