"""Trials: real run folders in forked children, each with a result, none run twice, a dead child an answer."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from surefoot.config.errors import ConfigError
from surefoot.config.optim import WSD
from surefoot.config.run import ByHours, BySteps, ByTokens, RunConfig
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import rehearse_on_rank
from surefoot.scale import trial_setup
from surefoot.scale import trials as module
from surefoot.scale.children import Outcome, Work, call_in_child, run_children
from surefoot.scale.trial_run import Measured
from surefoot.scale.trials import TRIAL_FILE, Trial, TrialResult, read_result, run_trials

Vary = Callable[..., RunConfig]


@pytest.fixture
def short(config: RunConfig, vary: Vary) -> RunConfig:
    observed = dataclasses.replace(config.guard, policy="observe", probe_every=0, snapshots=0)
    return vary(config, steps=8, guard=observed, **{"eval.final_rows": 8, "eval.every": 0})


def attempts(folder: Path, name: str) -> int:
    return len(Run(folder / name).attempts)


def test_trials_end_with_the_losses_of_the_run_and_come_back_in_order(
    short: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    listed = [Trial(name=f"seed={seed}", config=vary(short, seed=seed)) for seed in (3, 1, 2)]
    heard: list[str] = []
    results = run_trials(listed, tmp_path / "trials", jobs=2, on_done=lambda result: heard.append(result.name))
    assert [result.name for result in results] == ["seed=3", "seed=1", "seed=2"]
    assert sorted(heard) == ["seed=1", "seed=2", "seed=3"]
    run_ranks(1, rehearse_on_rank, listed[0].config, tmp_path / "alone")
    alone = Run(tmp_path / "alone")
    assert alone.ledger.finish is not None
    first = results[0]
    assert first.ending == "done"
    assert first.domains == alone.ledger.finish["loss"]
    assert first.loss == sum(first.domains.values()) / 2
    losses = [row["train/loss"] for row in alone.rows]
    assert (first.initial_loss, first.train_loss, first.steps) == (losses[0], losses[-1], 8)
    assert first.bounded_loss == first.loss < first.initial_loss
    assert Run(tmp_path / "trials" / "seed=3").status().state == "finished"
    assert not (tmp_path / "trials" / "seed=3" / "checkpoints").exists()


def test_what_finished_is_not_run_again_and_another_config_is(short: RunConfig, vary: Vary, tmp_path: Path) -> None:
    listed = [Trial(name=name, config=short) for name in ("a", "b")]
    first = run_trials(listed, tmp_path)
    assert run_trials(listed, tmp_path) == first
    assert attempts(tmp_path, "a") == attempts(tmp_path, "b") == 1
    changed = [Trial(name="a", config=vary(short, seed=5)), listed[1]]
    again = run_trials(changed, tmp_path)
    assert again[1] == first[1]
    assert again[0].loss != first[0].loss
    assert Run(tmp_path / "a.1").rows[-1]["train/loss"] == first[0].train_loss
    assert attempts(tmp_path, "b") == 1


def test_a_run_that_ends_no_better_than_it_began_diverged(short: RunConfig, vary: Vary, tmp_path: Path) -> None:
    config = vary(short, **{"optim.lr": 9.0, "optim.warmup_steps": 1})
    (result,) = run_trials([Trial(name="wild", config=config)], tmp_path)
    assert result.ending == "diverged"
    assert result.reason == f"held-out loss {result.loss:.3f} at the end, {result.initial_loss:.3f} at the start"
    assert result.bounded_loss == result.initial_loss < result.loss
    assert read_result(tmp_path, Trial(name="wild", config=config)) == result


def test_weights_that_are_no_numbers_are_not_trained_on(short: RunConfig, vary: Vary, tmp_path: Path) -> None:
    adam = dataclasses.replace(short.optim.optimizer, weight_decay=0.0)
    config = vary(short, steps=30, **{"optim.lr": 1e36, "optim.warmup_steps": 1, "optim.optimizer": adam})
    trial = Trial(name="lost", config=config)
    (result,) = run_trials([trial], tmp_path)
    assert (result.ending, result.reason.split(" from ")[0]) == ("diverged", "training loss not finite")
    assert result.steps < 10
    assert math.isnan(result.loss)
    assert result.bounded_loss == result.initial_loss
    stored = json.loads((tmp_path / "lost" / TRIAL_FILE).read_text())
    assert stored["loss"] is None
    known = read_result(tmp_path, trial)
    assert known is not None
    assert math.isnan(known.loss)
    assert Run(tmp_path / "lost").status().state == "stopped"


def test_a_halt_of_the_guard_is_a_divergence_whatever_the_loss(short: RunConfig) -> None:
    measured = Measured("20 skipped steps in a row", {"x": 2.0}, 5.0, 3.0, 7, 1.0, 10, "data")
    result = module._judged(Trial(name="halted", config=short), measured)
    assert (result.ending, result.reason, result.bounded_loss) == ("diverged", "20 skipped steps in a row", 5.0)


def test_a_child_that_raises_or_dies_is_a_result_and_is_tried_again(
    short: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = module.measure

    def stumble(config: RunConfig, folder: Path) -> Measured | None:
        if folder.name == "raises":
            raise ValueError("no such luck")
        if folder.name == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(config, folder)

    listed = [Trial(name=name, config=short) for name in ("raises", "dies", "lives")]
    monkeypatch.setattr(module, "measure", stumble)
    results = run_trials(listed, tmp_path)
    assert [result.ending for result in results] == ["failed", "failed", "done"]
    assert results[0].reason == f"ValueError: no such luck; see {tmp_path / 'raises'}.log"
    assert "SIGKILL" in results[1].reason
    assert "no such luck" in (tmp_path / "raises.log").read_text()
    monkeypatch.setattr(module, "measure", measure)
    assert [result.ending for result in run_trials(listed, tmp_path)] == ["done"] * 3
    assert attempts(tmp_path, "lives") == 1


def test_an_interrupted_trial_goes_on_where_it_was(short: RunConfig, vary: Vary, tmp_path: Path) -> None:
    listed = [Trial(name=name, config=vary(short, steps=500)) for name in ("one", "two")]

    asked: list[bool] = []

    def interrupt(running: Sequence[str]) -> None:
        if not asked and module.steps_done(tmp_path, "one") > 0:
            asked.append(True)  # a second one would end the process at once
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_trials(listed, tmp_path, on_tick=interrupt)
    begun = Run(tmp_path / "one")
    assert begun.status().reason == "SIGTERM"
    assert 0 < begun.status().step < 500
    assert not (tmp_path / "two").exists()
    results = run_trials(listed, tmp_path)
    assert attempts(tmp_path, "one") == 2
    assert results[0] == dataclasses.replace(results[1], name="one", seconds=results[0].seconds)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("slow", ["_prepare", "_decide"])
def test_what_is_prepared_is_left_at_once_and_its_processes_ended(
    short: RunConfig,
    vary: Vary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow: str,
    asked: signal.Signals,
) -> None:
    parent, note = os.getpid(), tmp_path / "pids"

    def linger(*_: object) -> None:
        started = subprocess.Popen(["sleep", "60"])
        note.write_text(f"{os.getpid()} {started.pid}")
        os.kill(parent, asked)
        time.sleep(60)

    monkeypatch.setattr(trial_setup, slow, linger)
    begun = time.monotonic()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        run_trials([Trial(name="a", config=vary(short, **{"parallel.precision": "auto"}))], tmp_path / "trials")
    assert time.monotonic() - begun < 20
    assert isinstance(caught.value, KeyboardInterrupt if asked == signal.SIGINT else SystemExit)
    assert getattr(caught.value, "code", 75) == 75
    for pid in map(int, note.read_text().split()):
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"
    assert not (tmp_path / "trials" / "a").exists()


def test_checkpoints_of_a_budget_are_a_quarter_of_what_it_comes_to(short: RunConfig, vary: Vary) -> None:
    cadences = [
        trial_setup.as_trial_runs(vary(short, steps=9999, bound=bound), {}).checkpoint.every
        for bound in (BySteps(), ByTokens(tokens=256.0 * 800), ByTokens(tokens=256.0), ByHours(hours=1.0))
    ]
    assert cadences == [2499, 200, 100, 100]


def test_a_decay_longer_than_a_budget_is_told_before_anything_starts(
    short: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    config = vary(short, bound=ByTokens(tokens=2560.0), **{"optim.schedule": WSD(decay_steps=12)})
    with pytest.raises(ConfigError, match=r"trial a: optim.schedule.decay_steps=12 is longer than the run"):
        run_trials([Trial(name="a", config=config)], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_unfinished_run_of_another_config_is_moved_aside(short: RunConfig, vary: Vary, tmp_path: Path) -> None:
    (first,) = run_trials([Trial(name="a", config=short)], tmp_path, keep_checkpoints=True)
    (tmp_path / "a" / TRIAL_FILE).unlink()
    (again,) = run_trials([Trial(name="a", config=short)], tmp_path, keep_checkpoints=True)
    assert again == dataclasses.replace(first, seconds=again.seconds)
    assert not (tmp_path / "a.1").exists()
    (tmp_path / "a" / TRIAL_FILE).unlink()
    run_trials([Trial(name="a", config=vary(short, steps=9))], tmp_path)
    assert (tmp_path / "a.1").exists()
    assert attempts(tmp_path, "a") == 1


def test_every_mistake_of_every_trial_is_told_before_anything_starts(
    short: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    wrong = vary(short, **{"optim.lr": -1.0})
    listed = [Trial(name="a", config=wrong), Trial(name="a", config=short), Trial(name="b/c", config=short)]
    with pytest.raises(ConfigError) as caught:
        run_trials(listed, tmp_path / "none")
    text = str(caught.value)
    assert "trial a: optim.lr=-1.0 must be above 0" in text
    assert "trial 'a': two trials have this name" in text
    assert "trial 'b/c': a name is up to 150 letters" in text
    assert not (tmp_path / "none").exists()


def test_auto_is_decided_once_for_all_trials(short: RunConfig, vary: Vary, tmp_path: Path) -> None:
    config = vary(short, **{"parallel.precision": "auto"})
    (tmp_path / "decided.json").write_text('{"cpu": {"precision": "bf16", "compile": "off", "device": "cpu"}}')
    run_trials([Trial(name="a", config=config)], tmp_path)
    assert Run(tmp_path / "a").config["parallel"]["precision"] == "bf16"
    (tmp_path / "b").mkdir()
    run_trials([Trial(name="a", config=config)], tmp_path / "b")
    decided = json.loads((tmp_path / "b" / "decided.json").read_text())["cpu"]["precision"]
    assert Run(tmp_path / "b" / "a").config["parallel"]["precision"] == decided


def test_results_of_other_data_do_not_count(short: RunConfig, tmp_path: Path) -> None:
    trial = Trial(name="a", config=short)
    (first,) = run_trials([trial], tmp_path)
    module.write_result(tmp_path, dataclasses.replace(first, data_fingerprint="other", loss=0.5))
    again = run_trials([trial, Trial(name="b", config=short)], tmp_path)
    assert again[0].loss == first.loss


def test_children_run_as_many_at_once_as_told_and_in_order() -> None:
    seen: list[tuple[str, ...]] = []
    ended: list[Outcome] = []
    works = [Work(str(n), lambda n=n: n * n) for n in range(5)]  # type: ignore[misc]
    run_children(works, jobs=2, on_end=ended.append, on_tick=lambda running: seen.append(tuple(running)))
    assert max(map(len, seen)) == 2
    assert seen[0] == ("0", "1")
    assert {outcome.name: outcome.value for outcome in ended} == {str(n): n * n for n in range(5)}


def test_a_call_in_a_child_raises_what_it_raised() -> None:
    def refuse() -> None:
        raise FileNotFoundError(2, "no such file", "x")

    with pytest.raises(FileNotFoundError, match="no such file"):
        call_in_child(refuse)
    with pytest.raises(RuntimeError, match="exit code 7"):
        call_in_child(lambda: os._exit(7))


def test_results_survive_their_file(short: RunConfig, tmp_path: Path) -> None:
    trial = Trial(name="a", config=short)
    (result,) = run_trials([trial], tmp_path)
    assert read_result(tmp_path, trial) == result
    assert isinstance(result, TrialResult)
    (tmp_path / "a" / TRIAL_FILE).write_text('{"name": "a"')
    assert read_result(tmp_path, trial) is None
