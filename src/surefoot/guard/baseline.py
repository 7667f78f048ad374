"""What is normal for one number: a robust local trend of its accepted values, and the spread around it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

LINE = 16
"""Accepted values that carry the trend: short enough to follow the steep fall of early training."""
STEADY = 5
"""Steps in a row in one direction that are a fall (or a rise) rather than noise."""
WINDOW = 64
"""Distances from the trend that carry the spread."""
SETTLED = 8
"""Values without which there is no trend; below that, their median is the level."""
KEPT = 24
"""Distances kept when the level is opened anew, so that a new spread soon outweighs the old one."""
MAX_REJECTED = 16
"""Values rejected in a row that are remembered."""
FADE = 1 / 1000
"""Of the highest that is forgotten with each value."""
MOST = 2.0
"""Times its width without outliers that a band may have for them, so that a series of spikes, each a little higher, is not followed for long."""
TAIL = 0.95
NORMAL_TAIL = 1.6449
"""The 95 % point of the standard normal distribution."""
LARGEST = 1e30
"""Beyond it a number is no measurement, and its square is none at all."""
MAD = 1.4826
"""Standard deviation over median absolute deviation, for the normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One number's normal. Only what was accepted has a say; what was rejected waits apart, and counts when its level is accepted.

    The spread is that of the forecast's own past errors, so that curvature and the forecast's own noise are part of it.
    """

    values: tuple[float, ...] = ()
    """Accepted, oldest first."""
    residuals: tuple[float, ...] = ()
    """Accepted values minus their forecasts, oldest first."""
    rejected: tuple[float, ...] = ()
    """Finite values rejected since the last accepted one."""
    center: float = 0.0
    """Forecast for the next value, its usual error added."""
    above: float = 0.0
    """Robust standard deviation of what lies above the forecast: the larger of what the median absolute deviation and the tail say. Each side
    has its own tail: the largest document loss has a long one upwards."""
    below: float = 0.0
    peak: float = 0.0
    """Highest accepted value above its forecast, fading."""

    @property
    def ready(self) -> bool:
        """There is a level and a spread to judge by."""
        return len(self.residuals) >= SETTLED and len(self.values) > 0

    def width(self) -> float:
        """How much wider than usual the band is: while the spread is new, and while the level has been opened anew."""
        young = 1.0 + max(0, WINDOW - len(self.residuals)) / (WINDOW - SETTLED)
        return young * max(1.0, SETTLED / max(1, len(self.values)))

    def upper(self, sigmas: float, least: float, floor: float, peaks: float = 0.0) -> float:
        """The value beyond which one is too high: ``sigmas`` of at least ``floor`` each, at least ``least`` away, and ``peaks`` times as far as
        the farthest accepted so far; infinity before there is a baseline."""
        if not self.ready:
            return math.inf
        away = max(sigmas * max(self.above, floor), least) * self.width()
        return self.center + max(away, min(peaks * self.peak, MOST * away))

    def lower(self, sigmas: float, least: float, floor: float) -> float:
        """The same below, without regard to outliers."""
        if not self.ready:
            return -math.inf
        return self.center - max(sigmas * max(self.below, floor), least) * self.width()

    def z(self, value: float, floor: float) -> float:
        """Robust standard deviations from the forecast; NaN without either."""
        if not self.ready or not math.isfinite(value):
            return math.nan
        return (value - self.center) / max(self.above if value >= self.center else self.below, floor)

    def accept(self, value: float) -> "Baseline":
        """With one more value, unless it is missing; those rejected before it are forgotten."""
        if not abs(value) <= LARGEST:
            return replace(self, rejected=()) if self.rejected else self
        residuals = self.residuals
        if len(self.values) >= SETTLED:
            residuals = (*residuals[1 - WINDOW :], value - forecast(self.values))
        above = value - self.center if self.ready else 0.0
        peak = max(self.peak * (1 - FADE), above)
        return replace(_measured((*self.values[1 - LINE :], value), residuals), peak=peak)

    def reject(self, value: float) -> "Baseline":
        """With one more value that must not count, unless it is missing."""
        if not abs(value) <= LARGEST:
            return self
        return replace(self, rejected=(*self.rejected[1 - MAX_REJECTED :], value))

    def reopen(self) -> "Baseline":
        """Without a level: any next value is taken for it. The spread stays, with less weight."""
        return replace(_measured((), self.residuals[-KEPT:]), peak=self.peak)

    def accept_level(self) -> "Baseline":
        """With the values lately rejected as the level, and their spread as part of the spread."""
        if not self.rejected:
            return self
        middle = median(self.rejected)
        around = tuple(value - middle for value in self.rejected)
        return replace(_measured(self.rejected[-LINE:], (*self.residuals[-KEPT:], *around)), peak=self.peak)


def _measured(values: tuple[float, ...], residuals: tuple[float, ...]) -> Baseline:
    if not values or not residuals:
        return Baseline(values=values, residuals=residuals)
    ordered = sorted(residuals)
    middle = _middle(ordered)
    spread = MAD * _middle(sorted([abs(residual - middle) for residual in ordered]))
    last = len(ordered) - 1
    tail = round(TAIL * last)
    return Baseline(
        values=values,
        residuals=residuals,
        center=forecast(values) + middle,
        above=max(spread, (ordered[tail] - middle) / NORMAL_TAIL),
        below=max(spread, (middle - ordered[last - tail]) / NORMAL_TAIL),
    )


def forecast(values: Sequence[float]) -> float:
    """The next value, robustly; of fewer than ``SETTLED``, their median.

    A resistant line, kept within the last three values; where the last ``STEADY`` steps all go one way (chance does that once in 360), their
    median step from the last value, since a steep fall bends faster than the line.
    """
    count = len(values)
    if count < SETTLED:
        return median(values)
    steps = [values[-n] - values[-n - 1] for n in range(1, STEADY + 1)]
    if max(steps) < 0 or min(steps) > 0:
        return values[-1] + median(steps)
    third = count // 3
    slope = (median(values[-third:]) - median(values[:third])) / (count - third)
    line = median([value - slope * n for n, value in enumerate(values)]) + slope * count
    recent = values[-3:]
    return min(max(line, min(recent)), max(recent))


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    return _middle(sorted(values))


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
