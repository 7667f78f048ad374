"""Learning rates in closed form: a function of ``step`` and nothing else, so that resuming cannot shift them. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from surefoot.config.optim import WSD, Constant, Cosine, InverseSqrt, Linear, OneMinusSqrt, OptimConfig, Power
from surefoot.guard.lr_change import LrChange


@dataclass(frozen=True)
class Landing:
    """How a run comes to its end."""

    last_step: int
    """Updates at which it ends."""
    decay_steps: float = 0.0
    """Updates over which WSD decays before it; 0 is what the schedule says of a run of ``last_step``."""


def lr_at(step: int, config: OptimConfig, num_steps: int, decay: float = 0.0) -> float:
    """Learning rate of the update that takes ``step`` applied updates to ``step`` + 1.

    Warm-up is linear over ``warmup_steps`` updates, from lr / warmup_steps to lr. What follows runs over the remaining
    ``num_steps`` - ``warmup_steps`` updates (the decay of WSD over the last share of all) and reaches its final ratio at the last of them.
    Where a short run makes the two overlap, the lower one holds. ``decay``: the updates over which WSD decays; 0 is what the schedule says.
    """
    after = _ratio(step, config, num_steps, decay)
    if step < config.warmup_steps:
        return min(config.lr * (step + 1) / config.warmup_steps, config.lr * after)
    return config.lr * after


def lr_factor(step: int, changes: Sequence[LrChange]) -> float:
    """What the ledger's LR events multiply ``lr_at(step)`` by: the product of all that have begun; 1 without any."""
    return math.prod(_changed(step - change.start_step, change) for change in changes)


def decay_begins(schedule: WSD, num_steps: int) -> float:
    """Updates before the first whose rate WSD has lowered."""
    return num_steps - decay_steps(schedule, num_steps)


def landing(schedule: WSD, step: int, first_step: int = 0) -> Landing:
    """The end of a run whose decay begins after ``step`` updates: the rate does not jump there.

    ``first_step``: updates that the weights had when the run began. A share of its steps is one of those after them.
    """
    if schedule.decay_steps:
        return Landing(step + schedule.decay_steps, schedule.decay_steps)
    steps = max(math.ceil((step - first_step) / (1.0 - schedule.decay_fraction)), step - first_step + 1)
    return Landing(first_step + steps, decay_steps(schedule, steps))


def landing_within(schedule: WSD, step: int, num_left: int, first_step: int = 0) -> Landing:
    """The same for a run that has time for ``num_left`` updates more: a decay that does not fit is cut to them, and to no less than one.

    It may be one update longer than the time: what is decided between two updates is right to within one.
    """
    whole = landing(schedule, step, first_step)
    if whole.last_step - step <= num_left + 1:
        return whole
    length = max(num_left, 1)
    return Landing(step + length, length)


def _changed(since: int, change: LrChange) -> float:
    """Multiplier of one change, ``since`` updates after its first; 1 before it."""
    if since < 0:
        return 1.0
    if since < change.hold_steps:
        return change.factor
    risen = since - change.hold_steps + 1
    if risen < change.ramp_steps:
        return change.factor + (change.settle - change.factor) * risen / change.ramp_steps
    return change.settle


def _ratio(step: int, config: OptimConfig, num_steps: int, decay: float) -> float:
    """Rate over peak rate that the schedule asks for, warm-up aside."""
    progress = (step + 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    progress = min(max(progress, 0.0), 1.0)
    warm = max(config.warmup_steps, 1)
    match config.schedule:
        case Constant():
            return 1.0
        case Linear(min_ratio=low):
            return _fallen("linear", progress, low)
        case Cosine(min_ratio=low):
            return _fallen("cosine", progress, low)
        case OneMinusSqrt(min_ratio=low):
            return _fallen("one_minus_sqrt", progress, low)
        case InverseSqrt():
            return math.sqrt(warm / max(step + 1, warm))
        case Power(exponent=exponent, peak_steps=peak):
            start = peak or warm
            return float((start / max(step + 1, start)) ** exponent)
        case WSD(shape=shape, min_ratio=low) as wsd:
            length = decay or decay_steps(wsd, num_steps)
            decayed = (step + 1 - (num_steps - length)) / length if length > 0 else 0.0
            return _fallen(shape, min(max(decayed, 0.0), 1.0), low)


def decay_steps(schedule: WSD, num_steps: int) -> float:
    """Updates over which WSD decays."""
    return schedule.decay_steps or schedule.decay_fraction * num_steps


def _fallen(shape: Literal["linear", "cosine", "one_minus_sqrt"], progress: float, low: float) -> float:
    """From 1 at progress 0 to ``low`` at progress 1."""
    match shape:
        case "linear":
            return 1.0 + (low - 1.0) * progress
        case "cosine":
            return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "one_minus_sqrt":
            return low + (1.0 - low) * (1.0 - math.sqrt(progress))
