"""A run ends where its bound says, with its decay landed there."""

import dataclasses
import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch

from surefoot.cli.fork import main as fork
from surefoot.config.data import BatchStage, LengthStage
from surefoot.config.errors import ConfigError
from surefoot.config.optim import WSD, Constant, InverseSqrt, Power
from surefoot.config.run import ByFlops, ByHours, ByMoney, ByTokens, RunConfig
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.monitor.store import RunStore
from surefoot.monitor.summary import summarise
from surefoot.optim.schedule import lr_at
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World
from surefoot.proof.rehearsal import Crashed, Rehearsed, Script, rehearse
from surefoot.train import loop
from surefoot.train.budget import OPEN_END, batches_until, bound_seconds, planned_steps, steps_of, total_until
from surefoot.train.dry_run import dry_run
from surefoot.train.horizon import Horizon
from surefoot.train.setup import set_up

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
Vary = Callable[..., RunConfig]


class Ticks:
    """A clock that is read once a batch, each of which takes so many seconds in turn."""

    def __init__(self, *ticks: float) -> None:
        self.now, self.ticks = 0.0, cycle(ticks)

    def __call__(self) -> float:
        self.now += next(self.ticks)
        return self.now


# Tokens and FLOPs


def staged(config: RunConfig, vary: Vary) -> RunConfig:
    """4 rows of 64 tokens; from batch 5 on 8 rows, from batch 9 on cut to 32."""
    return vary(
        config,
        **{
            "data.batch_stages": (BatchStage(start_batch=5, batch_size=8),),
            "data.length_stages": (LengthStage(start_batch=9, seq_len=32),),
        },
    )


def test_the_last_batch_is_the_first_that_reaches_the_bound(config: RunConfig, vary: Vary) -> None:
    data = staged(config, vary).data
    per_batch = [256.0] * 5 + [512.0] * 30
    for amount in (1, 255, 256, 257, 1279, 1280, 1281, 5 * 256 + 4 * 512, 5 * 256 + 4 * 512 + 1, 9999):
        reached = next(n for n in range(1, 36) if sum(per_batch[:n]) >= amount)
        assert batches_until(data, amount, lambda _: 1.0) == reached, amount
        assert total_until(data, reached, lambda _: 1.0) == sum(per_batch[:reached])


def test_flops_are_counted_at_the_length_that_rows_are_cut_to(config: RunConfig, vary: Vary) -> None:
    config = staged(config, vary)
    setup, _ = set_up(config, ALONE)
    full, cut = setup.flops_at[64], setup.flops_at[32]
    assert cut < full
    bound = 256 * 5 * full + 512 * 4 * full + 512 * 3 * cut
    assert set_up(vary(config, bound=ByFlops(flops=bound * 0.9999)), ALONE)[0].num_steps == 12
    assert set_up(vary(config, bound=ByFlops(flops=bound * 1.0001)), ALONE)[0].num_steps == 13
    assert steps_of(vary(config, bound=ByFlops(flops=bound * 1.0001))) == 13


def test_a_run_bounded_by_tokens_lands_its_decay_there_whatever_steps_says(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    config = vary(config, steps=999, bound=ByTokens(tokens=2600.0), **{"optim.schedule": WSD()})
    done = rehearse(config, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert (done.reason, done.step) == ("done", 11)
    rates = run.metrics()["train/lr"].tolist()
    assert rates == [lr_at(step, config.optim, 11) for step in range(11)]
    assert rates[-1] == pytest.approx(0, abs=1e-12)
    assert summarise(run).tokens == 11 * 256
    plan = dry_run(config, ALONE)
    assert (plan.steps, plan.total_tokens) == (11, 11 * 256)


def test_a_run_bounded_by_tokens_is_resumed_bit_for_bit(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    config = vary(staged(config, vary), bound=ByTokens(tokens=6000.0), **{"optim.ramp_lr": "sqrt"})
    whole = rehearse(config, tmp_path / "whole")
    assert rehearse(config, tmp_path / "parts", Script(stop_after=8)).reason == "stopped"
    last = rehearse(config, tmp_path / "parts")
    assert (last.step, last.reason) == (5 + 10, "done")
    assert last.digests == whole.digests
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "parts")).same


def test_a_decay_longer_than_what_tokens_come_to_is_refused(config: RunConfig, vary: Vary) -> None:
    config = vary(config, bound=ByTokens(tokens=2600.0), **{"optim.schedule": WSD(decay_steps=12)})
    with pytest.raises(
        ConfigError, match=r"decay_steps=12 is longer than the run: bound.tokens=2600 ends it at step 11; at most 11"
    ):
        planned_steps(config, lambda _: 1.0)
    assert planned_steps(vary(config, **{"optim.schedule": WSD(decay_steps=11)}), lambda _: 1.0) == 11


# Hours and money


QUARTER = WSD(decay_fraction=0.25)


def timed(config: RunConfig, vary: Vary, seconds: float, schedule: WSD = QUARTER) -> RunConfig:
    return vary(
        config, bound=ByHours(hours=seconds / 3600), **{"optim.schedule": schedule, "checkpoint.asynchronous": False}
    )


def test_money_is_time_at_a_price(config: RunConfig, vary: Vary) -> None:
    config = vary(config, bound=ByMoney(money=10.0, price_per_hour=4.0))
    assert bound_seconds(config) == 9000
    assert planned_steps(config, lambda _: 1.0) == OPEN_END


@pytest.mark.parametrize(("schedule", "ticks"), [(QUARTER, (1.0,)), (WSD(decay_steps=15), (0.4, 1.7, 0.9))])
def test_a_run_whose_speed_is_known_ends_within_a_twentieth_of_its_hours(
    config: RunConfig, vary: Vary, tmp_path: Path, schedule: WSD, ticks: tuple[float, ...]
) -> None:
    config = vary(timed(config, vary, 40.0, schedule), **{"eval.every": 0})
    done = rehearse(config, tmp_path / "run", clock=Ticks(*ticks))
    run = Run(tmp_path / "run")
    [row] = run.ledger.of_kind("horizon")
    rows = run.metrics()
    assert done.reason == "done"
    assert done.step == row["last_step"] == summarise(run).steps >= 38
    assert rows["perf/train_s"][-1] == pytest.approx(40.0, rel=0.05)
    rates = rows["train/lr"].tolist()
    assert rates == [lr_at(step, config.optim, done.step) for step in range(done.step)]
    assert rates[row["step"] - 1] == config.optim.lr > rates[row["step"] + 1]
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_a_ramp_of_the_batch_ahead_is_counted_in(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    """Batches from 30 on are twice as long, and take twice the time: seen before they come, since time is told by rows."""
    config = vary(
        timed(config, vary, 40.0), **{"eval.every": 0, "data.batch_stages": (BatchStage(start_batch=30, batch_size=8),)}
    )
    done = rehearse(config, tmp_path / "run", clock=Ticks(*[1.0] * 31, *[2.0] * 30))
    assert Run(tmp_path / "run").metrics()["perf/train_s"][-1] == pytest.approx(40.0, rel=0.05)
    assert done.step == 35


def test_a_resumed_run_reads_where_its_clock_had_it_end(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    config = timed(config, vary, 20.0)
    whole = rehearse(config, tmp_path / "whole", clock=Ticks(1.0))
    decided = Run(tmp_path / "whole").ledger.of_kind("horizon")[0]
    stop = decided["step"] + 2
    assert stop < whole.step
    first = rehearse(config, tmp_path / "parts", Script(stop_after=stop), clock=Ticks(1.0))
    assert (first.reason, first.step) == ("stopped", stop + 1)
    # a clock that would have it end elsewhere is not asked
    last = rehearse(config, tmp_path / "parts", clock=Ticks(0.03))
    assert last.digests == whole.digests
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "parts")).same
    assert len(Run(tmp_path / "parts").ledger.of_kind("horizon")) == 1


def test_a_crash_after_the_row_and_a_rollback_before_it_leave_the_end_where_it_was(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    config = timed(config, vary, 20.0)
    whole = rehearse(config, tmp_path / "whole", clock=Ticks(1.0))
    decided = Run(tmp_path / "whole").ledger.of_kind("horizon")[0]
    at = decided["step"]
    with pytest.raises(Crashed):
        rehearse(config, tmp_path / "crashed", Script(die_after=at + 1), clock=Ticks(1.0))
    last = rehearse(config, tmp_path / "crashed", clock=Ticks(0.03))
    assert last.digests == whole.digests
    back = rehearse(config, tmp_path / "back", Script(rollback_after=at + 1, rollback_to=at - 3), clock=Ticks(1.0))
    assert Run(tmp_path / "back").attempts[-1].from_batch < at
    assert back.digests == whole.digests


def test_time_of_earlier_attempts_counts(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    """What a crash threw away was spent as well."""
    config = timed(config, vary, 30.0)
    with pytest.raises(Crashed):
        rehearse(config, tmp_path / "run", Script(die_after=13), clock=Ticks(1.0))
    spent = Run(tmp_path / "run").metrics()["perf/train_s"][-1]
    rehearse(config, tmp_path / "run", clock=Ticks(1.0))
    times = Run(tmp_path / "run").history()["perf/train_s"]
    assert spent == 14
    assert Run(tmp_path / "run").metrics()["perf/train_s"][-1] == pytest.approx(30.0, rel=0.05)
    assert times[8:12].tolist() == [9, 10, 15, 16]
    assert Run(tmp_path / "run").ledger.horizon == 26


def timed_on(rank: int, world: int, config: RunConfig, folder: Path) -> Rehearsed:
    # the other rank's clock runs twice as fast, and decides nothing
    return rehearse(config, folder, clock=Ticks(1.0 + rank))


def test_a_decay_that_does_not_fit_is_cut_and_stays_so_through_resumes_and_rollbacks(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    config = timed(config, vary, 20.0, WSD(decay_steps=150))
    whole = rehearse(config, tmp_path / "whole", clock=Ticks(1.0))
    run = Run(tmp_path / "whole")
    [row] = run.ledger.of_kind("horizon")
    length = row["decay_steps"]
    assert (whole.reason, row["last_step"] - row["step"], row["decay_asked"]) == ("done", length, 150)
    assert length >= 12, "a pace of one batch is not yet one"
    assert run.metrics()["perf/train_s"][-1] == 20.0
    rates = run.metrics()["train/lr"].tolist()
    assert rates == [lr_at(step, config.optim, whole.step, length) for step in range(whole.step)]
    assert rates[row["step"] - 1] == config.optim.lr
    assert rates[-1] == 0.0
    at = row["step"]
    assert rehearse(config, tmp_path / "parts", Script(stop_after=at + 3), clock=Ticks(1.0)).reason == "stopped"
    assert rehearse(config, tmp_path / "parts", clock=Ticks(0.03)).digests == whole.digests
    back = rehearse(config, tmp_path / "back", Script(rollback_after=at + 3, rollback_to=at - 2), clock=Ticks(1.0))
    assert Run(tmp_path / "back").attempts[-1].from_batch < at
    assert back.digests == whole.digests


def test_a_run_that_is_resumed_after_its_time_decays_in_one_step(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    config = timed(config, vary, 20.0)
    assert rehearse(config, tmp_path / "run", Script(stop_after=9), clock=Ticks(1.0)).step == 10
    last = rehearse(config, tmp_path / "run", clock=Ticks(1.0, 99.0))
    [row] = Run(tmp_path / "run").ledger.of_kind("horizon")
    assert (last.step, row["step"], row["decay_steps"], row["decay_asked"]) == (12, 11, 1, 3)


@pytest.mark.parametrize("schedule", [Constant(), InverseSqrt(), Power()])
def test_a_schedule_without_an_end_ends_when_the_time_is_over(
    config: RunConfig, vary: Vary, tmp_path: Path, schedule: Constant | InverseSqrt | Power
) -> None:
    config = vary(timed(config, vary, 12.5), **{"optim.schedule": schedule, "eval.every": 0})
    done = rehearse(config, tmp_path / "run", clock=Ticks(1.0))
    run = Run(tmp_path / "run")
    assert (done.reason, done.step, run.ledger.horizon) == ("done", 13, 13)
    assert run.metrics()["train/lr"].tolist() == [lr_at(step, config.optim, OPEN_END) for step in range(13)]
    assert rehearse(config, tmp_path / "run", clock=Ticks(1.0)).step == 13


def test_a_row_that_does_not_say_how_long_its_decay_is_means_what_it_did(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    config = timed(config, vary, 1000.0)
    assert rehearse(config, tmp_path / "run", Script(stop_after=8), clock=Ticks(1.0)).step == 9
    with RunStore(tmp_path / "run", print) as store:
        store.record("horizon", step=9, batch_index=8, last_step=12, train_s=9.0)
    assert rehearse(config, tmp_path / "run", clock=Ticks(1.0)).step == 12
    rates = Run(tmp_path / "run").metrics()["train/lr"].tolist()
    assert rates == [lr_at(step, config.optim, 12) for step in range(12)]


def test_the_decay_of_a_fork_is_a_share_of_its_own_steps(
    config: RunConfig, vary: Vary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse(vary(config, **{"optim.schedule": WSD(decay_steps=1)}), tmp_path / "run")
    monkeypatch.setattr(loop, "Horizon", lambda *words: Horizon(*words[:3], Ticks(1.0)))
    sets = ["bound.kind=hours", f"bound.hours={20 / 3600}", "optim.schedule.decay_steps=0"]
    words = [word for each in [*sets, "optim.schedule.decay_fraction=0.25"] for word in ("--set", each)]
    assert fork([str(tmp_path / "run"), "--at", "20", *words, "--run", str(tmp_path / "fork")]) == 0
    branch = Run(tmp_path / "fork")
    [row] = branch.ledger.of_kind("horizon")
    assert (row["step"], row["last_step"], row["decay_steps"]) == (35, 40, 5.0)
    rates = [step["train/lr"] for step in branch.rows]
    falling = [config.optim.lr * (1 - (n + 1) / 5) for n in range(5)]
    assert rates == pytest.approx([config.optim.lr] * 15 + falling, abs=1e-15)


def test_rank_zero_decides_for_all(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    config = timed(config, vary, 20.0)
    first, second = run_ranks(2, timed_on, config, tmp_path / "run")
    assert (first.reason, first.step) == ("done", second.step)
    assert first.ledger == second.ledger
    [row] = Run(tmp_path / "run").ledger.of_kind("horizon")
    assert first.step == row["last_step"]


def test_the_facts_of_a_run_without_a_known_end_say_its_time(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    plan = dry_run(timed(config, vary, 3600.0), ALONE)
    assert plan.steps == pytest.approx(3600 / plan.step_s, rel=0.01, abs=1)
    assert plan.estimated_s == pytest.approx(3600, rel=0.01)
    assert json.dumps(dataclasses.asdict(plan))
