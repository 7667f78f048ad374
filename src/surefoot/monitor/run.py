"""Reading a run: the surviving history, whether the run is running, finished, killed or long gone."""

import socket
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from surefoot.guard.ledger import Attempt, Ledger
from surefoot.monitor.durable import StoreError, read_json
from surefoot.monitor.ledger_file import read_ledger
from surefoot.monitor.lock import is_locked
from surefoot.monitor.rows import number, read_rows
from surefoot.monitor.store import attempt_folder

Columns = dict[str, npt.NDArray[Any]]

SILENT_S = 60.0
"""A heartbeat older than this is silence."""


@dataclass(frozen=True)
class Status:
    """What a run is doing."""

    state: Literal["empty", "running", "finished", "stopped", "crashed"]
    reason: str
    """Why it stopped; empty otherwise."""
    step: int
    batch_index: int
    silent_s: float
    """Seconds since its last heartbeat; 0 where there never was one."""
    pid: int
    host: str

    def sentence(self) -> str:
        """For a person."""
        match self.state:
            case "empty":
                return "has not started"
            case "finished":
                return f"finished at step {self.step:,}"
            case "stopped":
                return f"stopped at step {self.step:,}: {self.reason}; the same command continues"
            case "crashed":
                return f"ended without a word after step {self.step:,} (killed or crashed); the same command continues"
            case "running":
                quiet = f", silent for {self.silent_s:.0f} s" if self.silent_s > SILENT_S else ""
                return f"running at step {self.step:,} (process {self.pid} on {self.host}{quiet})"


class Run:
    """A run folder, read as it was when first asked; make another ``Run`` to see what came since."""

    def __init__(self, folder: str | Path) -> None:
        """StoreError where there is no run."""
        self.folder = Path(folder)
        if not (self.folder / "ledger.jsonl").exists():
            near = [run.name for run in list_runs(self.folder.parent)][:5]
            hint = f"; runs beside it: {', '.join(near)}" if near else ""
            raise StoreError(f"{self.folder}: no run here (it would hold ledger.jsonl){hint}")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.toml as nested dictionaries; empty where it is missing."""
        path = self.folder / "config.toml"
        try:
            return tomllib.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot read the config: {error}") from error

    @cached_property
    def environment(self) -> dict[str, Any]:
        """env.json; empty where it is missing."""
        return read_json(self.folder / "env.json")

    @cached_property
    def heartbeat(self) -> dict[str, Any]:
        """heartbeat.json; empty where it is missing."""
        return read_json(self.folder / "heartbeat.json")

    @cached_property
    def ledger(self) -> Ledger:
        """All rows of the ledger. StoreError where it is damaged."""
        return read_ledger(self.folder / "ledger.jsonl")

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every start, resume and rollback."""
        return self.ledger.attempts

    def rows_of(self, ledger: Ledger, below: float) -> dict[int, dict[str, Any]]:
        """Rows of the history that this ledger describes, by batch, for batches under ``below``; later attempts win."""
        ends = {attempt.number: min(ledger.end_of(attempt.number), below) for attempt in ledger.attempts}
        merged: dict[int, dict[str, Any]] = {}
        for row in self.written_rows:
            if row["batch_index"] < ends.get(row["attempt"], -1):
                merged.setdefault(row["batch_index"], {}).update(row)
        return merged

    @cached_property
    def written_rows(self) -> list[dict[str, Any]]:
        """Every row of every attempt in the order of writing, abandoned ones too; ``attempt`` is added to each."""
        return [
            row | {"attempt": attempt.number}
            for attempt in self.attempts
            for row in read_rows(attempt_folder(self.folder, attempt.number) / "metrics.jsonl")
            if "batch_index" in row
        ]

    @cached_property
    def abandoned_rows(self) -> list[dict[str, Any]]:
        """Rows that a later rollback or resume took the place of: work that was done and lost."""
        ends = {attempt.number: self.ledger.end_of(attempt.number) for attempt in self.attempts}
        return [row for row in self.written_rows if row["batch_index"] >= ends[row["attempt"]]]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row per consumed batch of the surviving history, in order, as it was written."""
        merged = self.rows_of(self.ledger, float("inf"))
        return [merged[batch] for batch in sorted(merged)]

    @cached_property
    def joined_rows(self) -> list[dict[str, Any]]:
        """The same, with the parents' rows up to each fork in front."""
        merged: dict[int, dict[str, Any]] = {}
        for run, ledger, below in reversed(list(self._line())):
            merged.update(run.rows_of(ledger, below))
        return [merged[batch] for batch in sorted(merged)]

    @overload
    def metrics(self, as_: Literal["numpy"] = "numpy") -> Columns: ...
    @overload
    def metrics(self, as_: Literal["pandas"]) -> Any: ...
    def metrics(self, as_: str = "numpy") -> Any:
        """The surviving history: arrays by metric name with ``batch_index`` and ``step`` beside them, NaN where absent.

        ``as_="pandas"`` is a DataFrame indexed by batch_index.
        """
        return _shaped(self.rows, as_)

    @overload
    def history(self, as_: Literal["numpy"] = "numpy") -> Columns: ...
    @overload
    def history(self, as_: Literal["pandas"]) -> Any: ...
    def history(self, as_: str = "numpy") -> Any:
        """``metrics`` with the parents of a fork joined in front, each up to where its child left."""
        return _shaped(self.joined_rows, as_)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Everything in the attempts' events.jsonl, in order; ``attempt`` and ``survives`` are added to each."""
        found = []
        for attempt in self.attempts:
            for event in read_rows(attempt_folder(self.folder, attempt.number) / "events.jsonl"):
                event["attempt"] = attempt.number
                event["survives"] = self.ledger.row_survives(attempt.number, event["batch_index"])
                found.append(event)
        return found

    def last_event(self, kind: str) -> dict[str, Any]:
        """The newest event of a kind; empty where there is none."""
        return next((event for event in reversed(self.events) if event["kind"] == kind), {})

    def status(self) -> Status:
        """Running, finished, stopped or crashed, from the lock, the ledger and the heartbeat."""
        beat = self.heartbeat
        silent = max(0.0, time.time() - beat["time"]) if beat else 0.0
        stop, finish = self.ledger.stop, self.ledger.finish
        state: Literal["empty", "running", "finished", "stopped", "crashed"]
        # Locks do not always reach across machines; a fresh heartbeat from another one does.
        elsewhere = beat.get("state") == "running" and beat.get("host") != socket.gethostname() and silent < SILENT_S
        if is_locked(self.folder) or elsewhere:
            state = "running"
        elif not self.attempts:
            state = "empty"
        else:
            state = "finished" if finish else "stopped" if stop else "crashed"
        last = beat or (self.rows[-1] if self.rows else {})
        step, batch = last.get("step", 0), last.get("batch_index", 0)
        if finish:
            step, batch = finish["step"], finish["batch_index"]
        reason = str(stop["reason"]) if stop else ""
        return Status(state, reason, step, batch, silent, beat.get("pid", 0), beat.get("host", ""))

    def parent(self) -> "Run | None":
        """The run this one was forked from; None for a run of its own. StoreError where the parent is gone."""
        row = self.ledger.lineage
        if row is None:
            return None
        written = Path(str(row["parent"]))
        for place in (written, self.folder.parent / written.name):
            if (place / "ledger.jsonl").exists():
                return Run(place)
        raise StoreError(f"{self.folder}: forked from {written}, which is not there; its curve cannot be joined")

    def lineage(self) -> "list[Run]":
        """This run's parents, nearest first."""
        return [run for run, _, _ in self._line()][1:]

    def _line(self) -> "Iterator[tuple[Run, Ledger, float]]":
        """This run and its parents, each with the ledger as it was at the fork and the batch where its child left it.

        What a parent did after the fork, rolling back below it included, is not part of the child.
        """
        run, ledger, below = self, self.ledger, float("inf")
        seen = set()
        while run.folder.resolve() not in seen:
            seen.add(run.folder.resolve())
            yield run, ledger, below
            parent = run.parent() if ledger.attempts else None
            if parent is None:
                return
            first = ledger.attempts[0]
            below = min(below, first.from_batch)
            source = next((c for c in parent.ledger.checkpoints if c.name == first.checkpoint), None)
            run, ledger = parent, parent.ledger.prefix(source.n + 1) if source else parent.ledger


def list_runs(folder: str | Path) -> list[Run]:
    """Every run in a folder, by name."""
    root = Path(folder)
    if not root.is_dir():
        return []
    return [Run(path) for path in sorted(root.iterdir()) if (path / "ledger.jsonl").exists()]


NUMBERS = ("batch_index", "step", "tokens", "attempt")
"""Columns of whole numbers beside the metrics."""


def columns(rows: list[dict[str, Any]]) -> Columns:
    """Rows as arrays by name: counters int64, metrics float64 with NaN where a row has none."""
    count = len(rows)
    result: Columns = {name: np.fromiter((row.get(name, -1) for row in rows), np.int64, count) for name in NUMBERS}
    for place, row in enumerate(rows):
        for name, value in row.items():
            if "/" in name:
                if name not in result:
                    result[name] = np.full(count, np.nan)
                result[name][place] = number(value)
    return result


def _shaped(rows: list[dict[str, Any]], as_: str) -> Any:
    if as_ == "numpy":
        return columns(rows)
    if as_ != "pandas":
        raise ValueError(f"as_={as_!r}: choose 'numpy' or 'pandas'")
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "metrics as a DataFrame need pandas: pip install -e '.[pandas]' in Surefoot's checkout"
        ) from error
    return pandas.DataFrame(columns(rows)).set_index("batch_index")
