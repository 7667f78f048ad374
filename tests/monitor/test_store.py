"""The run folder: what a killed job, a second job, a full disk and a read-only folder do to it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config.data import Exclusion
from surefoot.guard.ledger import Ledger
from surefoot.monitor import durable
from surefoot.monitor.durable import StoreError, write_atomic
from surefoot.monitor.ledger_file import LedgerFile, read_ledger
from surefoot.monitor.lock import RunLock, is_locked
from surefoot.monitor.metrics import UnknownMetricError
from surefoot.monitor.rows import RowFile, read_rows
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore, log_path, move_aside


def report(batch: int, **metrics: float) -> StepReport:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StepReport(batch, batch + 1, 64 * (batch + 1), False, "", named, "0" * 16, ())


def silent(text: str) -> None:
    raise AssertionError(f"nothing should be said, but: {text}")


def full_disk(monkeypatch: pytest.MonkeyPatch, room: int, number: int = errno.ENOSPC) -> None:
    """os.write takes ``room`` more bytes, the last call only in part, then fails as a full disk does."""
    left = [room]
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        if left[0] <= 0:
            raise OSError(number, os.strerror(number))
        taken = write(descriptor, data[: left[0]])
        left[0] -= taken
        return taken

    monkeypatch.setattr(durable.os, "write", limited)


def test_a_run_folder_holds_what_the_design_says(tmp_path: Path) -> None:
    with RunStore(tmp_path / "runs" / "x", silent) as store:
        store.write_config('recipe = "tiny"\n')
        store.write_environment({"python": "3.11"})
        assert store.open_attempt(reason="start", from_step=0, from_batch=0) == 1
        store.write_step(report(0, train__loss=3.0))
        store.write_event("note", 0, 1, text="hello")
        store.heartbeat(1, 1)
    found = {str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if path.is_file()}
    assert found == {
        "config.toml",
        "env.json",
        "ledger.jsonl",
        "heartbeat.json",
        "lock",
        "attempts/0001/metrics.jsonl",
        "attempts/0001/events.jsonl",
    }
    assert log_path(store.folder, 1, 0).relative_to(store.folder) == Path("attempts/0001/logs/rank-00000.log")
    row = next(read_rows(store.folder / "attempts/0001/metrics.jsonl"))
    assert row == {"batch_index": 0, "step": 1, "tokens": 64, "sample_digest": "0" * 16, "train/loss": 3.0}


def test_the_attempt_row_is_on_disk_before_the_attempt_has_a_folder(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", silent) as store:
        bad = Exclusion(document="a" * 16, from_batch=0)
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        assert store.open_attempt(reason="rollback", from_step=0, from_batch=0, exclude=[bad], cause="NaN") == 2
        store.write_step(report(0))
    ledger = read_ledger(tmp_path / "x" / "ledger.jsonl")
    assert ledger.exclusions == (bad,)
    assert [(a.number, a.reason, a.cause) for a in ledger.attempts] == [(1, "start", ""), (2, "rollback", "NaN")]


def test_a_metric_outside_the_table_is_refused_by_every_writer(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", silent) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        with pytest.raises(UnknownMetricError, match=r"metric 'train/los' is not in the table.*'train/loss'"):
            store.write_step(report(0, train__los=1.0))
        with pytest.raises(UnknownMetricError, match="eval/code/nats"):
            store.write_metrics(0, 1, {"eval/code/nats": 1.0})
        store.write_metrics(0, 1, {"eval/code/bits_per_byte": 1.0})


def test_a_folder_with_other_things_in_it_is_not_taken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StoreError, match=r"holds 'thesis.tex' and no ledger.jsonl.*choose a new folder with --run"):
        RunStore(tmp_path, silent)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match="is a file, and a run is a folder"):
        RunStore(tmp_path / "thesis.tex", silent)


def test_a_second_job_is_told_who_holds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.monitor.lock.PATIENCE_S", 0.0)
    with RunStore(tmp_path / "x", silent) as store:
        with pytest.raises(StoreError, match=rf"process {os.getpid()} on \S+ is writing this run.*with --run"):
            RunStore(store.folder, silent)
        assert is_locked(store.folder)
        with pytest.raises(StoreError, match="is writing this run"):
            move_aside(store.folder)
    assert not is_locked(store.folder)
    RunStore(store.folder, silent).close()


HOLDER = """
import os, sys, time
from pathlib import Path
from surefoot.monitor.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
if os.fork() == 0:  # a data worker that outlives the job
    time.sleep(60)
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_job_leaves_no_lock_even_if_its_workers_live_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        assert job.stdout is not None
        try:
            assert job.stdout.readline() == "held\n"
            assert is_locked(tmp_path)
            os.kill(job.pid, signal.SIGKILL)
            os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
            lock = RunLock(tmp_path)
            lock.release()
        finally:
            os.killpg(job.pid, signal.SIGKILL)


def test_moving_aside_renames_and_never_deletes(tmp_path: Path) -> None:
    assert move_aside(tmp_path / "x") is None
    for n in (1, 2):
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "data").write_text(str(n))
        assert move_aside(tmp_path / "x") == tmp_path / f"x.{n}"
    assert (tmp_path / "x.1" / "data").read_text() == "1"
    assert (tmp_path / "x.2" / "data").read_text() == "2"
    assert not (tmp_path / "x").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused_with_its_path_and_the_way_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(StoreError, match=r"x: cannot create the run folder: you may not write there.*--run"):
            RunStore(tmp_path / "x", silent)
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize(
    ("number", "text"),
    [(errno.EROFS, "mounted read-only"), (errno.EACCES, "you may not write there"), (errno.ENOSPC, "the disk is full")],
)
def test_a_folder_that_cannot_be_made_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        StoreError, match=rf"x: cannot create the run folder: .*{text}.*choose another folder with --run"
    ):
        RunStore(tmp_path / "x", silent)


def ledger_file(folder: Path, rows: int = 3) -> Path:
    path = folder / "ledger.jsonl"
    file = LedgerFile(path)
    fields = {"reason": "start", "from_step": 0, "from_batch": 0, "checkpoint": "", "exclude": [], "cause": ""}
    file.append("attempt", attempt=1, **fields)
    for batch in range(rows - 1):
        file.append("skip", batch_index=batch, step=0, cause="loss is NaN")
    file.close()
    return path


def test_a_ledger_cut_at_any_byte_of_its_last_line_is_repaired_aloud_and_goes_on(tmp_path: Path) -> None:
    path = ledger_file(tmp_path)
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    for cut in range(start + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read_ledger(path).rows) == 2
        file = LedgerFile(path)
        assert f"the last line was cut short while being written ({cut - start} bytes)" in file.torn
        file.append("skip", batch_index=9, step=0, cause="")
        file.close()
        assert [row.get("batch_index") for row in read_ledger(path).rows] == [None, 0, 9]
    path.write_bytes(whole[:start])
    file = LedgerFile(path)
    assert file.torn == ""
    file.close()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda lines: [lines[0], b"\0\0\0\n", lines[2]], "line 2: not a ledger row"),
        (lambda lines: [lines[0], lines[1].replace(b"NaN", b"fine"), lines[2]], "line 2: ledger row 1: its hash is"),
        (lambda lines: [lines[0], lines[2]], "line 2: ledger row 1: it says n=2"),
        (lambda lines: [b"[1]\n", *lines], "line 1: not a ledger row"),
    ],
)
def test_any_other_damage_of_the_ledger_is_refused_with_its_line(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], text: str
) -> None:
    path = ledger_file(tmp_path)
    before = b"".join(damage(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(before)
    with pytest.raises(StoreError, match=rf"ledger.jsonl, {text}"):
        LedgerFile(path)
    with pytest.raises(StoreError, match=text):
        RunStore(tmp_path, silent)
    assert path.read_bytes() == before
    RunLock(tmp_path).release()


def test_a_full_disk_leaves_no_half_row_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ledger_file(tmp_path)
    before = path.read_bytes()
    file = LedgerFile(path)
    with monkeypatch.context() as patch:
        full_disk(patch, room=40)
        with pytest.raises(StoreError, match=r"cannot append to the ledger: the disk is full; free some space"):
            file.append("certified", name="a")
    assert path.read_bytes() == before
    assert len(file.ledger.rows) == 3
    file.append("certified", name="a")
    file.close()
    assert len(read_ledger(path).rows) == 4


def test_ledger_rows_are_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_size), fsync(descriptor)))
    file = LedgerFile(tmp_path / "ledger.jsonl")
    fields = {"reason": "start", "from_step": 0, "from_batch": 0, "checkpoint": "", "exclude": [], "cause": ""}
    file.append("attempt", attempt=1, **fields)
    assert synced[-1] == file.path.stat().st_size > 0
    file.close()


def test_rows_survive_a_full_disk_in_memory_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    rows = RowFile(tmp_path / "metrics.jsonl", said.append)
    rows.append({"batch_index": 0})
    assert rows.flush(sync=True)
    with monkeypatch.context() as patch:
        full_disk(patch, room=10)
        for batch in range(1, 100):
            rows.append({"batch_index": batch})
            assert not rows.flush(sync=True)
        assert len(said) == 1
        assert "cannot write rows: the disk is full" in said[0]
        assert "Training goes on; rows are kept in memory" in said[0]
        assert [row["batch_index"] for row in read_rows(rows.path)] == [0]
    assert rows.flush(sync=True)
    assert "the disk takes rows again" in said[1]
    rows.close()
    assert [row["batch_index"] for row in read_rows(rows.path)] == list(range(100))


def test_a_disk_that_stays_full_costs_bounded_memory_and_the_loss_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.monitor.rows.KEEP_BYTES", 1000)
    said: list[str] = []
    rows = RowFile(tmp_path / "metrics.jsonl", said.append)
    with monkeypatch.context() as patch:
        full_disk(patch, room=0)
        for batch in range(500):
            rows.append({"batch_index": batch})
            rows.flush()
    assert rows.dropped > 0
    assert rows.flush(sync=True)
    assert said[1].endswith(f"the oldest {rows.dropped} were lost")
    rows.close()
    kept = [row["batch_index"] for row in read_rows(rows.path)]
    assert kept == list(range(rows.dropped, 500))
    assert rows.path.stat().st_size <= 1000


def test_a_torn_last_row_is_left_out_by_readers_and_cut_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"batch_index":0}\n{"batch_index":1}\n{"batch_ind')
    assert [row["batch_index"] for row in read_rows(path)] == [0, 1]
    rows = RowFile(path, silent)
    rows.append({"batch_index": 2})
    rows.close()
    assert [row["batch_index"] for row in read_rows(path)] == [0, 1, 2]
    assert list(read_rows(tmp_path / "absent.jsonl")) == []


def test_rows_are_strict_json_also_with_nan(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "metrics.jsonl", silent)
    rows.append({"train/loss": float("nan"), "train/gradient_norm": float("-inf"), "train/lr": 1e-3})
    rows.close()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = json.loads(rows.path.read_text(), parse_constant=refuse)
    assert row == {"train/loss": "NaN", "train/gradient_norm": "-Infinity", "train/lr": 1e-3}


def test_a_flush_before_a_checkpoint_reaches_the_disk_and_rows_alone_reach_the_file_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = RowFile(tmp_path / "metrics.jsonl", silent)
    rows.append({"batch_index": 0})
    assert rows.path.stat().st_size == 0
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    assert rows.flush(sync=True)
    assert synced == [rows.path.stat().st_size]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 2.0)
    rows.append({"batch_index": 1})
    assert len(list(read_rows(rows.path))) == 2
    rows.close()


def test_the_heartbeat_is_atomic_throttled_and_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with RunStore(tmp_path / "x", said.append) as store:
        path = store.folder / "heartbeat.json"
        store.heartbeat(1, 1)
        store.heartbeat(2, 2)
        assert json.loads(path.read_text())["step"] == 1
        store.heartbeat(3, 3, force=True)
        assert json.loads(path.read_text())["step"] == 3
        with monkeypatch.context() as patch:
            full_disk(patch, room=5)
            store.heartbeat(4, 4, force=True)
            store.heartbeat(5, 5, force=True)
        assert len(said) == 1
        assert "Training goes on without a heartbeat" in said[0]
        assert json.loads(path.read_text())["step"] == 3
        assert [name.name for name in store.folder.iterdir() if name.name.endswith(".tmp")] == []


def test_a_file_that_cannot_be_replaced_keeps_its_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    write_atomic(path, "old")
    with monkeypatch.context() as patch:
        full_disk(patch, room=3)
        with pytest.raises(StoreError, match=r"config.toml: cannot write this file: the disk is full"):
            write_atomic(path, "new text")
    assert path.read_text() == "old"
    assert [name.name for name in tmp_path.iterdir()] == ["config.toml"]


def test_an_empty_folder_has_an_empty_ledger(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "ledger.jsonl").rows == Ledger().rows
