"""What never rewinds: the chained rows of a run, and what they say about which batches and checkpoints still count.

Pure: rows come in, rows and views go out. ``monitor/ledger_file.py`` keeps them on disk.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from surefoot.config.data import Exclusion
from surefoot.guard.ledger_row import KINDS, REASONS, LedgerError, Row, chained_hash, plain_value
from surefoot.guard.ledger_views import Decisions
from surefoot.guard.lr_change import LrChange
from surefoot.guard.record import Record


@dataclass(frozen=True)
class Attempt:
    """One uninterrupted stretch of the run, from a start, a resume or a rollback to the next."""

    number: int
    reason: str
    from_step: int
    from_batch: int
    """The first batch it consumes: the batch counter of the state it started from."""
    checkpoint: str
    """What was restored: a checkpoint's name, ``snapshot``, or nothing."""
    exclude: tuple[Exclusion, ...]
    cause: str
    time: float


@dataclass(frozen=True)
class Checkpoint:
    """A state written to disk: the one after all batches below ``batch_index``."""

    name: str
    step: int
    batch_index: int
    attempt: int
    digest: str
    n: int
    """Ledger row that recorded it."""


@dataclass(frozen=True)
class Skip:
    """A batch consumed without an update."""

    attempt: int
    batch_index: int
    step: int
    cause: str


def check(rows: Iterable[Row]) -> None:
    """Refuse a broken chain or a row that contradicts the ones before it, naming the row (LedgerError)."""
    ledger = Ledger()
    for row in rows:
        ledger = ledger.append(row)


class Ledger:
    """The rows of one run and the views derived from them. Never changed: ``append`` returns a longer one.

    The lineage rule. An attempt starts from the state after all batches below its ``from_batch``, so it discards what
    earlier attempts did from there on. Hence a batch consumed by attempt a survives while every later attempt started
    above it, and a checkpoint at batch b (the state *before* batch b) while every later attempt started at b or above.
    This needs each attempt to start from a state that survived until then, which ``append`` checks where it can.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._log: list[Row] = []
        """The rows, shared with longer ledgers grown from this one: theirs begin with the same ``_length``."""
        self._length = 0
        self.attempts: tuple[Attempt, ...] = ()
        """Every attempt so far; number k stands at place k-1."""
        self.decisions = Decisions()
        """What was decided about batches, each decision once."""
        if rows := tuple(rows):
            ledger = Ledger()
            for row in rows:
                ledger = ledger.append(row)
            self._take(ledger._log, ledger)

    def _take(self, log: list[Row], views: "Ledger") -> None:
        """Become the ledger of all rows of ``log``, whose views another ledger has."""
        self._log, self._length = log, len(log)
        self.attempts, self.decisions = views.attempts, views.decisions

    @cached_property
    def record(self) -> Record:
        """What the guard has spent so far."""
        return self.decisions.record()

    def record_at(self, batch_index: int) -> Record:
        """What it has spent, as far as it concerns the verdict on a batch."""
        return self.decisions.record(batch_index)

    @cached_property
    def lr_events(self) -> tuple[LrChange, ...]:
        """What the learning rate is multiplied by, from when on."""
        return self.decisions.lr_events()

    @cached_property
    def horizon(self) -> int:
        """The last step of a run whose bound is time, once its clock has decided it; 0 until then. No rollback moves it."""
        decided = self.of_kind("horizon")
        return int(decided[0]["last_step"]) if decided else 0

    @cached_property
    def decay_steps(self) -> float:
        """Updates over which the rate decays before ``horizon``, once decided; 0 where the schedule alone says it."""
        decided = self.of_kind("horizon")
        return float(decided[0].get("decay_steps", 0.0)) if decided else 0.0

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All of them, in order."""
        return tuple(self._log[: self._length])

    def next_row(self, kind: str, fields: Row, time: float) -> dict[str, Any]:
        """The row that ``append`` will accept, with its number and hash. Numbers that are not finite become text."""
        plain = {key: plain_value(value) for key, value in fields.items()}
        row = {"n": self._length, "kind": kind, "time": time, **plain}
        if len(row) != 3 + len(plain):
            raise LedgerError(self._length, f"a {kind!r} row may not set n, kind or time itself; leave them out")
        row["hash"] = chained_hash(self.prefix_hash(self._length), row)
        self._refuse_contradiction(row)
        return row

    def append(self, row: Row) -> "Ledger":
        """This ledger and one row more; a row out of the chain or against the history is a LedgerError."""
        n = self._length
        if row.get("n") != n:
            raise LedgerError(n, f"it says n={row.get('n')!r}; rows count 0, 1, 2 .. without a gap")
        expected = chained_hash(self.prefix_hash(n), row)
        if row.get("hash") != expected:
            raise LedgerError(
                n,
                f"its hash is {row.get('hash')!r} where the chain gives {expected!r}; this row or one before it was "
                f"changed after it was written; restore the file from a copy, or fork from a checkpoint",
            )
        self._refuse_contradiction(row)
        # A sibling may have grown the shared list already; then this branch goes on in a copy.
        log = self._log if len(self._log) == n else self._log[:n]
        log.append(row)
        longer = Ledger()
        longer._take(log, self)
        longer.decisions = self.decisions.after(row)
        if row["kind"] == "attempt":
            longer.attempts = (*self.attempts, _attempt(row))
        return longer

    def prefix_hash(self, n: int) -> str:
        """Hash that stands for the first n rows; empty for none."""
        if not 0 <= n <= self._length:
            raise ValueError(f"the ledger has {self._length} rows; there is no prefix of {n}")
        return str(self._log[n - 1]["hash"]) if n else ""

    def prefix(self, n: int) -> "Ledger":
        """The ledger as it was with n rows."""
        self.prefix_hash(n)
        return Ledger(self.rows[:n])

    def of_kind(self, kind: str) -> list[Row]:
        """All rows of one kind, in order."""
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def attempt(self) -> int:
        """Number of the attempt under way; 0 before the first."""
        return len(self.attempts)

    @cached_property
    def exclusions(self) -> tuple[Exclusion, ...]:
        """Documents blanked by decisions so far, each from the earliest batch any decision named; sorted by document.

        Those of abandoned attempts stay in force: what was found bad is not forgotten by rolling back further.
        """
        earliest: dict[str, int] = {}
        for attempt in self.attempts:
            for item in attempt.exclude:
                earliest[item.document] = min(item.from_batch, earliest.get(item.document, item.from_batch))
        return tuple(Exclusion(document=name, from_batch=batch) for name, batch in sorted(earliest.items()))

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        """For each attempt the first batch that a later attempt took over; infinity where none did."""
        ends: list[float] = []
        lowest = math.inf
        for attempt in reversed(self.attempts):
            ends.append(lowest)
            lowest = min(lowest, attempt.from_batch)
        return tuple(reversed(ends))

    def end_of(self, attempt: int) -> float:
        """Batches of this attempt below the returned number survive (infinity: all of them)."""
        if not 1 <= attempt <= len(self._ends):
            raise ValueError(f"attempt {attempt} is not in the ledger, which has attempts 1 to {len(self._ends)}")
        return self._ends[attempt - 1]

    def row_survives(self, attempt: int, batch_index: int) -> bool:
        """Whether batch ``batch_index`` as consumed by this attempt is part of the run as it stands."""
        return batch_index < self.end_of(attempt)

    @cached_property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Every checkpoint ever recorded, in order; one written again under its name counts where it was last."""
        latest: dict[str, Checkpoint] = {}
        for row in self.of_kind("checkpoint"):
            latest.pop(row["name"], None)
            latest[row["name"]] = Checkpoint(
                row["name"], row["step"], row["batch_index"], row["attempt"], row["digest"], row["n"]
            )
        return tuple(latest.values())

    def surviving_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Checkpoints of the run as it stands, oldest state first; whether their files are whole, the disk must say."""
        alive = [c for c in self.checkpoints if c.batch_index <= self.end_of(c.attempt)]
        return tuple(sorted(alive, key=lambda c: (c.batch_index, c.n)))

    @cached_property
    def certified(self) -> frozenset[str]:
        """Names of checkpoints after which the run stayed healthy."""
        return frozenset(row["name"] for row in self.of_kind("certified"))

    def newest_certified(self) -> Checkpoint | None:
        """The latest surviving state that is certified."""
        certified = [c for c in self.surviving_checkpoints() if c.name in self.certified]
        return certified[-1] if certified else None

    @cached_property
    def all_skips(self) -> tuple[Skip, ...]:
        """Every skipped step ever, of abandoned attempts too."""
        skips, attempt = [], 0
        for row in self.rows:
            if row["kind"] == "attempt":
                attempt = row["attempt"]
            elif row["kind"] == "skip":
                skips.append(Skip(attempt, row["batch_index"], row["step"], row["cause"]))
        return tuple(skips)

    def skips(self) -> tuple[Skip, ...]:
        """Skipped steps of the run as it stands, in order of batch."""
        alive = [skip for skip in self.all_skips if self.row_survives(skip.attempt, skip.batch_index)]
        return tuple(sorted(alive, key=lambda skip: skip.batch_index))

    def _last_since_attempt(self, kind: str) -> Row | None:
        for at in range(self._length - 1, -1, -1):
            row = self._log[at]
            if row["kind"] == kind:
                return row
            if row["kind"] == "attempt":
                return None
        return None

    @property
    def finish(self) -> Row | None:
        """The row that ended the run; None while it goes on, also when it was taken up again."""
        return self._last_since_attempt("finish")

    @property
    def stop(self) -> Row | None:
        """The row that says why the last attempt stopped in good order before the end; None otherwise."""
        return self._last_since_attempt("stop")

    @property
    def halt(self) -> Row | None:
        """The verdict by which the guard gave up in the last attempt; None otherwise."""
        row = self._last_since_attempt("verdict")
        return row if row and row.get("action") == "halt" else None

    @property
    def lineage(self) -> Row | None:
        """For a fork: the row with parent, step and config diff."""
        rows = self.of_kind("lineage")
        return rows[-1] if rows else None

    def _refuse_contradiction(self, row: Row) -> None:
        """What the lineage rule stands on: known kinds, all fields, attempts in order and started from what survives."""
        n, kind = self._length, str(row.get("kind"))
        if kind not in KINDS:
            raise LedgerError(n, f"kind {kind!r} is not known; the kinds are {', '.join(KINDS)}")
        if missing := [field for field in KINDS[kind] if field not in row]:
            raise LedgerError(n, f"a {kind!r} row needs {', '.join(missing)} as well")
        if kind == "attempt":
            self._refuse_attempt(row)
        elif kind in ("checkpoint", "skip") and not self.attempt:
            raise LedgerError(n, f"a {kind!r} row belongs to an attempt; write the attempt row first")
        elif kind == "checkpoint" and not 1 <= row["attempt"] <= self.attempt:
            raise LedgerError(n, f"checkpoint of attempt {row['attempt']}, but the attempts are 1 to {self.attempt}")

    def _refuse_attempt(self, row: Row) -> None:
        n = self._length
        if row["attempt"] != self.attempt + 1:
            raise LedgerError(n, f"attempt {row['attempt']} follows attempt {self.attempt}; it must be the next number")
        if row["reason"] not in REASONS:
            raise LedgerError(n, f"reason {row['reason']!r} of an attempt is not one of {', '.join(REASONS)}")
        source = next((c for c in self.checkpoints if c.name == row["checkpoint"]), None)
        if source is not None and row["reason"] != "fork":
            if source.batch_index > self.end_of(source.attempt):
                raise LedgerError(
                    n,
                    f"attempt {row['attempt']} would start from {source.name}, which an earlier rollback left behind; "
                    f"start from one of {[c.name for c in self.surviving_checkpoints()]}",
                )
            if source.batch_index != row["from_batch"]:
                raise LedgerError(
                    n, f"from_batch is {row['from_batch']}, but {source.name} is at batch {source.batch_index}"
                )
        in_force = {item.document: item.from_batch for item in self.exclusions}
        for item in row["exclude"]:
            new = item["from_batch"] < in_force.get(item["document"], math.inf)
            if new and item["from_batch"] < row["from_batch"] and row["reason"] != "fork":
                raise LedgerError(
                    n,
                    f"document {item['document']} would be excluded from batch {item['from_batch']}, but batches "
                    f"below {row['from_batch']} stay as they were read; exclude from {row['from_batch']} or later, "
                    f"or roll back further",
                )


def _attempt(row: Row) -> Attempt:
    return Attempt(
        number=row["attempt"],
        reason=row["reason"],
        from_step=row["from_step"],
        from_batch=row["from_batch"],
        checkpoint=row["checkpoint"],
        exclude=tuple(Exclusion(**item) for item in row["exclude"]),
        cause=row["cause"],
        time=row["time"],
    )
