"""How large a batch has to be before more of it helps little: the gradient noise scale (arXiv:1812.06162 appendix A.1). No torch.

The gradient g over n targets has E|g|^2 = |G|^2 + tr(S) / n, with G the true gradient and S the covariance of one target's. Two sizes n give
two equations, hence unbiased |G|^2 and tr(S) (eq. A.1, A.2). Each is smoothed by itself, since a ratio of noisy numbers is biased; tr(S) /
|G|^2 is then the batch size, in targets, at which noise and signal are equal: the critical batch size.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

BETA = 0.95
"""Weight of the past in the smoothed figures: a span of about 20 measurements."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What one batch says. Either may come out negative: it is noisy, and unbiased."""

    squared_norm: float
    """|G|^2."""
    trace: float
    """tr(S) of one target's gradient."""


@dataclass(frozen=True, kw_only=True)
class NoiseState:
    """The measurements so far, smoothed. Rewinds with the weights."""

    count: int = 0
    """Measurements."""
    squared_norm: float = 0.0
    """Running mean of |G|^2 from 0, not yet corrected for that start."""
    trace: float = 0.0
    """The same of tr(S)."""

    def after(self, noise: Noise) -> "NoiseState":
        """With one measurement more."""
        return NoiseState(
            count=self.count + 1,
            squared_norm=BETA * self.squared_norm + (1.0 - BETA) * noise.squared_norm,
            trace=BETA * self.trace + (1.0 - BETA) * noise.trace,
        )

    def smoothed(self) -> Noise:
        """Bias-corrected means; NaN before the first measurement."""
        if not self.count:
            return Noise(squared_norm=math.nan, trace=math.nan)
        correction = 1.0 - BETA**self.count
        return Noise(squared_norm=self.squared_norm / correction, trace=self.trace / correction)

    def critical_batch(self) -> float:
        """tr(S) / |G|^2, targets; NaN while either is not positive."""
        found = self.smoothed()
        return found.trace / found.squared_norm if found.squared_norm > 0 and found.trace > 0 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From what ``to_dict`` gave."""
        return cls(**values)


def noise_of(piece_squares: Sequence[float], piece_sizes: Sequence[int], square: float, size: int) -> Noise:
    """Both figures from the squared gradient norms of a batch's pieces and of the whole of it; sizes in targets.

    Pieces need not hold the same number of targets: over all of them the mean of |g|^2 is |G|^2 + tr(S) x mean(1 / size).
    """
    small = sum(piece_squares) / len(piece_squares)
    inverse = sum(1.0 / n for n in piece_sizes) / len(piece_sizes)
    trace = (small - square) / (inverse - 1.0 / size)
    return Noise(squared_norm=square - trace / size, trace=trace)
