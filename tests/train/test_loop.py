"""The loop and the step beyond the promises: what rows say, who is asked to stop, what ends a run."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.config.data import Exclusion
from surefoot.config.guard import GuardConfig
from surefoot.config.run import RunConfig
from surefoot.data.errors import DataError
from surefoot.data.loader import Batch, Loader
from surefoot.guard.actions import Proceed
from surefoot.guard.evidence import Evidence
from surefoot.guard.finding import Finding
from surefoot.guard.guard import GuardState, Verdict
from surefoot.guard.signals import EvalSignals
from surefoot.model.loss import LossSums
from surefoot.monitor.run import Run
from surefoot.monitor.step_report import StepReport
from surefoot.optim.schedule import lr_at
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.forward_backward import ForwardBackward, MicroBatch
from surefoot.parallel.mesh import World
from surefoot.proof.rehearsal import Rehearsed, Script, rehearse, rehearse_on_rank
from surefoot.train import loop
from surefoot.train.rows import Pace, due, speed
from surefoot.train.run import open_run
from surefoot.train.setup import set_up
from surefoot.train.step import train_step
from tolerances import FP64_ORDER

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


# The step


def test_the_rate_follows_applied_updates_and_not_batches(config: RunConfig, tmp_path: Path) -> None:
    rehearse(config, tmp_path / "run", Script(nan_batches=(2, 6)))
    rows = Run(tmp_path / "run").rows
    applied = 0
    for row in rows:
        assert row["train/lr"] == lr_at(applied, config.optim, config.steps)
        applied += not row.get("skipped")
    assert applied == config.steps == len(rows) - 2


class InfiniteLoss:
    """The loss of a batch overflows, and its gradients, which are computed apart from it, do not."""

    def __init__(self, inner: ForwardBackward) -> None:
        self.inner = inner

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> list[LossSums]:
        sums = self.inner(micro_batches, num_targets)
        return [s._replace(ce_sum=torch.full_like(s.ce_sum, math.inf)) for s in sums]


@pytest.mark.parametrize("gated", [True, False])
def test_a_loss_that_is_not_finite_is_a_skipped_step_though_every_gradient_is(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader, gated: bool
) -> None:
    setup, state = set_up(vary(config, **{"optim.gated": gated}), ALONE)
    train_step(state, loader.batch(0), setup)
    before = digest_tensors(state.tensors())
    broken = dataclasses.replace(setup, forward_backward=InfiniteLoss(setup.forward_backward))
    outcome = train_step(state, loader.batch(1), broken)
    assert outcome.skipped
    assert math.isfinite(outcome.signals.gradient_norm)
    assert digest_tensors(state.tensors()) == before
    assert (state.step, state.batch_index) == (1, 2)


def test_the_row_of_z_loss_is_what_it_adds_to_the_objective(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader
) -> None:
    loss = dataclasses.replace(config.model.loss, z_loss=1e-2)
    setup, state = set_up(vary(config, **{"model.loss": loss, "parallel.precision": "fp64"}), ALONE)
    batch = loader.batch(0)
    arrays = (batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    with torch.no_grad():
        normalisers = torch.logsumexp(state.model(*map(torch.from_numpy, arrays)), dim=-1)
    normalisers = normalisers[torch.from_numpy(batch.targets_BT) != -100]
    metrics = train_step(state, batch, setup).metrics
    assert metrics["train/z_loss"] == pytest.approx(1e-2 * float(normalisers.square().mean()), rel=FP64_ORDER)
    assert metrics["train/logsumexp_mean"] == pytest.approx(float(normalisers.mean()), rel=FP64_ORDER)
    assert metrics["train/logsumexp_max"] == pytest.approx(float(normalisers.max()), rel=FP64_ORDER)


def test_excluded_tokens_are_counted_over_all_ranks(config: RunConfig, loader: Loader, tmp_path: Path) -> None:
    source, _, row = loader.sample_ids(0)[-1].tolist()
    document = loader.row_documents(source, row)[0].document
    excluded = dataclasses.replace(config.data, exclude=(Exclusion(document=document),))
    config = dataclasses.replace(
        config, steps=2, data=excluded, optim=dataclasses.replace(config.optim, warmup_steps=1)
    )
    assert Loader(excluded, loader.prepared, config.seed).batch(0, (), 1, 2).num_excluded > 0
    rehearse(config, tmp_path / "one")
    run_ranks(2, rehearse_on_rank, config, tmp_path / "two")
    one, two = (Run(tmp_path / name).metrics()["train/tokens_excluded"].tolist() for name in ("one", "two"))
    assert one[0] > 0
    assert one == two


# What starts and ends a run


def stopped_on_one_rank(rank: int, world: int, config: RunConfig, folder: Path) -> Rehearsed:
    return rehearse(config, folder, Script(stop_after=6) if rank == 1 else Script())


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_batch(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, layout: str
) -> None:
    config = vary(config, **{"parallel.data_parallel": layout})
    both = run_ranks(2, stopped_on_one_rank, config, tmp_path / "run", timeout_s=30)
    assert [(r.reason, r.step, r.batch_index) for r in both] == [("stopped", 7, 7)] * 2
    assert both[0].digests == both[1].digests
    assert Run(tmp_path / "run").ledger.surviving_checkpoints()[-1].batch_index == 7


def test_nothing_is_trained_on_a_first_batch_that_leaks_its_targets(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_batch = Loader.batch

    def leaking(self: Loader, *args: object) -> Batch:
        batch = true_batch(self, *args)  # type: ignore[arg-type]
        return dataclasses.replace(batch, targets_BT=np.where(batch.targets_BT >= 0, batch.tokens_BT, -100))

    monkeypatch.setattr(Loader, "batch", leaking)
    with pytest.raises(DataError, match="the first batch is not what it should be"):
        rehearse(config, tmp_path / "run")
    assert Run(tmp_path / "run").rows == []


def test_a_resumed_run_proves_the_batch_it_goes_on_with(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse(config, tmp_path / "run", Script(stop_after=7))
    true_batch = Loader.batch

    def shifted(self: Loader, *args: object) -> Batch:
        batch = true_batch(self, *args)  # type: ignore[arg-type]
        return dataclasses.replace(batch, tokens_BT=np.roll(batch.tokens_BT, 1, axis=1))

    monkeypatch.setattr(Loader, "batch", shifted)
    with pytest.raises(DataError, match="the first batch is not what it should be"):
        rehearse(config, tmp_path / "run")
    assert len(Run(tmp_path / "run").rows) == 8


def test_a_fault_that_stays_halts_the_run_with_a_diagnosis_and_no_checkpoint_of_its_state(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"guard.max_consecutive_skips": 3})
    end = rehearse(config, tmp_path / "run", Script(nan_batches=(7, 8, 9, 10)))
    assert (end.reason, end.step, end.batch_index) == ("halted", 7, 10)
    ledger = Run(tmp_path / "run").ledger
    assert [skip.batch_index for skip in ledger.skips()] == [7, 8]
    verdict, stop = ledger.of_kind("verdict")[-1], ledger.of_kind("stop")[-1]
    assert (verdict["action"], verdict["batch_index"]) == ("halt", 9)
    assert verdict["text"].startswith("batch 9: ")
    assert "3 skipped steps in a row" in verdict["text"]
    assert stop["reason"] == verdict["text"]
    assert [c.batch_index for c in ledger.surviving_checkpoints()] == [5]
    assert ledger.finish is None


def test_skips_in_a_row_are_counted_through_a_resume(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"guard.max_consecutive_skips": 3})
    first = rehearse(config, tmp_path / "run", Script(nan_batches=(7, 8), stop_after=8))
    assert (first.reason, first.step, first.batch_index) == ("stopped", 7, 9)
    second = rehearse(config, tmp_path / "run", Script(nan_batches=(9,)))
    assert (second.reason, second.batch_index) == ("halted", 10)
    assert "3 skipped steps in a row" in Run(tmp_path / "run").ledger.of_kind("stop")[-1]["reason"]


# Rows and cadences


def test_checkpoints_fall_on_applied_updates_and_not_on_batches(config: RunConfig, tmp_path: Path) -> None:
    rehearse(config, tmp_path / "run", Script(nan_batches=(2, 12)))
    taken = [(c.step, c.batch_index) for c in Run(tmp_path / "run").ledger.checkpoints]
    assert taken == [(5, 6), (10, 11), (15, 17), (20, 22), (24, 26)]


def test_a_cadence_falls_on_its_multiples_and_0_is_never() -> None:
    assert [count for count in range(13) if due(count, 4)] == [4, 8, 12]
    assert not any(due(count, 0) for count in range(13))


def test_state_digests_of_the_cadence_are_those_of_checkpoints_and_end(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    rehearse(
        vary(config, **{"log.digest_every": 5, "checkpoint.keep_last": 9}), tmp_path / "run", Script(nan_batches=(5,))
    )
    run = Run(tmp_path / "run")
    told = {row["step"]: row["state_digest"] for row in run.rows if row.get("state_digest")}
    assert told == {c.step: c.digest for c in run.ledger.checkpoints if c.step % 5 == 0}
    assert list(told) == [5, 10, 15, 20]
    assert len(set(told.values())) == 4


def test_a_skipped_step_after_an_evaluation_does_not_repeat_it(config: RunConfig, tmp_path: Path) -> None:
    rehearse(config, tmp_path / "run", Script(nan_batches=(10, 11)))
    rows = Run(tmp_path / "run").rows
    assert [row["batch_index"] for row in rows if row["step"] == 10] == [9, 10, 11]
    assert [row["batch_index"] for row in rows if "eval/calm/loss" in row] == [9, 21]


def test_rows_count_the_tokens_up_to_and_with_their_batch(config: RunConfig, tmp_path: Path) -> None:
    rehearse(dataclasses.replace(config, steps=5), tmp_path / "run", Script(nan_batches=(2,)))
    tokens = [row["tokens"] for row in Run(tmp_path / "run").rows]
    assert tokens == [(index + 1) * config.data.batch_size * config.data.seq_len for index in range(6)]


def test_mfu_is_the_share_of_what_all_devices_together_could_do(config: RunConfig, loader: Loader) -> None:
    setup, _ = set_up(config, ALONE, peak_flops=1e9)
    batch = loader.batch(0)
    figures = speed(setup, batch, 0.5, 0.1)
    assert figures["perf/tokens_per_s"] == 4 * 64 / 0.5
    assert (figures["perf/step_s"], figures["perf/data_wait_s"]) == (0.5, 0.1)
    assert figures["perf/mfu"] == pytest.approx(4 * 64 / 0.5 * setup.flops_per_token / 1e9)
    pair = dataclasses.replace(setup, world=dataclasses.replace(ALONE, size=2))
    assert speed(pair, batch, 0.5, 0.1)["perf/mfu"] == pytest.approx(figures["perf/mfu"] / 2)
    assert "perf/mfu" not in speed(dataclasses.replace(setup, peak_flops=0.0), batch, 0.5, 0.1)


# What the guard sees


def test_scores_are_in_the_rows_from_where_there_is_a_baseline_and_the_inside_on_its_cadence(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, steps=36, **{"guard.probe_every": 10})
    end = rehearse(config, tmp_path / "run", Script(nan_batches=(9, 30)))
    rows = Run(tmp_path / "run").rows
    scored = [row["batch_index"] for row in rows if "guard/loss_zscore" in row]
    assert 0 < scored[0] <= 20
    assert scored == list(range(scored[0], 38))
    without_norm = [row["batch_index"] for row in rows[scored[0] :] if "guard/gradient_zscore" not in row]
    assert without_norm == [30], "its gradient is not finite, its loss is"
    probed = [row["step"] for row in rows if any(name.startswith("inside/") for name in row)]
    assert probed == [1, 10, 20, 30]
    assert (end.step, end.batch_index) == (36, 38)


def test_the_time_of_an_investigation_is_not_the_steps(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    investigate = loop.investigate

    def slowly(*args: Any) -> Evidence:
        time.sleep(2.0)
        return investigate(*args)

    monkeypatch.setattr(loop, "investigate", slowly)
    rehearse(dataclasses.replace(config, steps=8), tmp_path / "run", Script(nan_batches=(5,)))
    run = Run(tmp_path / "run")
    assert run.ledger.record.investigations_at == (5,)
    assert all(row["perf/step_s"] < 2.0 for row in run.rows)


def test_held_out_losses_are_judged_and_what_is_found_is_said(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[EvalSignals] = []

    def finds(state: GuardState, evaluation: EvalSignals, config: GuardConfig) -> Verdict:
        told.append(evaluation)
        finding = Finding(
            kind="validation",
            severity="warning",
            text="held-out loss of calm rises",
            batch_index=9,
            onset=9,
            value=3.0,
            where="calm",
        )
        return Verdict(
            state=dataclasses.replace(state, healthy_batches=state.healthy_batches + 1000),
            action=Proceed(),
            findings=(finding,) if evaluation.step == 10 else (),
        )

    monkeypatch.setattr(loop, "judge_evaluation", finds)
    end = rehearse(config, tmp_path / "run")
    rows = Run(tmp_path / "run").rows
    assert [evaluation.step for evaluation in told] == [10, 20]
    assert told[0].losses == tuple((name, rows[9][f"eval/{name}/loss"]) for name in ("calm", "busy"))
    (row,) = Run(tmp_path / "run").ledger.of_kind("verdict")
    assert (row["action"], row["batch_index"], row["step"]) == ("proceed", 9, 10)
    assert row["text"] == "Held-out loss of calm rises. Nothing was changed."
    assert end.guard["healthy_batches"] == 24 + 2000


def test_a_run_that_becomes_slow_is_told_so_in_its_events_and_nothing_else_happens(
    config: RunConfig, tmp_path: Path
) -> None:
    with open_run(config, tmp_path / "run", ALONE, notify=lambda kind, row: None, peak=0.0) as run:
        pace = Pace()
        for index in range(60):
            slow = 0.1 if index < 40 else 0.5
            metrics = {"perf/step_s": slow, "perf/data_wait_s": 0.0}
            report = StepReport(index, index, 0, False, "", metrics, "", ())
            pace.watch(report, 256, run.state, run.keeping)
        rows = len(run.keeping.ledger.rows)
    notes = [event for event in Run(tmp_path / "run").events if event["kind"] == "note"]
    assert len(notes) == 1
    assert notes[0]["text"].startswith("At batch 47: 512 tokens/s for 8 batches, 2,560 before")
    assert rows == 1


def test_under_observe_even_a_nan_is_applied_and_everything_is_said(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, steps=10, **{"guard.policy": "observe"})
    end = rehearse(config, tmp_path / "run", Script(nan_batches=(5,)))
    ledger = Run(tmp_path / "run").ledger
    assert (end.reason, end.step, end.batch_index) == ("done", 10, 10)
    assert ledger.skips() == ()
    assert np.isnan(end.tensors["weights/embedding.weight"]).any()
    verdicts = ledger.of_kind("verdict")
    assert {row["action"] for row in verdicts} == {"proceed"}
    assert verdicts[0]["batch_index"] == 5
    assert verdicts[0]["findings"][0]["kind"] == "nonfinite"


def test_what_the_guard_remembers_is_what_it_concluded(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conclude = loop.conclude

    def remembers(*args: Any) -> Verdict:
        verdict = conclude(*args)
        return dataclasses.replace(verdict, state=dataclasses.replace(verdict.state, healthy_batches=1000))

    monkeypatch.setattr(loop, "conclude", remembers)
    end = rehearse(dataclasses.replace(config, steps=8), tmp_path / "run", Script(nan_batches=(5,)))
    assert end.guard["healthy_batches"] == 1003
