"""Rollbacks that go wrong half way, go to disk, or have nowhere to go."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.config.guard import GuardConfig
from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.guard.actions import Rollback
from surefoot.guard.guard import GuardState, Verdict
from surefoot.guard.record import Record
from surefoot.guard.signals import ProbeSignals, StepSignals
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.proof.rehearsal import Crashed, Script, rehearse, rehearse_on_rank, scripted_judge
from surefoot.train import rollback
from surefoot.train.acting import Ending
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.rollback import restore_initial
from surefoot.train.run import ForkOf, open_run
from surefoot.train.setup import set_up
from surefoot.train.snapshot import SnapshotRing
from surefoot.train.step import on_device, train_step

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


def ignore(kind: str, row: Mapping[str, Any]) -> None:
    return None


def late_document_of(loader: Loader) -> str:
    source, _, row = loader.sample_ids(17)[0].tolist()
    return loader.row_documents(source, row)[0].document


@pytest.mark.parametrize("snapshots", [2, 0])
def test_a_crash_in_the_middle_of_a_rollback_forgets_neither_it_nor_what_it_excludes(
    config: RunConfig,
    vary: Callable[..., RunConfig],
    loader: Loader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshots: int,
) -> None:
    config = vary(config, **{"guard.snapshots": snapshots})
    script = Script(rollback_after=17, rollback_to=14, exclude=(late_document_of(loader),))
    whole = rehearse(config, tmp_path / "whole", script)

    def dies(*_: object) -> None:
        raise Crashed("before the state is restored")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotRing, "restore", dies)
        patch.setattr(rollback, "restore_checkpoint", dies)
        with pytest.raises(Crashed):
            rehearse(config, tmp_path / "run", script)
    ledger = Run(tmp_path / "run").ledger
    assert ledger.attempts[-1].reason == "rollback"
    assert [(item.document, item.from_batch) for item in ledger.exclusions] == [(script.exclude[0], 14)]
    last = rehearse(config, tmp_path / "run", script)
    assert last.digests == whole.digests
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "run")).same


def test_a_checkpoint_that_is_not_certified_is_no_target_though_it_is_whole_and_newer(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Batch 16 goes back to before batch 15: step 15 is on disk, but only one healthy batch old; step 10 has proved itself."""
    config = vary(config, **{"guard.snapshots": 0, "checkpoint.asynchronous": False})
    rehearse(config, tmp_path / "run", Script(rollback_after=16, rollback_to=15))
    run = Run(tmp_path / "run")
    before = [row["name"] for row in run.ledger.rows if row["kind"] == "checkpoint" and row["attempt"] == 1]
    assert before == ["step-000005-attempt-0001", "step-000010-attempt-0001", "step-000015-attempt-0001"]
    attempt = run.attempts[-1]
    assert (attempt.reason, attempt.checkpoint, attempt.from_batch) == ("rollback", "step-000010-attempt-0001", 10)


def test_without_a_certified_checkpoint_a_rollback_goes_to_the_initial_weights(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"guard.snapshots": 0, "guard.certify_after": 99})
    never = rehearse(config, tmp_path / "never")
    rolled = rehearse(config, tmp_path / "run", Script(rollback_after=16, rollback_to=15))
    attempt = Run(tmp_path / "run").attempts[-1]
    assert (attempt.reason, attempt.checkpoint, attempt.from_batch) == ("rollback", "", 0)
    assert rolled.digests == never.digests


def test_a_long_run_is_not_thrown_away_for_want_of_a_target_but_halts(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vary(config, **{"guard.snapshots": 0, "guard.certify_after": 1000})
    monkeypatch.setattr("surefoot.train.rollback.MOST_LOST", 17)
    long = rehearse(config, tmp_path / "long", Script(rollback_after=17, rollback_to=14))
    assert long.reason == "halted"
    reason = Run(tmp_path / "long").ledger.of_kind("stop")[-1]["reason"]
    assert "no certified state at or before batch 14 is left" in reason
    assert "would throw 18 batches away" in reason
    assert (tmp_path / "long" / "checkpoints" / "step-000015-attempt-0001").is_dir()
    short = rehearse(config, tmp_path / "short", Script(rollback_after=16, rollback_to=14))
    assert short.reason == "done"


def test_a_save_that_is_under_way_is_waited_for_before_a_rollback_decides(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"guard.snapshots": 0})
    assert config.checkpoint.asynchronous
    rehearse(config, tmp_path / "run", Script(rollback_after=15, rollback_to=15))
    kinds = [(row["kind"], row.get("name") or row.get("action")) for row in Run(tmp_path / "run").ledger.rows]
    assert kinds.index(("checkpoint", "step-000015-attempt-0001")) < kinds.index(("verdict", "rollback"))


def test_spans_are_counted_up_to_the_batch_that_exclusion_starts_at_and_not_to_the_one_restored(
    config: RunConfig, loader: Loader, tmp_path: Path
) -> None:
    source, _, row = loader.sample_ids(13)[0].tolist()
    document = loader.row_documents(source, row)[0].document
    rehearse(config, tmp_path / "run", Script(rollback_after=17, rollback_to=14, exclude=(document,)))
    run = Run(tmp_path / "run")
    assert run.attempts[-1].from_batch == 12
    told = run.ledger.of_kind("verdict")[0]["spans_read_before"]
    assert told == {document: loader.spans_read_before(document, 14)}
    assert told[document] > loader.spans_read_before(document, 12)


def looked_at_and_rolled_back(rank: int, world: int, config: RunConfig, folder: Path, script: Script) -> dict[str, int]:
    """A run in which somebody asks the model something, without a backward, the moment before it rolls back."""
    here = join_world(config.parallel)
    with open_run(config, folder, here, notify=ignore, peak=0.0) as run:
        scripted = scripted_judge(run.keeping, script)

        def judge(
            state: GuardState,
            signals: StepSignals,
            config: GuardConfig,
            record: Record,
            probe: ProbeSignals | None = None,
            total_steps: int = 0,
        ) -> Verdict:
            verdict = scripted(state, signals, config, record, probe, total_steps)
            if isinstance(verdict.action, Rollback):
                with torch.no_grad():
                    run.state.model(*on_device(run.data.loader.batch(0, (), rank, world), run.setup))
            return verdict

        train(run.state, run.setup, run.data, run.keeping, stop=StopRequest(), judge=judge)
        return digest_tensors(run.state.tensors())


@pytest.mark.parametrize("to_batch", [8, 0])
def test_gathered_weights_of_a_forward_do_not_outlive_a_rollback(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, to_batch: int
) -> None:
    config = vary(config, steps=11, **{"parallel.data_parallel": "fsdp", "eval.every": 0})
    script = Script(rollback_after=9, rollback_to=to_batch)
    expected = run_ranks(2, rehearse_on_rank, config, tmp_path / "unseen", script)
    assert expected[0].step == 11
    found = run_ranks(2, looked_at_and_rolled_back, config, tmp_path / "seen", script)
    assert found == [end.digests for end in expected]


def test_a_damaged_checkpoint_on_the_way_back_is_passed_over_aloud_and_set_aside(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"guard.snapshots": 0})
    script = Script(rollback_after=19, rollback_to=16)
    whole = rehearse(config, tmp_path / "whole", script)
    rehearse(config, tmp_path / "run", Script(stop_after=17))
    shard = next((tmp_path / "run" / "checkpoints" / "step-000015-attempt-0001").glob("*.distcp"))
    damaged = shard.read_bytes()[:-1]
    shard.write_bytes(damaged)
    end = rehearse(config, tmp_path / "run", script)
    assert any("step-000015-attempt-0001 is refused" in warning for warning in end.warnings)
    assert Run(tmp_path / "run").attempts[-1].checkpoint == "step-000010-attempt-0001"
    aside = tmp_path / "run" / "checkpoints" / "refused-step-000015-attempt-0001" / shard.name
    assert aside.read_bytes() == damaged
    assert end.digests == whole.digests


def test_snapshots_beyond_the_restored_batch_are_forgotten_and_those_before_it_stay(
    config: RunConfig, loader: Loader
) -> None:
    setup, state = set_up(config, ALONE)
    ring = SnapshotRing(3)
    for index in range(6):
        if index in (1, 3, 5):
            ring.take(state)
        train_step(state, loader.batch(index), setup)
    ring.forget_after(3)
    assert [snapshot.batch_index for snapshot in ring.kept] == [1, 3]
    ring.forget_after(0)
    assert ring.kept == []


def test_a_restored_snapshot_brings_back_what_the_guard_remembered(config: RunConfig) -> None:
    _, state = set_up(config, ALONE)
    remembered = GuardState(consecutive_skips=2, healthy_batches=0)
    state.guard = remembered
    ring = SnapshotRing(1)
    ring.take(state)
    state.guard = GuardState(healthy_batches=9)
    ring.restore(ring.kept[0], state)
    assert state.guard == remembered


def test_the_initial_state_is_restored_to_the_bit(config: RunConfig, loader: Loader) -> None:
    setup, state = set_up(config, ALONE)
    before, counters = digest_tensors(state.tensors()), state.counters()
    for index in range(3):
        train_step(state, loader.batch(index), setup)
    assert digest_tensors(state.tensors()) != before
    assert any(p.grad is not None for p in state.parameters.values())
    restore_initial(state, setup)
    assert all(p.grad is None for p in state.parameters.values())
    assert digest_tensors(state.tensors()) == before
    assert state.counters() == counters
    assert {float(rule.step_count()) for rule in state.optimizer.rules} == {0.0}


def test_the_scale_of_the_loss_too_starts_again(config: RunConfig, vary: Callable[..., RunConfig]) -> None:
    setup, state = set_up(vary(config, **{"parallel.precision": "fp16"}), ALONE)
    counters = state.counters()
    state.loss_scale.settle(math.inf, 2.0, applied=False)
    assert state.counters() != counters
    restore_initial(state, setup)
    assert state.counters() == counters


def forked_and_rolled_back(config: RunConfig, parent: Path, folder: Path, script: Script) -> Ending:
    """A fork of the parent's checkpoint at step 10, under a script."""

    run = Run(parent)
    checkpoint = next(c for c in run.ledger.surviving_checkpoints() if c.step == 10)
    fork = ForkOf(parent=run, checkpoint=checkpoint, changes=())
    with open_run(config, folder, join_world(config.parallel), notify=ignore, fork=fork, peak=0.0) as opened:
        judge = scripted_judge(opened.keeping, script)
        return train(opened.state, opened.setup, opened.data, opened.keeping, stop=StopRequest(), judge=judge)


def test_a_fork_does_not_go_back_beyond_its_beginning_but_halts(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"guard.snapshots": 0})
    rehearse(config, tmp_path / "parent", Script(stop_after=16))
    ending = forked_and_rolled_back(
        config, tmp_path / "parent", tmp_path / "fork", Script(rollback_after=13, rollback_to=9)
    )
    assert ending.reason == "halted"
    assert "no state at or before batch 9 is left, and this fork began later than batch 0" in ending.text
    assert [attempt.reason for attempt in Run(tmp_path / "fork").attempts] == ["fork"]


def test_a_fork_goes_back_to_its_own_copy_of_where_it_began(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"guard.snapshots": 0, "checkpoint.keep_last": 5})
    whole = rehearse(config, tmp_path / "parent")
    ending = forked_and_rolled_back(
        config, tmp_path / "parent", tmp_path / "fork", Script(rollback_after=13, rollback_to=12)
    )
    assert ending.reason == "done"
    run = Run(tmp_path / "fork")
    assert [(a.reason, a.from_batch) for a in run.attempts] == [("fork", 10), ("rollback", 10)]
    last = run.ledger.surviving_checkpoints()[-1]
    assert (last.step, last.digest) == (whole.step, Run(tmp_path / "parent").ledger.surviving_checkpoints()[-1].digest)
