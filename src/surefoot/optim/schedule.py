"""Learning rates in closed form: a function of ``step`` and nothing else, so that resuming cannot shift them. No torch."""

import math

from surefoot.config.optim import WSD, Constant, Cosine, Linear, OptimConfig


def lr_at(step: int, config: OptimConfig, num_steps: int) -> float:
    """Learning rate of the update that takes ``step`` applied updates to ``step`` + 1.

    Warm-up is linear over ``warmup_steps`` updates, from lr / warmup_steps to lr. What follows runs over the remaining
    ``num_steps`` - ``warmup_steps`` updates and reaches its final ratio at the last of them.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step + 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return config.lr * _ratio(min(progress, 1.0), config, num_steps)


def _ratio(progress: float, config: OptimConfig, num_steps: int) -> float:
    match config.schedule:
        case Constant():
            return 1.0
        case Linear(min_ratio=low):
            return 1.0 + (low - 1.0) * progress
        case Cosine(min_ratio=low):
            return low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case WSD(decay_fraction=fraction, min_ratio=low):
            share = fraction * num_steps / max(1, num_steps - config.warmup_steps)
            decayed = (progress - (1.0 - share)) / share if share > 0 else 0.0
            return 1.0 + (low - 1.0) * min(max(decayed, 0.0), 1.0)
