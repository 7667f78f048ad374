"""``surefoot train``: train a recipe, or continue its run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import RUNS
from surefoot.cli.train_args import TrainArgs, parse_train_args
from surefoot.cli.train_help import help_for
from surefoot.config.fingerprint import fingerprint


def main(argv: Sequence[str]) -> int:
    """Run one ``surefoot train`` command."""
    if (text := help_for(argv)) is not None:
        print(text)
        return exit_codes.DONE
    args = parse_train_args(argv)
    folder = args.run or default_folder(args)
    if args.world:
        from surefoot.cli.plan_world import show_plan

        return show_plan(args.config, args.world, as_json=args.json)
    if args.dry_run:
        from surefoot.cli.dry_run import show_dry_run

        return show_dry_run(args.config, folder, as_json=args.json)
    from surefoot.cli.session import run_to_end, say_finished

    if args.fresh:
        move_aside_once(folder)
    if not args.allow_change and not args.fresh and say_finished(args.config, folder, as_json=args.json):
        return exit_codes.DONE
    return run_to_end(args.config, folder, as_json=args.json, allow_change=args.allow_change)


def default_folder(args: TrainArgs) -> Path:
    """runs/<recipe>-<six hex of the config fingerprint>."""
    return RUNS / f"{args.recipe}-{fingerprint(args.config)[:6]}"


def move_aside_once(folder: Path) -> None:
    """Move an old run aside, on the first rank only."""
    import os

    from surefoot.monitor.store import move_aside

    if os.environ.get("RANK", "0") == "0" and (aside := move_aside(folder)):
        print(f"the old run is kept as {aside}", file=sys.stderr)
