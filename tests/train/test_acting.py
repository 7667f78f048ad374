"""What is done about a verdict: rows first, then deeds; LR events through kill, resume, rollback and fork."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.config.data import BatchStage, MixtureStage
from surefoot.config.guard import GuardConfig
from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.guard.actions import Action, ClipHarder, Investigate, LrEvent, Rollback, SkipUpdate
from surefoot.guard.finding import Finding
from surefoot.guard.guard import GuardState, Judge, Verdict, judge
from surefoot.guard.record import Record
from surefoot.guard.signals import ProbeSignals, StepSignals
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.optim.schedule import lr_at, lr_factor
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.mesh import join_world
from surefoot.proof.rehearsal import rehearsal
from surefoot.train import acting
from surefoot.train.acting import Ending
from surefoot.train.interrupt import StopRequest
from surefoot.train.keeping import Keeping
from surefoot.train.loop import train
from surefoot.train.rows import regime
from surefoot.train.run import ForkOf, open_run

DIP = LrEvent(factor=0.25, hold_steps=3, ramp_steps=4, settle=0.5, cause="growing")


class Killed(Exception):
    """The process is gone."""


def ignore(kind: str, row: Mapping[str, Any]) -> None:
    return None


def ordering(actions: Mapping[int, Action], keeping: Keeping | None = None) -> Judge:
    """The guard's judge, with one action of its own at some batches; a rollback only once."""

    def decide(
        state: GuardState,
        signals: StepSignals,
        config: GuardConfig,
        record: Record,
        probe: ProbeSignals | None = None,
        total_steps: int = 0,
    ) -> Verdict:
        verdict = judge(state, signals, config, record, probe, total_steps)
        action = actions.get(signals.batch_index, verdict.action)
        if isinstance(action, Rollback) and record.rollbacks:
            return verdict
        return replace(verdict, action=action)

    return decide


def run_with(
    config: RunConfig,
    folder: Path,
    actions: Mapping[int, Action],
    *,
    stop_after: int = -1,
    fork: ForkOf | None = None,
) -> tuple[Ending, dict[str, int]]:
    """A run under such a judge, stopped or not."""
    stop = StopRequest()

    class Stopper:
        def step(self, report: Any) -> None:
            if report.batch_index == stop_after - 1:
                stop.signal = 15  # type: ignore[assignment]

    with open_run(config, folder, join_world(config.parallel), notify=ignore, fork=fork, peak=0.0) as run:
        ending = train(
            run.state,
            run.setup,
            run.data,
            run.keeping,
            stop=stop,
            watchers=(Stopper(),),
            judge=ordering(actions),
        )
        return ending, digest_tensors(run.state.tensors())


def rates(folder: Path) -> list[float]:
    return [row["train/lr"] for row in Run(folder).rows]


def test_an_lr_event_takes_the_rate_down_from_the_next_update_and_back_up_by_its_closed_form(
    config: RunConfig, tmp_path: Path
) -> None:
    run_with(config, tmp_path / "run", {9: DIP})
    ledger = Run(tmp_path / "run").ledger
    assert [(change.start_step, change.factor) for change in ledger.lr_events] == [(10, 0.25)]
    expected = [
        lr_at(step, config.optim, config.steps) * lr_factor(step, ledger.lr_events) for step in range(config.steps)
    ]
    assert rates(tmp_path / "run") == expected
    assert expected[9] == lr_at(9, config.optim, config.steps)
    assert expected[10] == 0.25 * lr_at(10, config.optim, config.steps)
    assert expected[-1] == 0.5 * lr_at(23, config.optim, config.steps)
    verdict = ledger.of_kind("verdict")[0]
    assert (verdict["action"], verdict["batch_index"], verdict["text"]) == ("lr_event", 9, "growing")
    assert ledger.record.lr_events_at == (9,)


@pytest.mark.parametrize("snapshots", [2, 0])
def test_the_dip_of_a_rollback_begins_at_its_target_whatever_state_was_restored(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, snapshots: int
) -> None:
    """With snapshots batch 12 is restored, without them batch 10: batches before 14 are read again as they were."""
    config = vary(config, **{"guard.snapshots": snapshots, "guard.snapshot_every": 6})
    back = Rollback(to_batch=14, cause="bad", lr_event=DIP)
    run_with(config, tmp_path / "run", {17: back})
    run = Run(tmp_path / "run")
    assert run.attempts[-1].from_batch == (12 if snapshots else 10)
    assert [change.start_step for change in run.ledger.lr_events] == [14]
    assert rates(tmp_path / "run")[13:15] == [
        lr_at(13, config.optim, config.steps),
        0.25 * lr_at(14, config.optim, config.steps),
    ]
    assert run.ledger.record.lr_events_at == (17,)


def test_the_step_of_a_dip_leaves_out_what_was_skipped_before_it(config: RunConfig, tmp_path: Path) -> None:
    """Batch 13, between the restored state and the target, predicts nothing and leaves no row in the ledger."""
    from surefoot.proof.data_faults import skip_healthy
    from surefoot.proof.faults import Bench

    back = Rollback(to_batch=15, cause="bad", lr_event=DIP)
    with open_run(config, tmp_path / "run", join_world(config.parallel), notify=ignore, peak=0.0) as run:
        bench = skip_healthy(Bench(run.setup, run.state, run.data), (3, 13))
        judge = ordering({17: back})
        train(run.state, bench.setup, bench.data, run.keeping, stop=StopRequest(), judge=judge)
    assert [change.start_step for change in Run(tmp_path / "run").ledger.lr_events] == [13]


@pytest.mark.parametrize("stop_after", [9, 12])
def test_a_run_with_an_lr_event_resumes_into_the_same_run(config: RunConfig, tmp_path: Path, stop_after: int) -> None:
    whole = run_with(config, tmp_path / "whole", {9: DIP})
    run_with(config, tmp_path / "parts", {9: DIP}, stop_after=stop_after)
    parts = run_with(config, tmp_path / "parts", {9: DIP})
    assert parts == whole
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "parts")).same


DECISIONS: dict[int, Action] = {
    8: DIP,
    17: Rollback(to_batch=14, cause="bad", lr_event=replace(DIP, factor=0.5)),
}


@pytest.fixture(scope="module")
def never_killed(
    corpus: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, tuple[Ending, dict[str, int]]]:
    """A run with an LR event, and a rollback with another."""
    folder = tmp_path_factory.mktemp("decisions") / "run"
    return folder, run_with(rehearsal(*corpus), folder, DECISIONS)


@pytest.mark.parametrize("dies_at", ["verdict", "lr_event", "attempt"])
@pytest.mark.parametrize("after", [True, False])
def test_a_kill_right_before_or_after_any_row_of_a_rollback_ends_in_the_same_run(
    config: RunConfig,
    never_killed: tuple[Path, tuple[Ending, dict[str, int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dies_at: str,
    after: bool,
) -> None:
    """The resumed process starts from step 5, before the first LR event, or from where the rollback led."""
    whole = Run(never_killed[0])
    deadly = [row["kind"] for row in whole.ledger.rows].count(dies_at)
    record, open_attempt = Keeping.record, Keeping.open_attempt
    seen = {"count": 0}

    def dying(inner: Callable[..., None], kind: Callable[..., str]) -> Callable[..., None]:
        def wrapper(self: Keeping, *args: Any, **kwargs: Any) -> None:
            seen["count"] += kind(*args) == dies_at
            last = kind(*args) == dies_at and seen["count"] == deadly
            if last and not after:
                raise Killed
            inner(self, *args, **kwargs)
            if last:
                raise Killed

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(Keeping, "record", dying(record, lambda kind: kind))
        patch.setattr(Keeping, "open_attempt", dying(open_attempt, lambda reason: "attempt"))
        with pytest.raises(Killed):
            run_with(config, tmp_path / "run", DECISIONS)
    assert run_with(config, tmp_path / "run", DECISIONS) == never_killed[1]
    killed = Run(tmp_path / "run")
    assert len(killed.attempts) == 3
    found = compare(whole, killed)
    assert found.same, found.first_difference
    assert killed.ledger.lr_events == whole.ledger.lr_events
    assert killed.ledger.record.lr_events_at == whole.ledger.record.lr_events_at == (8, 17)
    assert [past.at_batch for past in killed.ledger.record.rollbacks] == [17]


def test_a_fork_keeps_the_rates_that_had_begun_and_not_those_that_came_later(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, **{"checkpoint.keep_last": 9})
    late = replace(DIP, factor=0.1)
    whole, _ = run_with(config, tmp_path / "parent", {7: DIP, 15: late})
    assert whole.reason == "done"
    parent = Run(tmp_path / "parent")
    checkpoint = next(c for c in parent.ledger.surviving_checkpoints() if c.step == 10)
    fork = ForkOf(parent=parent, checkpoint=checkpoint, changes=())
    run_with(config, tmp_path / "fork", {}, fork=fork, stop_after=13)
    run_with(config, tmp_path / "fork", {})
    ledger = Run(tmp_path / "fork").ledger
    assert [(change.start_step, change.factor) for change in ledger.lr_events] == [(8, 0.25)]
    assert ledger.record.lr_events_at == ()
    assert rates(tmp_path / "fork") == [
        lr_at(step, config.optim, config.steps) * lr_factor(step, ledger.lr_events) for step in range(10, 24)
    ]
    assert rates(tmp_path / "fork")[:5] == rates(tmp_path / "parent")[10:15]


def test_clipping_harder_and_new_findings_are_said_and_change_nothing(config: RunConfig, tmp_path: Path) -> None:
    plain = run_with(config, tmp_path / "plain", {})
    said = run_with(config, tmp_path / "said", {5: ClipHarder(cause="a steep gradient")})
    assert said == plain
    rows = Run(tmp_path / "said").ledger.of_kind("verdict")
    assert [(row["action"], row["text"], row["batch_index"]) for row in rows] == [
        ("clip_harder", "a steep gradient", 5)
    ]


def test_findings_without_an_action_are_one_row_with_a_sentence(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding(
        kind="slow_spike",
        severity="warning",
        text="the smoothed loss is 0.2 nats above its best",
        batch_index=6,
        onset=2,
        value=3.0,
    )

    def finds(*args: Any, **kwargs: Any) -> Verdict:
        verdict = judge(*args, **kwargs)
        return replace(verdict, findings=(finding,)) if args[1].batch_index == 6 else verdict

    with open_run(config, tmp_path / "run", join_world(config.parallel), notify=ignore, peak=0.0) as run:
        train(run.state, run.setup, run.data, run.keeping, stop=StopRequest(), judge=finds)
    (row,) = Run(tmp_path / "run").ledger.of_kind("verdict")
    assert (row["action"], row["batch_index"], row["step"]) == ("proceed", 6, 7)
    assert row["text"] == "The smoothed loss is 0.2 nats above its best. Nothing was changed."
    assert row["findings"] == [finding.to_dict()]


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (SkipUpdate(cause="seen"), "batch 4: its update was applied, and cannot be skipped: seen"),
    ],
)
def test_an_applied_update_cannot_be_called_skipped(
    config: RunConfig, tmp_path: Path, action: Action, text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        run_with(config, tmp_path / "run", {4: action})


def test_an_investigation_that_ends_in_another_is_refused(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.train import loop

    again = Verdict(state=GuardState(), action=Investigate(cause="still"))
    monkeypatch.setattr(loop, "conclude", lambda *args: again)
    with pytest.raises(RuntimeError, match="batch 4 was investigated, and is to be investigated again: still"):
        run_with(config, tmp_path / "run", {4: Investigate(cause="seen")})
    assert acting.in_words(()) == ""


def test_the_regime_grows_with_every_planned_change_and_with_nothing_else(config: RunConfig, loader: Loader) -> None:
    stages = (MixtureStage(start_row=1000, weights=(1.0, 1.0)), MixtureStage(start_row=2048, weights=(1.0, 2.0)))
    data = replace(
        config.data,
        batch_size=3,
        batch_stages=(BatchStage(start_batch=300, batch_size=8),),
        mixture_stages=stages,
    )
    starts = Loader(data, loader.prepared, config.seed).batch_starts
    numbers = [regime(data, starts, index) for index in range(600)]
    changes = [index for index in range(1, 600) if numbers[index] != numbers[index - 1]]
    # row 1000 is rounded up to the block that begins at 1024, in the middle of batch 315
    assert changes == [300, 315, 443]
    assert [starts.rows_of(index) for index in (315, 443)] == [(1020, 1028), (2044, 2052)]
    assert (numbers[0], numbers[-1]) == (0, 3)
