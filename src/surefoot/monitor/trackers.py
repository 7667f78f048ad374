"""Other places that get the rows. Their x axis is our ``batch_index``, so that a rollback does not spoil the curves."""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from surefoot.guard.ledger import Ledger
from surefoot.monitor.sentences import sentence
from surefoot.monitor.step_report import StepReport


class Tracker(Protocol):
    """Gets reports and events and returns nothing."""

    def step(self, report: StepReport) -> None:
        """One consumed batch."""

    def event(self, kind: str, row: Mapping[str, Any]) -> None:
        """A ledger row or event."""

    def close(self) -> None:
        """Hand over what is left."""


class MissingExtraError(ImportError):
    """A tracker was asked for whose package is not installed."""


def open_trackers(
    names: Iterable[str], folder: Path, ledger: Ledger, config: Mapping[str, Any], say: Callable[[str], None]
) -> list[Tracker]:
    """The trackers of ``log.trackers``; call it on rank 0, after the attempt was opened.

    A tracker that fails later is said once and left alone: no third party stops a run.
    """
    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard"),
        "wandb": lambda: Wandb(folder, ledger, config),
    }
    trackers: list[Tracker] = [Sturdy(name, openers[name](), say) for name in names]
    for tracker in trackers:
        if ledger.rows:
            tracker.event("attempt", ledger.of_kind("attempt")[-1])
    return trackers


class Sturdy:
    """A tracker whose failure is heard once and ends only itself."""

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._name, self._tracker, self._say = name, tracker, say
        self._broken = False

    def step(self, report: StepReport) -> None:
        """One consumed batch."""
        self._guarded(lambda: self._tracker.step(report))

    def event(self, kind: str, row: Mapping[str, Any]) -> None:
        """A ledger row or event."""
        self._guarded(lambda: self._tracker.event(kind, row))

    def close(self) -> None:
        """Hand over what is left."""
        self._guarded(self._tracker.close)

    def _guarded(self, act: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001 -- third-party code may raise anything, and a curve elsewhere is not worth a run
            self._broken = True
            self._say(f"{self._name} failed and gets nothing more ({type(error).__name__}: {error}); training goes on")


class TensorBoard:
    """Event files for TensorBoard, written without torch. A new attempt purges what earlier ones wrote from its batch on."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError(
                "log.trackers has 'tensorboard', which needs its package: pip install -e '.[tensorboard]' in Surefoot's checkout, "
                "or leave it out"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder))
        self._last: StepReport | None = None

    def step(self, report: StepReport) -> None:
        """Every metric of the batch as a scalar at step ``batch_index``."""
        self._last = report
        self._scalars(report.batch_index, report.metrics)

    def event(self, kind: str, row: Mapping[str, Any]) -> None:
        """Purge at a new attempt; an evaluation that no report carried."""
        if kind == "attempt" and row["from_batch"] > 0:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=row["from_batch"], session_log=start))
        elif kind == "eval" and (fresh := _unreported(row, self._last)) and self._last:
            self._scalars(self._last.batch_index, fresh)

    def _scalars(self, batch_index: int, metrics: Mapping[str, float]) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=batch_index, summary=summary))

    def close(self) -> None:
        """Write out the file."""
        self._writer.close()


class Wandb:
    """One Weights & Biases run per run folder, continued by later attempts; offline with WANDB_MODE=offline.

    wandb's own step never goes back, so ours is a value it draws over: after a rollback a batch is logged again, and
    ``attempt`` tells the curves apart.
    """

    def __init__(self, folder: Path, ledger: Ledger, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                "log.trackers has 'wandb', which needs its package: pip install -e '.[wandb]' in Surefoot's checkout, or leave it out"
            ) from error
        self._run = wandb.init(
            project="surefoot",
            id=wandb_id(folder, ledger),
            name=folder.name,
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )
        self._run.define_metric("batch_index")
        self._run.define_metric("*", step_metric="batch_index")
        self._attempt = ledger.attempt
        self._last: StepReport | None = None

    def step(self, report: StepReport) -> None:
        """Every metric of the batch, beside its batch_index."""
        self._last = report
        self._log(report.batch_index, report.step, report.metrics)

    def event(self, kind: str, row: Mapping[str, Any]) -> None:
        """Alerts on what a person would want to know; an evaluation that no report carried."""
        if kind == "attempt":
            self._attempt = row["attempt"]
        if (kind == "attempt" and row["reason"] == "rollback") or kind == "stop":
            self._run.alert(title=f"{self._run.name}: {row['reason']}", text=sentence(kind, row))
        elif kind == "eval" and (fresh := _unreported(row, self._last)) and self._last:
            self._log(self._last.batch_index, row["step"], fresh)

    def _log(self, batch_index: int, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "batch_index": batch_index, "step": step, "attempt": self._attempt})

    def close(self) -> None:
        """Tell wandb that this process is done."""
        self._run.finish()


def wandb_id(folder: Path, ledger: Ledger) -> str:
    """The same for all attempts of a run folder, another for the folder that takes its place after --fresh."""
    begun = ledger.rows[0]["time"] if ledger.rows else 0
    return hashlib.sha256(f"{folder.resolve()} {begun}".encode()).hexdigest()[:16]


def _unreported(row: Mapping[str, Any], last: StepReport | None) -> dict[str, float]:
    """Metrics of an evaluation that did not come with the last report."""
    known: Mapping[str, float] = last.metrics if last else {}
    return {name: value for name, value in row.items() if name.startswith("eval/") and known.get(name) != value}
