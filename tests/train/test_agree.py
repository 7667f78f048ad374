"""A rank that judges otherwise is caught before anything is done."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.config.guard import GuardConfig
from surefoot.config.run import RunConfig
from surefoot.guard.actions import Halt, Investigate, Proceed, SkipUpdate
from surefoot.guard.guard import GuardState, Verdict, judge
from surefoot.guard.record import Record
from surefoot.guard.signals import ProbeSignals, StepSignals
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.train import loop
from surefoot.train.agree import VerdictsDiffer, agree
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.run import open_run


def ignore(kind: str, row: Mapping[str, Any]) -> None:
    return None


def told(rank: int, world: int, config: RunConfig, verdicts: tuple[Verdict, ...]) -> str:
    try:
        agree(verdicts[rank], join_world(config.parallel))
    except VerdictsDiffer as error:
        return str(error)
    return ""


def test_the_ranks_that_disagree_with_rank_0_are_named_on_all_of_them(config: RunConfig) -> None:
    healthy = Verdict(state=GuardState(healthy_batches=3), action=Proceed())
    skips = Verdict(state=GuardState(healthy_batches=3), action=SkipUpdate(cause="seen"))
    texts = run_ranks(3, told, config, (healthy, healthy, skips))
    assert len(set(texts)) == 1
    assert "the guard of rank 0 says proceed, but rank 2 says skip, on the same reduced numbers" in texts[0]
    assert run_ranks(2, told, config, (skips, skips)) == ["", ""]


def test_what_is_remembered_counts_too_though_the_action_is_the_same(config: RunConfig) -> None:
    one, other = (Verdict(state=GuardState(healthy_batches=n), action=Proceed()) for n in (3, 4))
    texts = run_ranks(2, told, config, (one, other))
    assert all("rank 1 says proceed" in text for text in texts)


def broken_on_rank_1(rank: int, world: int, config: RunConfig, folder: Path) -> str:
    """A run in which one rank's memory lost a bit of what it remembers, at batch 4."""

    def forgetful(
        state: GuardState,
        signals: StepSignals,
        config: GuardConfig,
        record: Record,
        probe: ProbeSignals | None = None,
        total_steps: int = 0,
    ) -> Verdict:
        verdict = judge(state, signals, config, record, probe, total_steps)
        wrong = rank == 1 and signals.batch_index == 4
        return replace(verdict, state=replace(verdict.state, healthy_batches=0)) if wrong else verdict

    with open_run(config, folder, join_world(config.parallel), notify=ignore, peak=0.0) as run:
        try:
            train(run.state, run.setup, run.data, run.keeping, stop=StopRequest(), judge=forgetful)
        except VerdictsDiffer as error:
            return f"{run.state.batch_index}: {error}"
    return "went on"


def test_a_run_stops_at_the_batch_where_a_rank_judges_otherwise_and_writes_nothing_about_it(
    config: RunConfig, tmp_path: Path
) -> None:
    texts = run_ranks(2, broken_on_rank_1, config, tmp_path / "run")
    assert [text.split(":")[0] for text in texts] == ["5", "5"]
    assert all("take the machine out" in text for text in texts)
    assert [row["batch_index"] for row in Run(tmp_path / "run").rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("action", [Proceed(), SkipUpdate(cause="seen")])
def test_alone_there_is_nobody_to_disagree_with(config: RunConfig, action: Proceed | SkipUpdate) -> None:
    agree(Verdict(state=GuardState(), action=action), join_world(config.parallel))


def concludes_otherwise(rank: int, world: int, config: RunConfig, folder: Path) -> str:
    """Both ranks ask for an investigation of batch 4, and rank 1 draws another conclusion from it."""

    def asks(*args: Any, **kwargs: Any) -> Verdict:
        verdict = judge(*args, **kwargs)
        return replace(verdict, action=Investigate(cause="seen")) if args[1].batch_index == 4 else verdict

    def concluded(state: GuardState, *_: object) -> Verdict:
        return Verdict(state=state, action=Halt(reason=f"rank {rank} says so"))

    with (
        open_run(config, folder, join_world(config.parallel), notify=ignore, peak=0.0) as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(loop, "conclude", concluded)
        try:
            train(run.state, run.setup, run.data, run.keeping, stop=StopRequest(), judge=asks)
        except VerdictsDiffer as error:
            return str(error)
    return "went on"


def test_ranks_agree_on_the_conclusion_of_an_investigation_too(config: RunConfig, tmp_path: Path) -> None:
    texts = run_ranks(2, concludes_otherwise, config, tmp_path / "run")
    assert all("the guard of rank 0 says halt, but rank 1 says halt" in text for text in texts)
    assert Run(tmp_path / "run").ledger.of_kind("verdict") == []
