"""``surefoot fork``: a new run from a checkpoint of another, with changed settings."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import run_folder
from surefoot.config.codec import from_toml, resolve
from surefoot.config.diff import diff
from surefoot.config.errors import ConfigError
from surefoot.config.fingerprint import fingerprint
from surefoot.config.optim import WSD
from surefoot.config.run import BySteps, RunConfig
from surefoot.optim.schedule import decay_begins

if TYPE_CHECKING:  # help must answer at once, and reading runs takes numpy
    from surefoot.guard.ledger import Checkpoint
    from surefoot.monitor.run import Run


def main(argv: Sequence[str]) -> int:
    """Run one ``surefoot fork`` command; the same command continues the fork."""
    parser = argparse.ArgumentParser(
        prog="surefoot fork",
        description="Starts a new run from a checkpoint of another, with changed data, schedule, optimiser or model, and trains it.",
        allow_abbrev=False,
    )
    parser.add_argument("parent", metavar="RUN", type=run_folder, help="the run folder to start from")
    parser.add_argument("--at", metavar="STEP", type=int, required=True, help="step of the checkpoint")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="sets", help="a changed setting; repeat it"
    )
    parser.add_argument("--run", metavar="DIR", type=Path, help="folder of the fork (default: beside the parent)")
    parser.add_argument("--fresh", action="store_true", help="start the fork over: its old folder is moved aside")
    parser.add_argument("--json", action="store_true", help="facts as JSON on standard output")
    args = parser.parse_args(argv)
    from surefoot.monitor.run import Run

    parent = Run(args.parent)
    before = from_toml(RunConfig, args.parent / "config.toml")
    config = resolve(before, [], flags(args.sets))
    checkpoint = find_checkpoint(parent, args.at)
    if (problem := too_short(config, before, checkpoint.step, parent.ledger.horizon)) is not None:
        raise ConfigError([problem])
    folder = args.run or args.parent.with_name(f"{parent.name}-at-{checkpoint.step:06d}-{fingerprint(config)[:6]}")
    from surefoot.cli.session import run_to_end, say_finished
    from surefoot.cli.train import move_aside_once
    from surefoot.train.run import ForkOf

    if args.fresh:
        move_aside_once(folder)
    if not args.fresh and say_finished(config, folder, as_json=args.json):
        return exit_codes.DONE
    begun = (folder / "ledger.jsonl").exists() and bool(Run(folder).attempts)
    fork = None if begun else ForkOf(parent=parent, checkpoint=checkpoint, changes=diff(before, config))
    return run_to_end(config, folder, as_json=args.json, fork=fork)


def too_short(config: RunConfig, before: RunConfig, at: int, parent_end: int) -> str | None:
    """What is wrong with the end of a fork that starts after ``at`` steps: over already, or a decay that it is too late to begin.

    ``parent_end``: the last step that the parent's clock decided, 0 where it did not.
    """
    from surefoot.train.budget import OPEN_END, steps_of

    steps = steps_of(config)
    if steps <= at:
        asked = (
            f"steps={steps}"
            if isinstance(config.bound, BySteps)
            else f"bound.kind={config.bound.kind!r} is {steps} steps"
        )
        more = "steps=N" if isinstance(config.bound, BySteps) else f"bound.{config.bound.kind}=N"
        return f"{asked}: the fork starts at step {at}; give it more with --set {more}"
    schedule = config.optim.schedule
    if not isinstance(schedule, WSD) or steps == OPEN_END or decay_begins(schedule, steps) >= at:
        return None
    was = steps_of(before)
    was = parent_end or was if was == OPEN_END else was
    if before.optim == config.optim and was == steps:
        return None  # the decay that was under way goes on
    left, key = steps - at, "optim.schedule.decay_steps" if schedule.decay_steps else "optim.schedule.decay_fraction"
    length = f"{key}={schedule.decay_steps or schedule.decay_fraction}"
    return (
        f"{length}: the decay of a run of {steps} steps begins at step {decay_begins(schedule, steps):g}, before the fork does, at step {at}, so "
        f"that its rate would jump; --set optim.schedule.decay_steps={left} begins it there"
    )


def flags(sets: Sequence[str]) -> list[str]:
    """``key=value`` words as flags. Raises ConfigError for a word without ``=``."""
    wrong = [word for word in sets if "=" not in word]
    if wrong:
        raise ConfigError([f"--set {word}: give it as KEY=VALUE, such as --set optim.lr=1e-3" for word in wrong])
    return [f"--{word}" for word in sets]


def find_checkpoint(parent: "Run", step: int) -> "Checkpoint":
    """The surviving checkpoint at a step. Raises ConfigError with the steps there are."""
    there = [c for c in parent.ledger.surviving_checkpoints() if (parent.folder / "checkpoints" / c.name).is_dir()]
    for checkpoint in reversed(there):
        if checkpoint.step == step:
            return checkpoint
    steps = ", ".join(str(c.step) for c in there) or "none yet"
    raise ConfigError([f"--at {step}: {parent.folder} has no checkpoint at that step; there are: {steps}"])
