"""What the guard has spent so far, as the ledger tells it: never rewinds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PastRollback:
    """One rollback the guard ordered."""

    at_batch: int
    """Batch whose verdict it was."""
    to_batch: int
    restored: int = -1
    """Batch counter of the state that was restored, at most ``to_batch``; -1 while that is not known."""

    @property
    def from_batch(self) -> int:
        """First batch read again."""
        return self.restored if self.restored >= 0 else self.to_batch


@dataclass(frozen=True, kw_only=True)
class Record:
    """Budgets and cool-downs are judged against this; it is derived from the ledger, so it survives rollback and resume."""

    rollbacks: tuple[PastRollback, ...] = ()
    """Oldest first."""
    lr_events_at: tuple[int, ...] = ()
    """Batches whose verdicts ordered LR events, those inside rollbacks included."""
    investigations_at: tuple[int, ...] = ()
    """Batches that were investigated."""
    exclusions_at: tuple[int, ...] = ()
    """Batches that were read again without some of their documents."""
    num_excluded: int = 0
    """Documents left out so."""
    num_skips: int = 0
    """Skipped steps ever, abandoned attempts included."""
