"""Whether updates are what the learning rate says: their measured size, and the optimiser's own count of them."""

import math
from dataclasses import dataclass, replace

from surefoot.config.guard import Thresholds
from surefoot.guard.baseline import LARGEST, MAX_REJECTED, Baseline
from surefoot.guard.finding import Finding
from surefoot.guard.lasting import Lasting
from surefoot.guard.signals import StepSignals
from surefoot.guard.spikes import NORM_FLOOR, log_norm

LARGER = 2.0
"""Times the largest update in line of late, which one must exceed to do harm, whatever its rate says."""
FADE = 1 / 200
"""Of the largest that is forgotten with each update: it is still known at the end of a dip."""
RATE_SHARE = 0.01
"""Of the highest learning rate so far: below it updates may vanish in the rounding of the weights, and are not judged."""


@dataclass(frozen=True, kw_only=True)
class Updates:
    """The usual size of an update per unit of learning rate."""

    baseline: Baseline = Baseline()
    """Of the logarithm of measured size over learning rate."""
    highest_lr: float = 0.0
    largest: float = 0.0
    """Measured size of the largest update in line, fading: what the weights have borne."""


def update_z(updates: Updates, signals: StepSignals) -> float:
    """Where this update's size stands; NaN where it cannot be said."""
    return updates.baseline.z(_log_ratio(signals), NORM_FLOOR)


def _log_ratio(signals: StepSignals) -> float:
    return log_norm(signals.update_size / signals.lr) if signals.lr > 0 else math.nan


def update_size(updates: Updates, signals: StepSignals, thresholds: Thresholds, lasting: Lasting) -> Updates:
    """The usual size with this update's; an alarm where it is out of line with the learning rate, either way, or nothing has moved at all.

    Sizes out of line do not count, unless there are so many in a row that they are what is usual now. One that is large for its rate and no
    larger than those before it does no harm, as where the rate was dipped against it: that is a warning.
    """
    if not (0 < signals.lr <= LARGEST and math.isfinite(signals.update_size)):
        return updates
    highest = max(updates.highest_lr, signals.lr)
    updates = replace(updates, highest_lr=highest)
    if signals.lr < RATE_SHARE * highest:
        return updates
    baseline = updates.baseline
    ratio = _log_ratio(signals)
    least = math.log(thresholds.update_ratio)
    high = baseline.upper(thresholds.gradient_sigmas, least, NORM_FLOOR)
    low = baseline.lower(thresholds.gradient_sigmas, least, NORM_FLOOR)
    outside = not low <= ratio <= high  # so it is when nothing moved: zero has no logarithm, and NaN lies nowhere
    harmless = ratio > high and signals.update_size <= LARGER * updates.largest
    lasting.see("update_size", outside and not harmless, False, lambda: _out_of_line(signals, baseline, ratio))
    lasting.see(
        "update_size/warning",
        outside and harmless,
        False,
        lambda: replace(_out_of_line(signals, baseline, ratio), severity="warning"),
    )
    if not outside:
        largest = max(updates.largest * (1 - FADE), signals.update_size)
        return replace(updates, baseline=baseline.accept(ratio), largest=largest)
    baseline = baseline.reject(ratio)
    full = len(baseline.rejected) >= MAX_REJECTED
    return replace(updates, baseline=baseline.accept_level() if full else baseline)


def _out_of_line(signals: StepSignals, baseline: Baseline, ratio: float) -> Finding:
    if signals.update_size == 0:
        text = f"no weight has moved at learning rate {signals.lr:.3g}: the update was silently lost"
    else:
        text = (
            f"the update moved weights by {signals.update_size:.3g} at learning rate {signals.lr:.3g}, "
            f"{math.exp(ratio - baseline.center):.3g} times what is usual"
        )
    return Finding(
        kind="update_size",
        severity="alarm",
        text=text,
        batch_index=signals.batch_index,
        onset=signals.batch_index,
        value=signals.update_size,
        normal=signals.lr * math.exp(baseline.center) if baseline.ready else 0.0,
        z=baseline.z(ratio, NORM_FLOOR) if baseline.ready and math.isfinite(ratio) else 0.0,
    )


def optimizer_steps(signals: StepSignals, lasting: Lasting) -> None:
    """An alarm where the optimiser has counted other updates than the run: one was applied twice, or its count was lost."""
    counted = signals.optimizer_steps
    if counted < 0:
        return
    lasting.see(
        "optimizer_steps",
        counted != signals.step,
        False,
        lambda: Finding(
            kind="optimizer_steps",
            severity="alarm",
            text=f"the optimiser has counted {counted} updates, the run {signals.step}",
            batch_index=signals.batch_index,
            onset=signals.batch_index,
            value=float(counted),
            normal=float(signals.step),
        ),
    )
