"""Which checkpoints are certified, and which one on disk is not the one that the ledger means."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train import checkpoint as checkpoints
from surefoot.train.keeping import Keeping
from surefoot.train.manifest import CheckpointError


def test_a_skipped_step_puts_off_certification_until_the_run_was_healthy_again_for_as_long(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Step 10 is old enough at batch 16; batch 13 was skipped, so that only from batch 20 on six healthy ones have gone by."""
    config = vary(config, **{"guard.certify_after": 6, "checkpoint.keep_last": 9, "checkpoint.asynchronous": False})
    rehearse(config, tmp_path / "run", Script(nan_batches=(13,), stop_after=18))
    assert Run(tmp_path / "run").ledger.certified == {"step-000005-attempt-0001"}
    rehearse(config, tmp_path / "run", Script(nan_batches=(13,), stop_after=20))
    assert "step-000010-attempt-0001" in Run(tmp_path / "run").ledger.certified


def test_a_checkpoint_in_the_place_of_another_is_refused_though_it_is_whole_and_of_this_run(
    config: RunConfig, tmp_path: Path
) -> None:
    whole = rehearse(config, tmp_path / "whole")
    rehearse(config, tmp_path / "run", Script(stop_after=17))
    root = tmp_path / "run" / "checkpoints"
    shutil.rmtree(root / "step-000018-attempt-0001")
    shutil.copytree(root / "step-000010-attempt-0001", root / "step-000018-attempt-0001")
    end = rehearse(config, tmp_path / "run")
    assert any("step-000018-attempt-0001 is refused" in text and "the ledger means" in text for text in end.warnings)
    assert "step-000015-attempt-0001" in end.opening
    assert end.digests == whole.digests
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "run")).same


def test_when_a_run_is_done_its_disk_holds_what_retention_keeps_and_no_more(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Step 8 waits to be certified, 24 is the newest; 16 was needed until 24 was written."""
    config = vary(
        config,
        **{
            "checkpoint.keep_last": 1,
            "checkpoint.every": 8,
            "guard.certify_after": 99,
            "checkpoint.asynchronous": False,
        },
    )
    rehearse(config, tmp_path / "run")
    assert [c.step for c in Run(tmp_path / "run").ledger.checkpoints] == [8, 16, 24]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"step-000008-attempt-0001", "step-000024-attempt-0001"}


def test_a_run_opened_at_its_end_does_not_write_its_last_state_again(config: RunConfig, tmp_path: Path) -> None:
    first = rehearse(config, tmp_path / "run")
    before = [c.name for c in Run(tmp_path / "run").ledger.checkpoints]
    again = rehearse(config, tmp_path / "run")
    assert again.digests == first.digests
    assert [c.name for c in Run(tmp_path / "run").ledger.checkpoints] == before


def test_a_run_stopped_on_a_skipped_step_right_after_a_checkpoint_keeps_both_states_and_goes_on_from_the_later(
    config: RunConfig, tmp_path: Path
) -> None:
    """Both are of step 5: before batch 5 and before batch 6."""
    whole = rehearse(config, tmp_path / "whole", Script(nan_batches=(5,)))
    rehearse(config, tmp_path / "run", Script(nan_batches=(5,), stop_after=5))
    taken = [(c.step, c.batch_index) for c in Run(tmp_path / "run").ledger.surviving_checkpoints()]
    assert taken == [(5, 5), (5, 6)]
    end = rehearse(config, tmp_path / "run", Script(nan_batches=(5,)))
    assert "at step 5 (batch 6)" in end.opening
    assert end.warnings == ()
    assert end.digests == whole.digests
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "run")).same


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_ledger_names_no_checkpoint_that_could_not_be_written(
    config: RunConfig,
    vary: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    write = checkpoints._write

    def fails_once(folder: Path, *rest: object) -> object:
        if "step-000010" in folder.name:
            raise CheckpointError(f"{folder}: the disk is full")
        return write(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "_write", fails_once)
    rehearse(vary(config, **{"checkpoint.asynchronous": asynchronous}), tmp_path / "run")
    assert [c.step for c in Run(tmp_path / "run").ledger.checkpoints] == [5, 15, 20, 24]


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_on_them_begins(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: dict[int, int] = {}
    name_of = Keeping._name

    def looks(self: Keeping, state: object) -> str:
        assert self.store is not None
        flush, rows = self.store.flush, tmp_path / "run" / "attempts" / "0001" / "metrics.jsonl"

        def flushed(*, sync: bool = False) -> bool:
            done = flush(sync=sync)
            if sync:
                on_disk[state.batch_index] = len(rows.read_text().splitlines())  # type: ignore[attr-defined]
            return done

        monkeypatch.setattr(self.store, "flush", flushed)
        return name_of(self, state)  # type: ignore[arg-type]

    monkeypatch.setattr(Keeping, "_name", looks)
    rehearse(config, tmp_path / "run")
    assert {batch: on_disk.get(batch) for batch in (5, 10, 15, 20, 24)} == {b: b for b in (5, 10, 15, 20, 24)}
