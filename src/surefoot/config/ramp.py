"""What the batch ramp does to the learning rate."""

import math
from typing import Literal

from surefoot.config.data import DataConfig
from surefoot.config.optim import OptimConfig


def ramp_factor(rows: int, batch_size: int, rule: Literal["none", "sqrt", "linear"]) -> float:
    """What a batch of ``rows`` multiplies the rate by, which was tuned for ``batch_size`` rows; 1 where they are the same."""
    match rule:
        case "none":
            return 1.0
        case "sqrt":
            return math.sqrt(rows / batch_size)
        case "linear":
            return rows / batch_size


def largest_ramp(optim: OptimConfig, data: DataConfig) -> tuple[str, float]:
    """Key and factor of the batch size that raises the rate most; no key, and 1, where none does."""
    found = ("", 1.0)
    if data.batch_size < 1:
        return found
    for n, stage in enumerate(data.batch_stages):
        factor = ramp_factor(max(stage.batch_size, 1), data.batch_size, optim.ramp_lr)
        if factor > found[1]:
            found = (f"data.batch_stages.{n}.batch_size", factor)
    return found
