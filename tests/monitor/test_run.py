"""Reading runs: the surviving history, forks, status, comparison."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from surefoot.monitor.compare import compare, config_difference
from surefoot.monitor.durable import StoreError
from surefoot.monitor.run import Run, list_runs
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore


def steps(store: RunStore, batches: range, base: float) -> None:
    """One row per batch whose loss tells where it came from: base + batch."""
    for batch in batches:
        metrics = {"train/loss": base + batch}
        store.write_step(StepReport(batch, batch + 1, 8 * (batch + 1), False, "", metrics, f"{batch:016x}", ()))


def save(store: RunStore, batch: int) -> str:
    name = f"step-{batch:06d}-attempt-{store.attempt:04d}"
    assert store.flush(sync=True)
    store.record("checkpoint", name=name, step=batch, batch_index=batch, attempt=store.attempt, digest="d")
    return name


def make_run(folder: Path) -> Path:
    """Killed at 12 and resumed from 10, rolled back from 20 to 15; losses 100.., 200.., 300.. by attempt."""
    with RunStore(folder, print) as store:
        store.write_config('recipe = "tiny"\nsteps = 30\n[optim]\nlr = 1e-3\n')
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        steps(store, range(10), 100)
        name = save(store, 10)
        steps(store, range(10, 12), 100)
        store.open_attempt(reason="resume", from_step=10, from_batch=10, checkpoint=name)
        steps(store, range(10, 15), 200)
        name = save(store, 15)
        steps(store, range(15, 20), 200)
        store.write_event("note", 17, 18, text="soon forgotten")
        store.open_attempt(reason="rollback", from_step=15, from_batch=15, checkpoint=name, cause="spike")
        steps(store, range(15, 25), 300)
        store.write_metrics(19, 20, {"eval/code/loss": 2.5})
    return folder


EXPECTED = [*(100 + b for b in range(10)), *(200 + b for b in range(10, 15)), *(300 + b for b in range(15, 25))]


def test_metrics_are_the_surviving_history_and_the_last_attempt_of_a_batch_wins(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "x"))
    metrics = run.metrics()
    assert metrics["batch_index"].tolist() == list(range(25))
    assert metrics["step"].tolist() == list(range(1, 26))
    assert metrics["train/loss"].tolist() == EXPECTED
    assert metrics["attempt"].tolist() == [1] * 10 + [2] * 5 + [3] * 10
    assert metrics["eval/code/loss"][19] == 2.5
    assert np.isnan(metrics["eval/code/loss"]).sum() == 24
    assert [row["sample_digest"] for row in run.rows] == [f"{b:016x}" for b in range(25)]


def test_metrics_as_pandas_are_the_same_numbers(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "x"))
    frame = run.metrics(as_="pandas")
    assert frame.index.name == "batch_index"
    assert frame["train/loss"].tolist() == EXPECTED
    with pytest.raises(ValueError, match="as_='polars': choose 'numpy' or 'pandas'"):
        run.metrics(as_="polars")  # type: ignore[call-overload]


def test_without_pandas_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(make_run(tmp_path / "x"))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[pandas\]'"):
        run.metrics(as_="pandas")


def test_a_nan_that_was_measured_is_read_back_as_nan(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        store.write_step(
            StepReport(0, 0, 8, True, "loss is NaN", {"train/loss": math.nan, "train/gradient_norm": math.inf}, "", ())
        )
    run = Run(tmp_path / "x")
    assert math.isnan(run.metrics()["train/loss"][0])
    assert run.metrics()["train/gradient_norm"][0] == math.inf
    assert run.rows[0]["cause"] == "loss is NaN"


def test_events_know_whether_their_batch_survived(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "x"))
    assert [(event["text"], event["attempt"], event["survives"]) for event in run.events] == [
        ("soon forgotten", 2, False)
    ]
    assert run.last_event("note")["text"] == "soon forgotten"
    assert run.last_event("facts") == {}


def test_an_evaluation_after_a_resume_at_the_end_belongs_to_the_last_batch(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        steps(store, range(10), 100)
        name = save(store, 10)
        store.open_attempt(reason="resume", from_step=10, from_batch=10, checkpoint=name)
        store.write_metrics(9, 10, {"eval/code/loss": 1.0})
    metrics = Run(tmp_path / "x").metrics()
    assert (metrics["train/loss"][9], metrics["eval/code/loss"][9]) == (109, 1.0)


def fork(folder: Path, parent: Path, checkpoint: str, batch: int) -> Path:
    with RunStore(folder, print) as store:
        store.record("lineage", parent=str(parent), step=batch, diff=[["optim.lr", "1e-3", "2e-3"]])
        store.open_attempt(reason="fork", from_step=batch, from_batch=batch, checkpoint=checkpoint)
        steps(store, range(batch, batch + 5), 900)
    return folder


def test_a_fork_is_joined_to_its_parent_as_it_was_then(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = Run(fork(tmp_path / "child", parent, "step-000015-attempt-0002", 15))
    with RunStore(parent, print) as store:  # the parent goes on to roll back below the fork
        store.open_attempt(reason="rollback", from_step=10, from_batch=10, checkpoint="step-000010-attempt-0001")
        steps(store, range(10, 20), 500)
    joined = child.history()
    assert joined["batch_index"].tolist() == list(range(20))
    assert joined["train/loss"].tolist() == EXPECTED[:15] + [900 + b for b in range(15, 20)]
    assert child.metrics()["batch_index"].tolist() == list(range(15, 20))
    assert [run.name for run in child.lineage()] == ["parent"]


def test_a_fork_of_a_fork_is_joined_through_both(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = fork(tmp_path / "child", parent, "step-000015-attempt-0002", 15)
    with RunStore(child, print) as store:
        name = save_in_new_attempt(store)
    grandchild = Run(fork(tmp_path / "grandchild", child, name, 18))
    losses = grandchild.history()["train/loss"].tolist()
    assert losses == EXPECTED[:15] + [915, 916, 917] + [900 + b for b in range(18, 23)]
    assert [run.name for run in grandchild.lineage()] == ["child", "parent"]


def save_in_new_attempt(store: RunStore) -> str:
    store.open_attempt(reason="resume", from_step=18, from_batch=18)
    return save(store, 18)


def test_a_moved_parent_is_found_beside_its_child_and_a_lost_one_is_named(tmp_path: Path) -> None:
    parent = make_run(tmp_path / "parent")
    child = Run(fork(tmp_path / "child", Path("/elsewhere/parent"), "step-000015-attempt-0002", 15))
    assert len(child.history()["step"]) == 20
    parent.rename(tmp_path / "renamed")
    with pytest.raises(StoreError, match="forked from /elsewhere/parent, which is not there"):
        Run(child.folder).history()


def test_the_status_of_a_run_comes_from_lock_ledger_and_heartbeat(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", print) as store:
        assert Run(store.folder).status().state == "running"
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        store.heartbeat(7, 8)
        status = Run(store.folder).status()
        assert (status.state, status.step, status.batch_index) == ("running", 7, 8)
        assert "running at step 7 (process" in status.sentence()
    assert Run(store.folder).status().state == "crashed"
    assert "killed or crashed" in Run(store.folder).status().sentence()
    with RunStore(tmp_path / "x", print) as store:
        store.record("stop", reason="SIGTERM")
    assert Run(store.folder).status().sentence() == "stopped at step 7: SIGTERM; the same command continues"
    with RunStore(tmp_path / "x", print) as store:
        store.record("finish", step=30, batch_index=31, digest="d")
    assert Run(store.folder).status().sentence() == "finished at step 30"
    RunStore(tmp_path / "y", print).close()
    assert Run(tmp_path / "y").status().sentence() == "has not started"


def test_a_run_on_another_machine_is_running_while_its_heart_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunStore(tmp_path / "x", print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        store.heartbeat(7, 8)
    assert Run(store.folder).status().state == "crashed"
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert Run(store.folder).status().state == "running"
    beat = json.loads((store.folder / "heartbeat.json").read_text())
    (store.folder / "heartbeat.json").write_text(json.dumps(beat | {"time": beat["time"] - 600}))
    assert Run(store.folder).status().state == "crashed"


def test_a_folder_without_a_run_is_named_with_the_runs_beside_it(tmp_path: Path) -> None:
    make_run(tmp_path / "tiny-abc")
    with pytest.raises(StoreError, match=r"nope: no run here \(it would hold ledger.jsonl\); runs beside it: tiny-abc"):
        Run(tmp_path / "nope")
    assert [run.name for run in list_runs(tmp_path)] == ["tiny-abc"]
    assert list_runs(tmp_path / "nope") == []


def test_comparing_names_the_first_row_that_differs_and_every_config_key(tmp_path: Path) -> None:
    left, right = Run(make_run(tmp_path / "a")), Run(make_run(tmp_path / "b"))
    assert compare(left, right).same
    (right.folder / "config.toml").write_text('recipe = "tiny"\nsteps = 40\n[optim]\nlr = 1e-3\n')
    path = right.folder / "attempts" / "0003" / "metrics.jsonl"
    path.write_text(path.read_text().replace("318.0", "318.5"))
    found = compare(left, Run(right.folder))
    assert not found.same
    assert found.config == (("steps", 30, 40),)
    assert found.first_difference is not None
    assert (found.first_difference.batch_index, found.first_difference.name) == (18, "train/loss")
    assert (found.first_difference.left, found.first_difference.right) == (318, 318.5)


def test_config_keys_are_dotted_and_sources_numbered() -> None:
    left = {"data": {"sources": [{"name": "code", "weight": 1.0}], "seq_len": 8}, "extra": [1, 2]}
    right = {"data": {"sources": [{"name": "code", "weight": 2.0}], "seq_len": 8}, "more": True}
    assert config_difference(left, right) == [
        ("data.sources.0.weight", 1.0, 2.0),
        ("extra", [1, 2], None),
        ("more", None, True),
    ]
