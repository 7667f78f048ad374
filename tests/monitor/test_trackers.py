"""wandb and TensorBoard, offline: curves stay right through rollbacks and resumes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.guard.ledger import Ledger
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.trackers import MissingExtraError, Sturdy, Tracker, open_trackers, wandb_id


def report(batch: int, loss: float, **more: float) -> StepReport:
    return StepReport(batch, batch + 1, 8 * (batch + 1), False, "", {"train/loss": loss, **more}, "", ())


def opened(ledger: Ledger, reason: str, from_batch: int, time: float = 1.0) -> Ledger:
    fields = {"from_step": from_batch, "from_batch": from_batch, "checkpoint": "", "exclude": [], "cause": "a spike"}
    return ledger.append(ledger.next_row("attempt", {"attempt": ledger.attempt + 1, "reason": reason, **fields}, time))


def silent(text: str) -> None:
    raise AssertionError(text)


def act(name: str, folder: Path) -> Ledger:
    """Start, roll back from 10 to 6 in one process; resume at 8 in another. The final evaluation comes apart."""
    ledger = opened(Ledger(), "start", 0)
    (tracker,) = open_trackers([name], folder, ledger, {"steps": 12}, silent)
    for batch in range(10):
        tracker.step(report(batch, 100.0 + batch))
    ledger = opened(ledger, "rollback", 6)
    tracker.event("attempt", ledger.rows[-1])
    for batch in range(6, 9):
        tracker.step(report(batch, 200.0 + batch))
    tracker.close()
    ledger = opened(ledger, "resume", 8)
    (tracker,) = open_trackers([name], folder, ledger, {"steps": 12}, silent)
    for batch in range(8, 12):
        tracker.step(report(batch, 300.0 + batch))
    tracker.event("eval", {"step": 12, "eval/code/loss": 2.5})
    tracker.close()
    return ledger


EXPECTED = {
    **{b: 100.0 + b for b in range(6)},
    **{b: 200.0 + b for b in (6, 7)},
    **{b: 300.0 + b for b in range(8, 12)},
}


def test_tensorboard_shows_the_surviving_curve_and_needs_no_torch(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    act("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert {e.step: e.value for e in events.Scalars("train/loss")} == EXPECTED
    assert len(events.Scalars("train/loss")) == len(EXPECTED)
    assert [(e.step, e.value) for e in events.Scalars("eval/code/loss")] == [(11, 2.5)]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("CONSOLE", "off"), ("DISABLE_GIT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.teardown()


def records(data: bytes) -> Iterator[bytes]:
    """Payloads of a .wandb file: LevelDB's log format (blocks of 32 KiB; crc, length, type) after a 7-byte header."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        if (left := 32_768 - place % 32_768) < 7:
            place += left
            continue
        length, part = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def history(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows that wandb kept for a later sync."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                yield {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wandb_gets_every_batch_again_after_a_rollback_over_our_own_step(tmp_path: Path, offline: Any) -> None:
    act("wandb", tmp_path)
    offline.teardown()  # its service writes on for a moment after a run is finished
    rows = list(history(tmp_path))
    last = {row["batch_index"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert last == EXPECTED
    assert [(row["attempt"], row["batch_index"]) for row in rows if "train/loss" in row] == [
        *((1, b) for b in range(10)),
        *((2, b) for b in range(6, 9)),
        *((3, b) for b in range(8, 12)),
    ]
    assert [(row["batch_index"], row["eval/code/loss"]) for row in rows if "eval/code/loss" in row] == [(11, 2.5)]


def test_attempts_of_a_folder_are_one_wandb_run_and_a_fresh_one_is_another(tmp_path: Path) -> None:
    first = opened(Ledger(), "start", 0, time=1.0)
    assert wandb_id(tmp_path, first) == wandb_id(tmp_path, opened(first, "resume", 0, time=5.0))
    assert wandb_id(tmp_path, first) != wandb_id(tmp_path, opened(Ledger(), "start", 0, time=2.0))


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "tensorboard.compat.proto")])
def test_a_tracker_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"log.trackers has '{name}'.*pip install -e '\.\[{name}\]'"):
        open_trackers([name], tmp_path, Ledger(), {}, silent)


class Breaking:
    def step(self, report: StepReport) -> None:
        raise RuntimeError("no network")

    def event(self, kind: str, row: Any) -> None: ...

    def close(self) -> None:
        raise RuntimeError("still none")


def test_a_tracker_that_fails_is_said_once_and_stops_nothing() -> None:
    said: list[str] = []
    tracker: Tracker = Sturdy("wandb", Breaking(), said.append)
    for batch in range(3):
        tracker.step(report(batch, 1.0))
    tracker.close()
    assert said == ["wandb failed and gets nothing more (RuntimeError: no network); training goes on"]
