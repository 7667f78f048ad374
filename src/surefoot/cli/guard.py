"""``surefoot guard``: what the guard makes of a training log, ours or anyone's."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import run_folder
from surefoot.config.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.config.guard import GuardConfig
    from surefoot.guard.replay import Replay, ReplayedFinding


def main(argv: Sequence[str]) -> int:
    """Run one ``surefoot guard`` command."""
    parser = argparse.ArgumentParser(
        prog="surefoot guard", description="Judges training logs by the guard's rules.", allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    words = "what the guard would have seen and done"
    one = actions.add_parser("replay", help=words, description=f"Reads a log and says {words}.", allow_abbrev=False)
    one.add_argument(
        "file",
        type=run_folder,
        metavar="FILE",
        help="csv with a header or jsonl (step, loss, and grad_norm if there is one; also .gz), a TensorBoard event file or folder, "
        "a wandb offline file or folder, or a Surefoot run",
    )
    one.add_argument("--json", action="store_true", help="JSON on standard output")
    one.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the guard, as guard.thresholds.loss_sigmas=10 or guard.policy=strict; repeat it",
    )
    args = parser.parse_args(argv)
    return show_replay(args.file, guard_config(args.set), as_json=args.json)


def guard_config(settings: Sequence[str]) -> "GuardConfig":
    """The guard's settings, changed as told. Raises ConfigError with every mistake."""
    from surefoot.config.codec import resolve
    from surefoot.recipes.index import RECIPES

    problems = [
        f"--set {text}: {rule}"
        for text in settings
        for rule in (
            ["settings are given as KEY=VALUE"] * ("=" not in text)
            or ["only settings of the guard matter here, as guard.policy=strict"] * (not text.startswith("guard."))
        )
    ]
    if problems:
        raise ConfigError(problems)
    return resolve(RECIPES["tiny"](), (), [f"--{text}" for text in settings]).guard


def show_replay(file: Path, config: "GuardConfig", *, as_json: bool) -> int:
    """A line per finding and a summary, or JSON."""
    from surefoot.guard.replay import replay, summary
    from surefoot.interop.logs import read_log

    result = replay(read_log(file), config)
    if as_json:
        print(json.dumps({"findings": [item.to_dict() for item in result.findings]}, indent=2, allow_nan=False))
        return exit_codes.DONE
    _print_findings(result)
    print(summary(result))
    if result.halted:
        print(result.halted)
    return exit_codes.DONE


def _print_findings(result: "Replay") -> None:
    rows = [(f"{item.step:,}", item.finding.kind, _done(item), item.finding.text) for item in result.findings]
    if not rows:
        return
    wide = [max(len(row[place]) for row in (("step", "kind", "action"), *rows)) for place in range(3)]
    for row in (("step", "kind", "action", "what was seen"), *rows):
        print(f"{row[0]:>{wide[0]}}  {row[1]:{wide[1]}}  {row[2]:{wide[2]}}  {row[3]}")


def _done(item: "ReplayedFinding") -> str:
    from surefoot.guard.guard import action_name

    then = f", then {action_name(item.then)}" if item.then is not None else ""
    return action_name(item.action) + then
