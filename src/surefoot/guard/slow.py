"""What goes wrong over hundreds of steps: the smoothed loss over its best, the gradient's slow growth, the drift of the logits."""

import math
from dataclasses import dataclass, replace

from surefoot.config.guard import Thresholds
from surefoot.guard.baseline import LARGEST
from surefoot.guard.finding import Finding
from surefoot.guard.lasting import Lasting
from surefoot.guard.signals import StepSignals

RATE = 2 / 101
"""Of a moving average with a span of 100 steps."""
SETTLED = 50
"""Values before a smoothed figure is taken for a best."""
SMOOTHED_SPREAD = math.sqrt(RATE / (2 - RATE))
"""Standard deviation of the moving average of independent values, over theirs."""
NOISE_SIGMAS = 9.0
"""Of the smoothed loss that chance alone may put between now and the best of a long plateau."""
MOST_ALLOWANCE = 4.0
"""Of the excess, where the learning rate has risen since the best."""
CREEP_RATIO = 6.0
"""Smoothed gradient norm over its lowest, to be said."""
CREEP_STEPS = 100
DRIFT_NATS = 20.0
"""Smoothed logsumexp beyond twice what it was early on, and this, to be said."""


@dataclass(frozen=True, kw_only=True)
class Smoothed:
    """An exponential moving average over a span of 100 values, corrected for its start."""

    total: float = 0.0
    weight: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        """The average; NaN before the first value."""
        return self.total / self.weight if self.count else math.nan

    def add(self, value: float) -> "Smoothed":
        """With one more value, unless it is missing."""
        if not abs(value) <= LARGEST:
            return self
        return Smoothed(
            total=self.total + RATE * (value - self.total),
            weight=self.weight + RATE * (1 - self.weight),
            count=self.count + 1,
        )


@dataclass(frozen=True, kw_only=True)
class Best:
    """A smoothed figure, the lowest it has been, and for how long it has been well above that."""

    smoothed: Smoothed = Smoothed()
    lowest: float = 0.0
    lowest_batch: int = -1
    """Batch of the lowest; -1 before there is one."""
    lowest_lr: float = 0.0
    """Learning rate then; 0 is not known."""
    steps_above: int = 0
    level: int = 0
    """How often it has been said; each time the excess must have doubled."""

    @property
    def excess(self) -> float:
        """Above the lowest; 0 before there is one."""
        return self.smoothed.value - self.lowest if self.lowest_batch >= 0 else 0.0

    def add(self, value: float, batch_index: int, lr: float, settled: int) -> "Best":
        """With one more value, unless it is missing."""
        smoothed = self.smoothed.add(value)
        if smoothed is self.smoothed:
            return self
        if smoothed.count >= settled and (self.lowest_batch < 0 or smoothed.value < self.lowest):
            rate = lr if math.isfinite(lr) else 0.0
            return Best(smoothed=smoothed, lowest=smoothed.value, lowest_batch=batch_index, lowest_lr=rate)
        return replace(self, smoothed=smoothed)


def slow_spike(
    best: Best, signals: StepSignals, spread: float, thresholds: Thresholds, findings: list[Finding]
) -> Best:
    """The smoothed loss with this step's; a finding when it has long been above its best, and each time the excess has doubled.

    ``spread`` is the loss's own. A rate that has risen since the best (re-warming after a decay) raises the loss in health: it widens what is
    allowed, up to fourfold.
    """
    best = best.add(signals.loss, signals.batch_index, signals.lr, SETTLED)
    unit = max(thresholds.slow_nats, NOISE_SIGMAS * SMOOTHED_SPREAD * spread) * _allowance(best.lowest_lr, signals.lr)
    if best.excess <= unit:
        return replace(best, steps_above=0, level=best.level if best.excess > unit / 2 else 0)
    best = replace(best, steps_above=best.steps_above + 1)
    if best.steps_above < thresholds.slow_steps or best.excess <= unit * 2**best.level:
        return best
    again = "still rising: " if best.level else ""
    findings.append(
        Finding(
            kind="slow_spike",
            severity="alarm",
            text=f"{again}smoothed loss {best.smoothed.value:.4g} is {best.excess:.2g} nats above its best of {best.lowest:.4g} "
            f"at batch {best.lowest_batch}, for {best.steps_above} steps",
            batch_index=signals.batch_index,
            onset=best.lowest_batch,
            value=best.smoothed.value,
            normal=best.lowest,
        )
    )
    return replace(best, level=best.level + 1)


def _allowance(lr_then: float, lr_now: float) -> float:
    if not lr_then > 0 or not lr_now > lr_then:
        return 1.0
    return min(MOST_ALLOWANCE, 1 + 1.5 * math.log2(lr_now / lr_then))


def gradient_creep(best: Best, log_norm: float, signals: StepSignals, lasting: Lasting) -> Best:
    """The smoothed log gradient norm with this step's; a warning when it has long been far above its lowest."""
    best = best.add(log_norm, signals.batch_index, signals.lr, 2 * SETTLED)
    far = best.excess > math.log(CREEP_RATIO)
    best = replace(best, steps_above=best.steps_above + 1 if far else 0)
    lasting.see(
        "gradient_creep",
        best.steps_above >= CREEP_STEPS,
        best.excess > math.log(CREEP_RATIO) / 2,
        lambda: Finding(
            kind="gradient_creep",
            severity="warning",
            text=f"gradient norm has crept up to {math.exp(best.smoothed.value):.3g}, {math.exp(best.excess):.2g} times its lowest "
            f"at batch {best.lowest_batch}",
            batch_index=signals.batch_index,
            onset=best.lowest_batch,
            value=math.exp(best.smoothed.value),
            normal=math.exp(best.lowest),
        ),
    )
    return best


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The smoothed logsumexp of the output logits, and where it stood early on."""

    smoothed: Smoothed = Smoothed()
    early: float = 0.0
    """Once ``SETTLED`` values were seen."""


def logit_drift(drift: Drift, signals: StepSignals, lasting: Lasting) -> Drift:
    """The smoothed logsumexp with this step's; a warning when it is far out (the head's norm grows: z-loss)."""
    smoothed = drift.smoothed.add(signals.logsumexp_mean)
    if smoothed is drift.smoothed:
        return drift
    drift = Drift(smoothed=smoothed, early=smoothed.value if smoothed.count <= SETTLED else drift.early)
    size = abs(smoothed.value)
    limit = DRIFT_NATS + 2 * abs(drift.early)
    lasting.see(
        "logit_drift",
        size > limit,
        size > 0.8 * limit,
        lambda: Finding(
            kind="logit_drift",
            severity="warning",
            text=f"output logits have drifted: mean logsumexp {smoothed.value:.4g} nats, {drift.early:.3g} early on; z-loss holds it",
            batch_index=signals.batch_index,
            onset=signals.batch_index,
            value=smoothed.value,
            normal=drift.early,
        ),
    )
    return drift
