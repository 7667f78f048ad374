"""Many small runs: a trial is a config and a name, run as a real run folder in a forked child; what finished is not run again."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from surefoot.config.errors import ConfigError
from surefoot.config.fingerprint import fingerprint
from surefoot.config.run import RunConfig
from surefoot.config.validate import validate
from surefoot.data.build import Progress
from surefoot.monitor.durable import read_json, write_atomic
from surefoot.monitor.store import move_aside
from surefoot.scale.children import Outcome, Work, run_children
from surefoot.scale.trial_run import Measured, measure
from surefoot.scale.trial_setup import as_trial_runs, data_key, decide_autos, prepare_all
from surefoot.train.budget import steps_of
from surefoot.train.interrupt import StopRequest
from surefoot.train.stock import ResumeRefused

TRIAL_FILE = "trial.json"
_NAME = re.compile(r"[A-Za-z0-9_=,+-][A-Za-z0-9_.=,+-]{0,149}")
_NUMBERS = ("loss", "initial_loss", "train_loss", "seconds")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of many."""

    name: str
    """Name of its run folder: letters, digits and ``_ - . = , +``."""
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What became of a trial; ``<name>/trial.json`` holds the same. A number that there is not is NaN here and null there."""

    name: str
    fingerprint: str
    """Of the config as the trial gives it."""
    data_fingerprint: str
    """Of the shards it read; empty where it failed."""
    ending: Literal["done", "diverged", "failed"]
    """done: all steps, and learnt something. diverged: not finite, ended no better than it began, or the guard halted it. failed: no
    result; an exception or a dead process, and the next call tries again."""
    reason: str
    """Why it is not ``done``; empty where it is."""
    loss: float
    """Held-out loss at the end, nats per token: mean over domains, each weighing the same."""
    domains: Mapping[str, float]
    """The same by domain."""
    initial_loss: float
    """Training loss of the first batch, nats per token."""
    train_loss: float
    """Mean training loss over the last tenth of the run's steps, nats per token."""
    steps: int
    """Updates applied."""
    seconds: float
    """In steps of the surviving run, over all attempts; evaluations left out."""
    num_params: int

    @property
    def bounded_loss(self) -> float:
        """min(loss, initial loss), the initial one where the run diverged: what LR sensitivity averages (arXiv:2309.14322 section 2.2)."""
        if self.ending == "done" and self.loss < self.initial_loss:
            return self.loss
        return self.initial_loss


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    *,
    jobs: int = 1,
    on_done: Callable[[TrialResult], None] = lambda result: None,
    on_tick: Callable[[Sequence[str]], None] = lambda running: None,
    keep_checkpoints: bool = False,
    progress: Progress | None = None,
) -> list[TrialResult]:
    """Run every trial that ``folder`` has no result of, ``jobs`` at once, one CPU thread each; the results of all, in the order of ``trials``.

    Each runs in ``<folder>/<name>``, its output in ``<folder>/<name>.log``. A result (done or diverged) whose fingerprint is that of
    the trial's config is kept; an unfinished run of the same config is continued from its last checkpoint; one of another config is
    moved aside to ``<name>.1``. ``auto`` settings are decided once for all. Checkpoints are as sparse as a resume needs, whatever the
    config says; those of finished trials are removed unless ``keep_checkpoints``. All else, the guard's policy included, is the config's.

    ``on_done`` hears of each result, old ones first; ``on_tick`` about once a second which trials are running; ``progress`` (called in
    a child) of shards being built. A child that raises or dies is a result. Raises ConfigError, with every mistake of every trial, before
    anything starts; DataError where data cannot be prepared. Ctrl-C lets the children save (what
    is prepared before them is left at once) and raises KeyboardInterrupt; SIGTERM and
    SIGUSR1 likewise raise SystemExit(75). Call it where no other threads work and no GPU is in use yet: children are forked.
    """
    _check(trials)
    folder.mkdir(parents=True, exist_ok=True)
    found = {trial.name: read_result(folder, trial) for trial in trials}
    with StopRequest("stopping; nothing is under way that would be lost") as stop:
        if None in found.values():
            prints = prepare_all([trial.config for trial in trials], progress, stop)
            for trial in trials:
                result = found[trial.name]
                if result is not None and result.data_fingerprint != prints[data_key(trial.config)]:
                    found[trial.name] = None
        missing = {trial.name: trial for trial in trials if found[trial.name] is None}
        for result in found.values():
            if result is not None:
                on_done(result)
        works = _works(list(missing.values()), folder, keep_checkpoints, stop)
    if stop.asked:
        stop.end()
    with StopRequest() as stop:

        def ended(outcome: Outcome) -> None:
            failed = _failed(outcome, folder, missing[outcome.name]) if outcome.error else None
            result: TrialResult | None = failed or outcome.value
            if result is not None:  # None: it was asked to stop, and saved
                found[outcome.name] = result
                on_done(result)

        run_children(works, jobs=jobs, stop_asked=lambda: stop.asked, on_end=ended, on_tick=on_tick)
    if stop.asked:
        stop.end()
    return [result for trial in trials if (result := found[trial.name]) is not None]


def _works(missing: Sequence[Trial], folder: Path, keep_checkpoints: bool, stop: StopRequest) -> list[Work]:
    """What the children do, each with nothing left to decide."""
    decided = decide_autos([trial.config for trial in missing], folder, stop)
    return [
        Work(
            trial.name,
            partial(_run_one, trial, as_trial_runs(trial.config, decided), folder, keep_checkpoints),
            folder / f"{trial.name}.log",
        )
        for trial in missing
    ]


def read_result(folder: Path, trial: Trial) -> TrialResult | None:
    """The result of a trial that ``folder`` holds, done or diverged, if it is one of this config; None otherwise."""
    values = read_json(folder / trial.name / TRIAL_FILE)
    names = {field.name for field in dataclasses.fields(TrialResult)}
    if values.keys() != names or values["fingerprint"] != fingerprint(trial.config) or values["ending"] == "failed":
        return None
    numbers = {name: _from_json(values[name]) for name in _NUMBERS}
    domains = {name: _from_json(loss) for name, loss in values["domains"].items()}
    return TrialResult(**(values | numbers | {"domains": domains}))


def to_plain(result: TrialResult) -> dict[str, Any]:
    """A result as plain JSON values, null for what is no number."""
    values = dataclasses.asdict(result)
    return (
        values
        | {name: _to_json(values[name]) for name in _NUMBERS}
        | {"domains": {name: _to_json(loss) for name, loss in result.domains.items()}}
    )


def steps_done(folder: Path, name: str) -> int:
    """Updates that a running trial has applied, from its heartbeat; about a second old."""
    return int(read_json(folder / name / "heartbeat.json").get("step", 0))


def _check(trials: Sequence[Trial]) -> None:
    """Raises ConfigError with every mistake of every trial."""
    problems = []
    names = [trial.name for trial in trials]
    for trial in trials:
        if not _NAME.fullmatch(trial.name):
            problems.append(
                f"trial {trial.name!r}: a name is up to 150 letters, digits and _ - . = , + and begins with no dot"
            )
        if names.count(trial.name) > 1:
            problems.append(f"trial {trial.name!r}: two trials have this name")
        problems += [f"trial {trial.name}: {text}" for text in validate(trial.config, 1) or _too_short(trial.config)]
    if problems:
        raise ConfigError(problems)


def _too_short(config: RunConfig) -> Sequence[str]:
    """What is wrong with the end that tokens or FLOPs come to."""
    try:
        steps_of(config)
    except ConfigError as error:
        return error.problems
    return []


def _run_one(trial: Trial, config: RunConfig, folder: Path, keep_checkpoints: bool) -> TrialResult | None:
    """In the child: the run, its judgement, its file."""
    (folder / trial.name / TRIAL_FILE).unlink(missing_ok=True)
    try:
        measured = measure(config, folder / trial.name)
    except ResumeRefused as error:  # its data are not what they were
        print(f"{error}: starting anew")
        move_aside(folder / trial.name)
        measured = measure(config, folder / trial.name)
    if measured is None:
        return None
    result = _judged(trial, measured)
    write_result(folder, result)
    if not keep_checkpoints:  # last: until there is a result they are what a resume needs
        shutil.rmtree(folder / trial.name / "checkpoints", ignore_errors=True)
    return result


def write_result(folder: Path, result: TrialResult) -> None:
    """``<name>/trial.json``, whole or not there."""
    (folder / result.name).mkdir(exist_ok=True)
    write_atomic(folder / result.name / TRIAL_FILE, json.dumps(to_plain(result), indent=1, allow_nan=False) + "\n")


def _judged(trial: Trial, measured: Measured) -> TrialResult:
    """A run's figures with a verdict on them."""
    loss = math.fsum(measured.domains.values()) / len(measured.domains)
    start = measured.initial_loss
    reason = measured.halted
    if not reason and not (math.isfinite(loss) and math.isfinite(measured.train_loss)):
        reason = (
            "held-out loss not finite at the end" if not math.isfinite(loss) else "training loss not finite at the end"
        )
    if not reason and max(loss, measured.train_loss) > start:
        what, value = ("held-out", loss) if loss > start else ("training", measured.train_loss)
        reason = f"{what} loss {value:.3f} at the end, {start:.3f} at the start"
    return TrialResult(
        name=trial.name,
        fingerprint=fingerprint(trial.config),
        data_fingerprint=measured.data_fingerprint,
        ending="diverged" if reason else "done",
        reason=reason,
        loss=loss,
        domains=measured.domains,
        initial_loss=start,
        train_loss=measured.train_loss,
        steps=measured.steps,
        seconds=round(measured.seconds, 2),
        num_params=measured.num_params,
    )


def _failed(outcome: Outcome, folder: Path, trial: Trial) -> TrialResult:
    """What is left of a child without a result."""
    result = TrialResult(
        name=trial.name,
        fingerprint=fingerprint(trial.config),
        data_fingerprint="",
        ending="failed",
        reason=f"{outcome.error}; see {folder / trial.name}.log",
        loss=math.nan,
        domains={},
        initial_loss=math.nan,
        train_loss=math.nan,
        steps=steps_done(folder, trial.name),
        seconds=math.nan,
        num_params=0,
    )
    write_result(folder, result)
    return result


def _to_json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _from_json(value: float | None) -> float:
    return math.nan if value is None else float(value)
