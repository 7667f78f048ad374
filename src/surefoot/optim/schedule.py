"""Learning rates in closed form: a function of ``step`` and nothing else, so that resuming cannot shift them. No torch."""

import math
from collections.abc import Sequence

from surefoot.config.optim import WSD, Constant, Cosine, Linear, OptimConfig
from surefoot.guard.lr_change import LrChange


def lr_at(step: int, config: OptimConfig, num_steps: int) -> float:
    """Learning rate of the update that takes ``step`` applied updates to ``step`` + 1.

    Warm-up is linear over ``warmup_steps`` updates, from lr / warmup_steps to lr. What follows runs over the remaining
    ``num_steps`` - ``warmup_steps`` updates (the decay of WSD over the last share of all) and reaches its final ratio at the last of them.
    Where a short run makes the two overlap, the lower one holds.
    """
    after = _ratio(step, config, num_steps)
    if step < config.warmup_steps:
        return min(config.lr * (step + 1) / config.warmup_steps, config.lr * after)
    return config.lr * after


def lr_factor(step: int, changes: Sequence[LrChange]) -> float:
    """What the ledger's LR events multiply ``lr_at(step)`` by: the product of all that have begun; 1 without any."""
    return math.prod(_changed(step - change.start_step, change) for change in changes)


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


def _ratio(step: int, config: OptimConfig, num_steps: int) -> float:
    """Rate over peak rate that the schedule asks for, warm-up aside."""
    progress = (step + 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    progress = min(max(progress, 0.0), 1.0)
    match config.schedule:
        case Constant():
            return 1.0
        case Linear(min_ratio=low):
            return 1.0 + (low - 1.0) * progress
        case Cosine(min_ratio=low):
            return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case WSD(decay_fraction=fraction, min_ratio=low):
            length = fraction * num_steps
            decayed = (step + 1 - (num_steps - length)) / length if length > 0 else 0.0
            return 1.0 + (low - 1.0) * min(max(decayed, 0.0), 1.0)
