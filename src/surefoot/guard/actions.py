"""What the guard may order: a closed union, so that the type checker names every place that must handle a new member."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Proceed:
    """The step was healthy; go on."""


@dataclass(frozen=True, kw_only=True)
class SkipUpdate:
    """The update was refused: weights, moments and ``step`` are untouched, the batch is consumed."""

    cause: str
    """A sentence: what was seen."""


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Restore the newest state at or before a batch and go on from there without some documents."""

    to_batch: int
    """The restored state has consumed batches 0 .. ``to_batch`` - 1, or fewer when no such state is kept."""
    exclude: tuple[str, ...] = ()
    """Documents (16 hex digits) blanked from the restored batch onward."""
    cause: str
    """A sentence: why."""


@dataclass(frozen=True, kw_only=True)
class Halt:
    """Stop the run with a diagnosis."""

    reason: str
    """What was seen, and what to do next."""


Action = Proceed | SkipUpdate | Rollback | Halt
