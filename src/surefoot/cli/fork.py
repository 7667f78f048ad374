"""``surefoot fork``: a new run from a checkpoint of another, with changed settings."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import run_folder
from surefoot.config.codec import from_toml, resolve
from surefoot.config.diff import ABSENT, diff
from surefoot.config.errors import ConfigError
from surefoot.config.fingerprint import fingerprint
from surefoot.config.optim import WSD, OptimConfig
from surefoot.config.run import BySteps, RunConfig
from surefoot.model.role_scaling import multipliers
from surefoot.optim.schedule import decay_begins, decay_steps

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
    ledger = parent.ledger
    ending = too_short(config, before, checkpoint.step, ledger.horizon, ledger.decay_steps)
    problems = [ending, another_function(config, before)]
    if found := [problem for problem in problems if problem is not None]:
        raise ConfigError(found)
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


def too_short(config: RunConfig, before: RunConfig, at: int, parent_end: int, parent_decay: float = 0.0) -> str | None:
    """What is wrong with the end of a fork that starts after ``at`` steps: over already, or a decay that it is too late to begin or to leave.

    ``parent_end``, ``parent_decay``: the last step and the updates of decay that the parent's clock decided, 0 where it did not.
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
    was = steps_of(before)
    was = parent_end or was if was == OPEN_END else was
    if steps == OPEN_END:
        return leaves_a_decay(config, before, at, was, parent_decay)
    if not isinstance(schedule, WSD) or decay_begins(schedule, steps) >= at:
        return None
    if was == steps and goes_on(config.optim, before.optim, steps, parent_decay):
        return None
    left, key = steps - at, "optim.schedule.decay_steps" if schedule.decay_steps else "optim.schedule.decay_fraction"
    length = f"{key}={schedule.decay_steps or schedule.decay_fraction}"
    return (
        f"{length}: the decay of a run of {steps} steps begins at step {decay_begins(schedule, steps):g}, before the fork does, at step {at}, so "
        f"that its rate would jump; --set optim.schedule.decay_steps={left} begins it there"
    )


def goes_on(optim: OptimConfig, before: OptimConfig, steps: int, parent_decay: float) -> bool:
    """Whether a decay that was under way goes on to the same end: the rates are the same but for the length of one step."""
    schedule, was = optim.schedule, before.schedule
    if not isinstance(schedule, WSD) or not isinstance(was, WSD):
        return False
    length = parent_decay or decay_steps(was, steps)
    alike = replace(schedule, decay_steps=was.decay_steps, decay_fraction=was.decay_fraction)
    return replace(optim, schedule=alike) == before and abs(decay_steps(schedule, steps) - length) < 1


def leaves_a_decay(config: RunConfig, before: RunConfig, at: int, parent_end: int, parent_decay: float) -> str | None:
    """What is wrong with a fork whose clock decides its decay, where the parent's, of ``parent_end`` steps, was under way after ``at``."""
    schedule, bound = before.optim.schedule, config.bound
    if not isinstance(schedule, WSD):
        return None
    length = parent_decay or decay_steps(schedule, parent_end)
    began = math.floor(parent_end - length)
    if began >= at:
        return None
    keys = ["bound.kind=steps", f"steps={parent_end}"]
    if parent_decay:
        keys.append(f"optim.schedule.decay_steps={round(length)}")
    sets = " ".join(f"--set {key}" for key in keys)
    ends = f", or let that decay go on: {sets}" if at < parent_end else ""
    return (
        f"bound.{bound.kind}={getattr(bound, bound.kind):g}: the parent's decay began at step {began}, before the fork does, at step {at}, and "
        f"the fork's begins when its clock says so: until then its rate would jump back to the peak; fork --at step {began} or before{ends}"
    )


def another_function(config: RunConfig, before: RunConfig) -> str | None:
    """What is wrong with a fork that multiplies by other numbers than its parent in the forward: the same weights are another function then.

    At another width no matrix is taken over, so there it is right.
    """
    if config.model.d_model != before.model.d_model:
        return None
    was, now = asdict(multipliers(before.model)), asdict(multipliers(config.model))
    changed = [f"{name} {was[name]:g} to {now[name]:g}" for name in was if was[name] != now[name]]
    if not changed:
        return None
    mine = [(key, old, new) for key, old, new in diff(before, config) if key.startswith("model.")]
    asked = ", ".join(f"{key}={new}" for key, _, new in mine if new != ABSENT)
    back = ", ".join(f"{key}={old}" for key, old, _ in mine if old != ABSENT)
    return (
        f"{asked}: the forward's multipliers would change ({', '.join(changed)}), and the parent's weights would be another function; "
        f"fork with the parent's {back}, or train anew"
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
