"""Checkpoints on disk held against the ledger: what is used, set aside, adopted, deleted, refused."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import Crashed, Script, rehearse
from surefoot.train import checkpoint as checkpoints
from surefoot.train.manifest import CheckpointError
from surefoot.train.stock import ResumeRefused


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def stopped(config: RunConfig, tmp_path: Path) -> Path:
    """A run stopped after batch 17: checkpoints of steps 10, 15 and 18, three being kept."""
    rehearse(config, tmp_path / "run", Script(stop_after=17))
    return tmp_path / "run"


def test_when_no_checkpoint_can_be_used_nothing_is_started_and_nothing_deleted(
    config: RunConfig, stopped: Path
) -> None:
    before = names(stopped)
    for name in before:
        flip(next((stopped / "checkpoints" / name).glob("*.distcp")))
    with pytest.raises(CheckpointError, match=r"none of its checkpoints can be used .*--fresh"):
        rehearse(config, stopped)
    assert names(stopped) == before
    assert len(Run(stopped).attempts) == 1


def test_when_all_checkpoints_are_gone_the_run_is_not_started_again_under_its_name(
    config: RunConfig, stopped: Path
) -> None:
    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(CheckpointError, match="their folders are gone"):
        rehearse(config, stopped)


def test_a_refused_checkpoint_is_set_aside_and_never_deleted(config: RunConfig, stopped: Path) -> None:
    newest = Run(stopped).ledger.surviving_checkpoints()[-1].name
    shard = next((stopped / "checkpoints" / newest).glob("*.distcp"))
    flip(shard)
    content = shard.read_bytes()
    rehearse(config, stopped)
    assert (stopped / "checkpoints" / f"refused-{newest}" / shard.name).read_bytes() == content
    assert newest not in names(stopped)


def test_a_checkpoint_of_another_run_is_refused_though_it_is_whole(
    config: RunConfig, stopped: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    rehearse(dataclasses.replace(config, seed=99), other, Script(stop_after=17))
    newest = Run(stopped).ledger.surviving_checkpoints()[-1].name
    assert newest in names(other)
    ledger_row = json.loads((other / "checkpoints" / newest / "record.json").read_text())["ledger"]
    assert ledger_row["rows"] > 0
    shutil.rmtree(stopped / "checkpoints" / newest)
    shutil.copytree(other / "checkpoints" / newest, stopped / "checkpoints" / newest)
    with pytest.raises(ResumeRefused, match="another history"):
        rehearse(config, stopped)


@pytest.mark.parametrize("loss", ["shortened", "gone"])
def test_a_ledger_that_lost_rows_is_noticed(config: RunConfig, stopped: Path, loss: str) -> None:
    ledger = stopped / "ledger.jsonl"
    if loss == "gone":
        ledger.unlink()
    else:
        ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:1]))
    with pytest.raises(ResumeRefused, match="the ledger was lost or exchanged, and with it what was excluded"):
        rehearse(config, stopped)


def test_a_save_cut_short_is_removed_and_one_with_a_damaged_record_passed_over(
    config: RunConfig, stopped: Path
) -> None:
    root = stopped / "checkpoints"
    newest = Run(stopped).ledger.surviving_checkpoints()[-1].name
    shutil.copytree(root / newest, root / "step-000019-attempt-0001")
    (root / "step-000019-attempt-0001" / "manifest.json").unlink()
    shutil.copytree(root / newest, root / "step-000020-attempt-0001")
    flip(root / "step-000020-attempt-0001" / "record.json")
    end = rehearse(config, stopped)
    assert newest in end.opening
    assert "step-000019-attempt-0001" not in names(stopped)


def test_pruned_checkpoints_are_passed_over_in_silence(config: RunConfig, tmp_path: Path) -> None:
    end = rehearse(config, tmp_path / "run", Script(rollback_after=21, rollback_to=17))
    assert end.warnings == ()
    rollback = Run(tmp_path / "run").attempts[-1]
    assert (rollback.reason, rollback.from_batch) == ("rollback", 16)


def test_the_next_checkpoint_to_be_certified_outlives_newer_ones(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"checkpoint.every": 2, "checkpoint.keep_last": 1, "guard.certify_after": 9})
    config = vary(config, **{"checkpoint.asynchronous": False})
    rehearse(config, tmp_path / "run")
    ledger = Run(tmp_path / "run").ledger
    certified = ledger.newest_certified()
    assert certified is not None
    assert certified.name in names(tmp_path / "run")
    assert certified.step >= 10
    for row in ledger.of_kind("certified"):
        steps = [c.step for c in ledger.checkpoints if c.name == row["name"]]
        assert steps, "only what is in the ledger is certified"


def test_keep_every_keeps_for_good_and_left_behind_ones_go(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"checkpoint.every": 2, "checkpoint.keep_last": 1, "checkpoint.keep_every": 6})
    rehearse(config, tmp_path / "run", Script(rollback_after=15, rollback_to=12))
    kept = names(tmp_path / "run")
    assert {"step-000006-attempt-0001", "step-000012-attempt-0001", "step-000018-attempt-0002"} <= kept
    assert not any("step-000014-attempt-0001" in name for name in kept)


def test_a_last_checkpoint_that_cannot_be_written_is_no_finish(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rehearse(config, tmp_path / "whole")
    real = checkpoints._write

    def fails_at_the_end(folder: Path, *rest: object) -> object:
        if "step-000024" in folder.name:
            raise CheckpointError(f"{folder}: the disk is full")
        return real(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "_write", fails_at_the_end)
    with pytest.raises(CheckpointError, match="the state at step 24 could not be written"):
        rehearse(config, tmp_path / "run")
    assert Run(tmp_path / "run").ledger.finish is None
    monkeypatch.setattr(checkpoints, "_write", real)
    end = rehearse(config, tmp_path / "run")
    assert "step-000020" in end.opening
    assert end.digests == whole.digests


def test_a_checkpoint_in_between_that_cannot_be_written_is_said_and_the_run_goes_on(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoints._write

    def fails_once(folder: Path, *rest: object) -> object:
        if "step-000010" in folder.name:
            raise CheckpointError(f"{folder}: the disk is full")
        return real(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "_write", fails_once)
    end = rehearse(config, tmp_path / "run")
    assert end.reason == "done"
    assert any("step-000010" in warning and "the disk is full" in warning for warning in end.warnings)
    assert "step-000015-attempt-0001" in {c.name for c in Run(tmp_path / "run").ledger.checkpoints}


def test_slow_background_saves_do_not_keep_old_checkpoints_from_being_deleted(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vary(config, **{"checkpoint.every": 2, "checkpoint.keep_last": 1, "guard.certify_after": 99})
    real = checkpoints._write

    def slowly(*arguments: object) -> object:
        time.sleep(0.2)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "_write", slowly)
    with pytest.raises(Crashed):
        rehearse(config, tmp_path / "run", Script(die_after=21))
    assert len(names(tmp_path / "run")) <= 4
