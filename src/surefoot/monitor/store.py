"""The run folder as its one writer sees it: lock, config, environment, ledger, attempts with their rows, heartbeat.

Rank 0 owns the store; other ranks only need ``attempt_folder`` and ``log_path``. Reading is ``monitor/run.py``.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from surefoot.config.data import Exclusion
from surefoot.guard.ledger import Ledger
from surefoot.monitor.durable import StoreError, explaining, sync_folder, write_atomic
from surefoot.monitor.ledger_file import LedgerFile
from surefoot.monitor.lock import RunLock
from surefoot.monitor.metrics import refuse_unknown
from surefoot.monitor.rows import RowFile
from surefoot.monitor.step_report import StepReport

HEARTBEAT_S = 1.0
"""Least time between two heartbeats."""

OWN_NAMES = {"attempts", "checkpoints", "lock", "config.toml", "env.json", "heartbeat.json"}
"""What a run killed before its first ledger row may hold."""


def attempt_folder(folder: Path, attempt: int) -> Path:
    """Where an attempt keeps its rows and logs."""
    return folder / "attempts" / f"{attempt:04d}"


def log_path(folder: Path, attempt: int, rank: int) -> Path:
    """The log of one rank in one attempt."""
    return attempt_folder(folder, attempt) / "logs" / f"rank-{rank:05d}.log"


def move_aside(folder: Path) -> Path | None:
    """Rename an existing run to name.1, name.2 .. and return where it went; never deletes. StoreError if it is in use."""
    if not folder.exists():
        return None
    lock = RunLock(folder)
    try:
        n = 1
        while (aside := folder.with_name(f"{folder.name}.{n}")).exists():
            n += 1
        with explaining(folder, f"move it aside to {aside.name}"):
            folder.rename(aside)
            sync_folder(folder.parent)
    finally:
        lock.release()
    return aside


def _refuse_foreign(folder: Path) -> None:
    """A folder with other things in it and no ledger is somebody's home, not a run."""
    with explaining(folder, "look into the run folder"):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder}: is a file, and a run is a folder; choose another with --run")
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if "ledger.jsonl" not in names and (foreign := sorted(names - OWN_NAMES)):
        raise StoreError(
            f"{folder}: holds {foreign[0]!r} and no ledger.jsonl, so it is not a run; choose a new folder with --run"
        )


class RunStore:
    """Everything written to one run folder, in the order that survives a crash.

    ``say`` hears what a person should know: a repaired ledger, a full disk. It must not raise.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Create or open the folder and lock it. StoreError: in use, read-only, full, or a damaged ledger."""
        self.folder, self._say = folder, say
        _refuse_foreign(folder)
        with explaining(folder, "create the run folder"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "attempts").mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        self._lock = RunLock(folder)
        try:
            self._ledger = LedgerFile(folder / "ledger.jsonl")
        except OSError:
            self._lock.release()
            raise
        if self._ledger.torn:
            say(self._ledger.torn)
        self._metrics: RowFile | None = None
        self._events: RowFile | None = None
        self._beat_at = 0.0
        self._beat_refused = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def ledger(self) -> Ledger:
        """The ledger as it stands on disk."""
        return self._ledger.ledger

    @property
    def attempt(self) -> int:
        """Number of the attempt whose rows are written; 0 before ``open_attempt``."""
        return self.ledger.attempt if self._metrics else 0

    def write_config(self, toml: str) -> None:
        """config.toml, whole or not there."""
        write_atomic(self.folder / "config.toml", toml)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """env.json: versions, commit, devices, threads, argv."""
        write_atomic(self.folder / "env.json", json.dumps(environment, indent=2, sort_keys=True) + "\n")

    def record(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append to the ledger and wait for the disk; call it before doing what the row says. StoreError, LedgerError."""
        return self._ledger.append(kind, **fields)

    def open_attempt(
        self,
        *,
        reason: str,
        from_step: int,
        from_batch: int,
        checkpoint: str = "",
        exclude: Iterable[Exclusion] = (),
        cause: str = "",
    ) -> int:
        """Record a start, resume, fork or rollback, then write rows to its own folder. Returns the attempt's number.

        Call it before the state is restored: after a crash in between, the ledger still knows the exclusions.
        """
        self._close_rows()
        number = self.ledger.attempt + 1
        self.record(
            "attempt",
            attempt=number,
            reason=reason,
            from_step=from_step,
            from_batch=from_batch,
            checkpoint=checkpoint,
            exclude=[{"document": item.document, "from_batch": item.from_batch} for item in exclude],
            cause=cause,
        )
        folder = attempt_folder(self.folder, number)
        self._metrics = RowFile(folder / "metrics.jsonl", self._say)
        self._events = RowFile(folder / "events.jsonl", self._say)
        return number

    def write_step(self, report: StepReport) -> None:
        """The row of one step; a metric that is not in the table is an UnknownMetricError."""
        refuse_unknown(report.metrics)
        self._rows(self._metrics).append(report.row())

    def write_metrics(self, batch_index: int, step: int, metrics: Mapping[str, float]) -> None:
        """More numbers about a batch already written, an evaluation say; readers merge rows of one batch."""
        refuse_unknown(metrics)
        self._rows(self._metrics).append(
            {"batch_index": batch_index, "step": step, **{k: float(v) for k, v in metrics.items()}}
        )

    def write_event(self, kind: str, batch_index: int, step: int, **fields: Any) -> None:
        """Something worth a sentence in the report that the ledger does not hold (``monitor/sentences.py``)."""
        row = {"time": time.time(), "kind": kind, "batch_index": batch_index, "step": step, **fields}
        self._rows(self._events).append(row)

    def heartbeat(self, step: int, batch_index: int, state: str = "running", *, force: bool = False) -> None:
        """heartbeat.json, at most once a second unless forced; a disk that refuses is said once and does not stop a run."""
        now = time.monotonic()
        if not force and now - self._beat_at < HEARTBEAT_S:
            return
        self._beat_at = now
        beat = {
            "state": state,
            "time": time.time(),
            "step": step,
            "batch_index": batch_index,
            "attempt": self.ledger.attempt,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        try:
            write_atomic(self.folder / "heartbeat.json", json.dumps(beat) + "\n", sync=False)
            self._beat_refused = False
        except StoreError as error:
            if not self._beat_refused:
                self._say(f"{error}. Training goes on without a heartbeat")
            self._beat_refused = True

    def flush(self, *, sync: bool = False) -> bool:
        """Hand all rows over; with ``sync``, down to the disk, as before a checkpoint's manifest.

        False: the disk refused, rows are only in memory, and a checkpoint written now would outlive its rows.
        """
        done = [file.flush(sync=sync) for file in (self._metrics, self._events) if file]
        return all(done)

    def close(self) -> None:
        """Write what is left and let the folder go; twice is once."""
        self._close_rows()
        self._ledger.close()
        self._lock.release()

    def _close_rows(self) -> None:
        for file in (self._metrics, self._events):
            if file:
                file.close()
        self._metrics = self._events = None

    @staticmethod
    def _rows(file: RowFile | None) -> RowFile:
        if file is None:
            raise RuntimeError("no attempt is open; call open_attempt first")
        return file
