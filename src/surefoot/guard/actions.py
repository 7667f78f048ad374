"""What the guard may order: a closed union, so that the type checker names every place that must handle a new member."""

from dataclasses import dataclass
from typing import Literal

Cause = Literal["data", "optimiser", "numerics", "hardware", "unknown"]
"""Where a fault comes from; ``optimiser`` includes learning rate, schedule and the state it has led to."""


@dataclass(frozen=True, kw_only=True)
class Proceed:
    """Go on: the step was healthy, or what was found is only said."""


@dataclass(frozen=True, kw_only=True)
class ClipHarder:
    """The update was applied with its gradient scaled down to the guard's own limit."""

    cause: str
    """A sentence: what was seen."""


@dataclass(frozen=True, kw_only=True)
class SkipUpdate:
    """The update was refused: weights, moments and ``step`` are untouched, the batch is consumed."""

    cause: str
    """A sentence: what was seen."""


@dataclass(frozen=True, kw_only=True)
class Investigate:
    """Find out why before deciding: at most ``passes`` extra forward and backward passes at the weights as they are (they are unchanged,
    since the step was refused, or its update is about to be undone). ``diagnosis.next_pass`` names them one by one; ``conclude`` decides."""

    cause: str
    """A sentence: what was seen."""
    passes: int = 3


@dataclass(frozen=True, kw_only=True)
class LrEvent:
    """From the next update on the scheduled rate is multiplied: ``factor`` for ``hold_steps``, then linearly up to ``settle`` over
    ``ramp_steps``, then ``settle`` for good."""

    factor: float
    hold_steps: int
    ramp_steps: int
    settle: float
    cause: str
    """A sentence: why."""


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Restore the newest state at or before a batch and go on from there without some documents."""

    to_batch: int
    """The restored state has consumed batches 0 .. ``to_batch`` - 1, or fewer when no such state is kept."""
    exclude: tuple[str, ...] = ()
    """Documents (16 hex digits) blanked from the restored batch onward."""
    cause: str
    """A sentence: why."""
    lr_event: LrEvent | None = None
    """A dip and re-warm of the rate that goes with it, from the restored step on."""


@dataclass(frozen=True, kw_only=True)
class Halt:
    """Stop the run with a diagnosis."""

    reason: str
    """What was seen, and what to do next."""


Action = Proceed | ClipHarder | SkipUpdate | Investigate | LrEvent | Rollback | Halt
