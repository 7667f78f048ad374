"""``surefoot sweep``: many settings of a recipe as small runs, several at once, and which is best."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli import exit_codes
from surefoot.cli.config import read_config
from surefoot.config.errors import ConfigError
from surefoot.scale.sweep_axes import Combination, combine, common_fingerprint, common_flags, read_axes, settings_of

if TYPE_CHECKING:  # help and mistakes must answer at once, and trials take torch
    from surefoot.scale.sweep_score import Score

SWEEPS = Path("runs/sweeps")


def main(argv: Sequence[str]) -> int:
    """Runs ``surefoot sweep``."""
    args, flags = _parser().parse_known_args(argv)
    combinations = read_combinations(args, flags)
    if "RANK" in os.environ:
        raise ConfigError(["surefoot sweep starts its own processes, --jobs at once; run it without torchrun"])
    base, common = read_config(args.recipe), common_flags(args.config, flags)
    folder = args.out or SWEEPS / f"{base.recipe}-{common_fingerprint(base, args.config, flags)[:6]}"
    from surefoot.cli.session import BuildProgress
    from surefoot.cli.sweep_live import open_watch
    from surefoot.scale.sweep import PAGE_FILE, SWEEP_FILE, Sweep, run_sweep, to_facts

    command = shlex.join(["surefoot", "sweep", *argv])
    sweep = Sweep(recipe=args.recipe, combinations=combinations, folder=folder, command=command, common=common)
    with open_watch(combinations, folder) as watch:
        try:
            found = run_sweep(
                sweep,
                jobs=args.jobs,
                on_done=watch.done,
                on_tick=watch.tick,
                keep_checkpoints=args.keep_checkpoints,
                progress=BuildProgress(),
            )
        except (KeyboardInterrupt, SystemExit):
            print(f"{watch.summary(())}; the same command goes on", file=sys.stderr)
            raise
    if args.json:
        print(json.dumps(to_facts(sweep, found), indent=2, allow_nan=False))
    else:
        print(_text(found, args.recipe, common))
        print(
            f"\n{folder / PAGE_FILE} shows it, {folder / SWEEP_FILE} has it all; every run is a run folder beside them"
        )
    failed = sum(len(line.ended("failed")) for line in found.lines)
    if failed:
        print(
            f"{failed} of {len(combinations)} runs failed, see above; the same command tries them again",
            file=sys.stderr,
        )
    return exit_codes.INTERNAL if failed else exit_codes.DONE


def read_combinations(args: argparse.Namespace, flags: Sequence[str]) -> list[Combination]:
    """Every run of the sweep. Raises ConfigError with every mistake in all of them, before anything starts."""
    problems = [
        f"--{name} {value}: at least {least}"
        for name, value, least in (("seeds", args.seeds, 1), ("jobs", args.jobs, 1), ("random", args.random, 0))
        if value < least
    ]
    if problems:
        raise ConfigError(problems)
    axes = read_axes(args.vary, drawn=args.random > 0)
    settings = settings_of(axes, args.random, args.draw_seed)
    return combine(read_config(args.recipe), args.config, flags, axes, settings, args.seeds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot sweep",
        usage="surefoot sweep RECIPE --vary KEY=A,B,C [--vary ...] [--seeds N] [--jobs N] [--random N] [--out FOLDER] [--key value ...]",
        description="Trains a recipe with every combination of the values given, or with random draws of them, as small runs beside each "
        "other; says loss against each setting, with its spread over seeds, and the best as flags to paste. What has finished is kept: the "
        "same command goes on, and a longer list of values runs only what is new. Diverged runs stay in the table with their reason.",
        epilog="Any other --key value is a setting of all runs, as for `surefoot train`. Example: surefoot sweep tiny --vary "
        "optim.lr=log:3e-4..3e-2:5 --vary model.attention.qk_norm=true,false --seeds 3 --jobs 2 --steps 300",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a recipe, a run folder, or a TOML file that is a whole config"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="a setting and its values, A,B,C or log:LOW..HIGH:POINTS (also linear: and int:); with --random without :POINTS. Repeat it",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="runs of each setting, seeds counted from the recipe's (default: 1)",
    )
    parser.add_argument(
        "--random",
        type=int,
        default=0,
        metavar="N",
        help="draw N settings instead of the whole grid; more later keep these",
    )
    parser.add_argument("--draw-seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at once, one CPU thread each (default: 1)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="TOML file laid over the recipe; repeat it",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: runs/sweeps/<recipe>-<six hex of what all runs have>"
    )
    parser.add_argument(
        "--keep-checkpoints", action="store_true", help="keep the last checkpoint of every run, to sample or fork from"
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    return parser


def _text(found: "Score", recipe: str, common: str) -> str:
    from surefoot.proof.tables import text_table
    from surefoot.scale.sweep_page import best_command
    from surefoot.scale.sweep_table import LEAF_HEADS, SHOWN_LINES, SHOWN_VALUES, leaf_rows, setting_heads, setting_rows

    parts = [text_table(setting_heads(found), setting_rows(found, SHOWN_LINES))]
    if len(found.lines) > SHOWN_LINES:
        parts[-1] += f"\n... and {len(found.lines) - SHOWN_LINES} more"
    for key in found.keys:
        values = found.leaf(key)
        if len(found.keys) > 1 and len(values) <= SHOWN_VALUES:
            parts.append(f"{key}\n{text_table(LEAF_HEADS, leaf_rows(values, found.best))}")
    best = found.best
    if best is not None:
        parts.append(f"best: {best_command(best, recipe, common)}")
    parts[-1] += "".join(f"\nnote: {text}" for text in found.remarks())
    return "\n\n".join(parts)
