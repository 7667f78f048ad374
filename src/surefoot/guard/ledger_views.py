"""What rows of the ledger add up to: budgets spent and LR events in force.

A process that is resumed goes through batches again that it had been through, comes to the same decisions and writes them again: those count
once. A rollback is different: what led to it, and what was decided on the way that it left, stays spent for ever.
"""

from dataclasses import dataclass, replace

from surefoot.guard.ledger_row import Row
from surefoot.guard.lr_change import LrChange
from surefoot.guard.record import PastRollback, Record


@dataclass(frozen=True)
class Decision:
    """A row about a batch: a skipped step, a verdict, an LR event."""

    row: Row
    restored: int = -1
    """Of a rollback: the batch counter of the state it restored; -1 while it was not carried out."""
    counts_from: int = 0
    """First batch whose verdict it may weigh on. Of one that a rollback left behind: where that rollback went to, so that what lies before, when it
    is gone through again, is judged as it was the first time."""

    @property
    def batch_index(self) -> int:
        """The batch that led to it."""
        return int(self.row["batch_index"])

    @property
    def rolls_back(self) -> bool:
        """It is the verdict of a rollback."""
        return bool(self.row["kind"] == "verdict" and self.row.get("action") == "rollback")

    @property
    def excludes(self) -> bool:
        """It is the verdict that its own batch be read again without some documents."""
        return bool(self.row["kind"] == "verdict" and self.row.get("action") == "exclude")


@dataclass(frozen=True)
class Decisions:
    """The decisions that count. Never changed: ``after`` returns them with one row more."""

    spent: tuple[Decision, ...] = ()
    """Those that a rollback left behind."""
    path: tuple[Decision, ...] = ()
    """Those about batches of the run as it stands."""

    def after(self, row: Row) -> "Decisions":
        """With one row of the ledger more."""
        match row["kind"]:
            case "skip" | "verdict" | "lr_event" if "batch_index" in row:
                return replace(self, path=(*self.path, Decision(row)))
            case "attempt" if row["reason"] == "resume":
                return replace(self, path=tuple(d for d in self.path if d.batch_index < row["from_batch"]))
            case "attempt" if row["reason"] == "rollback":
                return self._rolled_back(row["from_batch"])
        return self

    def _rolled_back(self, from_batch: int) -> "Decisions":
        """Decisions from the rollback's target on are spent; those before it, of batches that are read again, will be made again."""
        path = list(self.path)
        ordered = [
            at
            for at, decision in enumerate(path)
            if (decision.rolls_back or decision.excludes) and decision.restored < 0
        ]
        to_batch = from_batch
        if ordered:
            to_batch = int(path[ordered[-1]].row["to_batch"])
            path[ordered[-1]] = replace(path[ordered[-1]], restored=from_batch)
        left = tuple(replace(d, counts_from=to_batch) for d in path if d.batch_index >= to_batch)
        return Decisions((*self.spent, *left), tuple(d for d in path if d.batch_index < from_batch))

    def all(self) -> list[Decision]:
        """Every decision that counts, in the order it was taken."""
        return sorted((*self.spent, *self.path), key=lambda decision: int(decision.row["n"]))

    def record(self, batch_index: int | None = None) -> Record:
        """What the guard has spent, as far as it concerns the verdict on a batch (None: ever). Rows of investigated batches carry ``passes``; an
        LR event that a fork took over is not its own."""
        decided = [d for d in self.all() if batch_index is None or d.counts_from <= batch_index]
        return Record(
            rollbacks=tuple(
                PastRollback(at_batch=d.batch_index, to_batch=int(d.row["to_batch"]), restored=d.restored)
                for d in decided
                if d.rolls_back
            ),
            lr_events_at=tuple(
                d.batch_index for d in decided if d.row["kind"] == "lr_event" and not d.row.get("inherited")
            ),
            investigations_at=tuple(d.batch_index for d in decided if "passes" in d.row),
            exclusions_at=tuple(d.batch_index for d in decided if d.excludes),
            num_excluded=sum(len(d.row["exclude"]) for d in decided if d.excludes),
            num_skips=sum(d.row["kind"] == "skip" for d in decided),
        )

    def lr_events(self) -> tuple[LrChange, ...]:
        """Every LR event; rolling back does not undo them."""
        return tuple(lr_change(d.row) for d in self.all() if d.row["kind"] == "lr_event")


def lr_change(row: Row) -> LrChange:
    """The LR event of an ``lr_event`` row."""
    return LrChange(
        start_step=row["start_step"],
        factor=row["factor"],
        hold_steps=row["hold_steps"],
        ramp_steps=row["ramp_steps"],
        settle=row["settle"],
    )
