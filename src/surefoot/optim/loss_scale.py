"""The factor on the loss that keeps small fp16 gradients above zero, and what overflows make of it (arXiv:1710.03740 section 3.2)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.config.parallel import LossScaleConfig
from surefoot.model.loss import LossSums
from surefoot.optim.clip import local_part
from surefoot.parallel.forward_backward import ForwardBackward, MicroBatch


@dataclass
class LossScale:
    """The scale and what moves it; rewinds with the weights. Without a config it is off: 1 for ever, and nothing overflows.

    An overflow, gradients that are not finite under a loss that is, halves the scale and skips the update; so many applied updates without
    one double it. At ``smallest`` it is no overflow any more but a fault, which the guard judges. All from numbers that ranks share.
    """

    config: LossScaleConfig | None = None
    value: float = 1.0
    clean: int = 0
    """Applied updates since it last changed."""
    overflows: int = 0
    """Of the surviving history."""

    @classmethod
    def starting(cls, config: LossScaleConfig) -> "LossScale":
        """At its initial value."""
        return cls(config=config, value=config.initial)

    def grow(self) -> None:
        """Double where it is time to; before a batch, so that a pass over the last one again computes the same bits."""
        if self.config is not None and self.clean >= self.config.growth_every:
            self.value, self.clean = 2 * self.value, 0

    def overflow(self, norm: Tensor, loss: Tensor) -> Tensor:
        """Whether global gradient norm and loss show one, a scalar bool on the device."""
        if self.config is None or self.value <= self.config.smallest:
            return torch.zeros_like(norm, dtype=torch.bool)
        return torch.isfinite(loss) & ~torch.isfinite(norm)

    def settle(self, norm: float, loss: float, *, applied: bool) -> bool:
        """The same on the host, after the step; then the scale is moved."""
        if self.config is None:
            return False
        if self.value > self.config.smallest and math.isfinite(loss) and not math.isfinite(norm):
            self.value, self.clean = max(self.value / 2, self.config.smallest), 0
            self.overflows += 1
            return True
        self.clean += applied
        return False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; empty where it is off."""
        if self.config is None:
            return {}
        return {"value": self.value, "clean": self.clean, "overflows": self.overflows}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Set what ``to_dict`` wrote; from a run that had no scale, start anew."""
        if self.config is not None:
            self.value = float(data.get("value", self.config.initial))
            self.clean, self.overflows = int(data.get("clean", 0)), int(data.get("overflows", 0))


class ScaledForwardBackward:
    """A batch's gradients by way of a scaled loss: what is left in every ``.grad`` is unscaled, so that all who read it see the true one."""

    def __init__(
        self,
        inner: ForwardBackward,
        scale: LossScale,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.inner, self.scale, self.parameters = inner, scale, parameters

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        return self.inner.forward_only(micro_batches)

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        scale = self.scale.value
        sums = self.inner(micro_batches, num_targets / scale)
        torch._foreach_mul_([local_part(p.grad) for p in self.parameters if p.grad is not None], 1 / scale)
        return sums
