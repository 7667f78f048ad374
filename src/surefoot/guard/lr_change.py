"""A decision about the learning rate, as the ledger keeps it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LrChange:
    """From update ``start_step`` on the scheduled rate is multiplied: ``factor``, then linearly to ``settle``, then ``settle`` for good."""

    start_step: int
    """First update it touches: the one that takes ``start_step`` applied updates to ``start_step`` + 1."""
    factor: float
    hold_steps: int
    """Updates at ``factor``."""
    ramp_steps: int
    """Updates on the way from ``factor`` to ``settle``; the last of them has ``settle``."""
    settle: float
