"""``surefoot transfer``: whether the best learning rate of a small model is the best one of a larger, measured."""

import argparse
import dataclasses
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surefoot.cli import exit_codes
from surefoot.cli.config import read_config
from surefoot.config.codec import resolve
from surefoot.config.errors import ConfigError
from surefoot.config.fingerprint import fingerprint
from surefoot.scale.transfer_cells import Cell, Family, verdicts

if TYPE_CHECKING:  # help and mistakes must answer at once, and trials take torch
    from surefoot.scale.transfer import Plan
    from surefoot.scale.trials import TrialResult

FOLDER = Path("runs/transfer")
PAGE, FACTS = "transfer.html", "transfer.json"
Value = TypeVar("Value", int, float)


def main(argv: Sequence[str]) -> int:
    """Runs ``surefoot transfer``."""
    args, flags = _parser().parse_known_args(argv)
    problems: list[str] = []
    widths = _numbers("widths", args.widths, int, problems)
    depths = _numbers("depths", args.depths, int, problems)
    lrs = _numbers("lrs", args.lrs, float, problems)
    problems += [f"--{name} {value}: at least {least}" for name, value, least in _least(args) if value < least]
    if problems:
        raise ConfigError(problems)
    if "RANK" in os.environ:
        raise ConfigError(["surefoot transfer starts its own processes, --jobs at once; run it without torchrun"])
    base = resolve(read_config(args.recipe), args.config, flags)
    folder = args.out or FOLDER / f"{base.recipe}-{fingerprint(base)[:6]}"
    command = shlex.join(["surefoot", "transfer", *argv])
    from surefoot.scale.transfer import Plan, around, check_plan

    plan = Plan(
        base=base,
        widths=widths,
        depths=depths,
        lrs=lrs or around(base.optim.lr, 2),
        seeds=tuple(range(base.seed, base.seed + args.seeds)),
        width_kind=args.parametrization or "mup",
        depth_kind=args.parametrization or "completep",
        control=not args.no_control,
        extend=args.extend,
        command=command,
    )
    check_plan(plan)
    cells, failures = _sweep(plan, folder, args.jobs)
    print(json.dumps(to_facts(cells, command), indent=2, allow_nan=False) if args.json else _text(cells, folder))
    for failure in failures:
        print(failure, file=sys.stderr)
    return exit_codes.INTERNAL if failures else exit_codes.DONE


def _least(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    return [("seeds", args.seeds, 1), ("jobs", args.jobs, 1), ("extend", args.extend, 0)]


def _numbers(name: str, text: str, number: Callable[[str], Value], problems: list[str]) -> tuple[Value, ...]:
    """The values of a list of numbers above 0; what is not one is a problem."""
    found = []
    for word in text.split(",") if text else ():
        try:
            found.append(number(word))
        except ValueError:
            problems.append(f"--{name} {text}: {word!r} is not a number; give them as 1,2,3")
            continue
        if not 0 < found[-1] < math.inf:
            problems.append(f"--{name} {text}: {word} must be above 0")
    return tuple(found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot transfer",
        usage="surefoot transfer RECIPE [--widths N,N..] [--depths N,N..] [--lrs X,X..] [--seeds N] [--jobs N] [--out FOLDER] [--key value ...]",
        description="Sweeps the learning rate at several widths and depths of a recipe, under a parametrization and under standard as its control, "
        "and says whether the best rate stays where it is as the model grows: a parabola through the lowest runs, an interval over seeds, a "
        "verdict with its numbers. The recipe's own size is the base. What has finished is kept: the same command goes on.",
        epilog="Any other --key value is a setting of all runs, as for `surefoot train`. Example: surefoot transfer tiny --widths 192,384,768 "
        "--lrs 1e-3,2e-3,4e-3,8e-3 --seeds 3 --jobs 2 --steps 300",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a recipe, a run folder, or a TOML file that is a whole config"
    )
    parser.add_argument("--widths", default="", metavar="N,N..", help="values of model.d_model; heads keep their width")
    parser.add_argument("--depths", default="", metavar="N,N..", help="values of model.num_layers")
    parser.add_argument(
        "--lrs",
        default="",
        metavar="X,X..",
        help="the grid of rates (default: five around the recipe's, a factor of two apart)",
    )
    parser.add_argument(
        "--extend",
        type=int,
        default=3,
        metavar="N",
        help="rates that a size's grid may grow by, a factor of two at a time, where its edge is its best (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each rate (default: %(default)s)")
    parser.add_argument(
        "--parametrization",
        choices=("mup", "completep"),
        help="what is tested (default: mup over width, completep over depth)",
    )
    parser.add_argument(
        "--no-control", action="store_true", help="leave standard out; no verdict of transfer without it"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at once, one CPU thread each (default: %(default)s)"
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
        "--out", type=Path, metavar="FOLDER", help="default: runs/transfer/<recipe>-<six hex of its config>"
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    return parser


def _sweep(plan: "Plan", folder: Path, jobs: int) -> tuple[list[Cell], list[str]]:
    """Run what is missing, a line per run on standard error, page and facts rewritten after each; all cells, and what failed."""
    from surefoot.cli.session import BuildProgress
    from surefoot.scale.transfer import run_plan

    live = _Live(folder)
    cells: list[Cell] = []
    failures: list[str] = []

    def failed(result: "TrialResult") -> None:
        failures.append(f"{result.name}: {result.reason}")
        live.line(failures[-1])

    def kept(cell: Cell) -> None:
        cells.append(cell)
        live.line(f"{cell.name}: {cell.reason or f'{cell.loss:.4f}'} ({cell.seconds:.0f} s)")
        _write_down(cells, folder, plan.command)

    run_plan(
        plan, folder, known={}, jobs=jobs, on_cell=kept, on_failure=failed, on_tick=live.tick, progress=BuildProgress()
    )
    live.end()
    return cells, failures


class _Live:
    """Lines on standard error, and on a terminal what is running, about once a second."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown, self.begun = folder, 0, time.monotonic()

    def line(self, text: str) -> None:
        self.end()
        print(text, file=sys.stderr, flush=True)

    def tick(self, running: Sequence[str]) -> None:
        if not sys.stderr.isatty():
            return
        from surefoot.scale.trials import steps_done

        told = ", ".join(f"{name} step {steps_done(self.folder, name)}" for name in running)
        text = f"{time.monotonic() - self.begun:.0f} s  {told}"[:119]
        print(f"\r{text:<{self.shown}}", end="", file=sys.stderr, flush=True)
        self.shown = len(text)

    def end(self) -> None:
        if self.shown:
            print(f"\r{'':<{self.shown}}\r", end="", file=sys.stderr, flush=True)
        self.shown = 0


def _write_down(cells: Sequence[Cell], folder: Path, command: str) -> None:
    from surefoot.monitor.durable import write_atomic
    from surefoot.scale.transfer_page import page

    write_atomic(folder / PAGE, page(cells, title=f"Transfer: {folder.name}", command=command))
    write_atomic(folder / FACTS, json.dumps(to_facts(cells, command), indent=1, allow_nan=False) + "\n")


def _text(cells: Sequence[Cell], folder: Path) -> str:
    """The table and the verdicts."""
    from surefoot.proof.tables import text_table
    from surefoot.scale.transfer_page import HEADS, headline, rows, swept

    where = f"{folder / PAGE} shows the curves, {folder / FACTS} has it all; every run is a run folder beside them"
    return "\n\n".join([text_table(HEADS, rows(swept(cells))), "\n".join(headline(verdicts(cells))), where])


def to_facts(cells: Sequence[Cell], command: str) -> dict[str, Any]:
    """What ``--json`` prints and transfer.json holds."""
    from surefoot.scale.transfer_page import swept

    return {
        "command": command,
        "verdicts": [dataclasses.asdict(one) for one in verdicts(cells)],
        "sizes": [facts for family in swept(cells) for facts in _sizes(family)],
        "runs": [dataclasses.asdict(cell) for cell in cells],
    }


def _sizes(family: Family) -> list[Mapping[str, Any]]:
    return [
        {
            "parametrization": family.kind,
            "axis": family.axis,
            "size": row.size,
            "num_params": row.num_params,
            "lrs": row.curve.lrs,
            "mean_losses": row.curve.means,
            "optimum": dataclasses.asdict(row.optimum),
            "shift": dataclasses.asdict(row.shift),
            "diverged": row.diverged,
        }
        for row in family.rows
    ]
