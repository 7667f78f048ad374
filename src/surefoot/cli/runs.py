"""``surefoot runs``: what runs there are, how one went, and where two differ."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli import exit_codes
from surefoot.cli.run_folder import run_folder

if TYPE_CHECKING:  # help must answer at once, and reading runs takes numpy
    from surefoot.monitor.run import Run
    from surefoot.monitor.summary import Summary

LAST = 10
"""Losses that ``show --json`` lists."""


def main(argv: Sequence[str]) -> int:
    """Run one ``surefoot runs`` command."""
    parser = argparse.ArgumentParser(
        prog="surefoot runs", description="Lists, shows and compares runs.", allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    every = actions.add_parser("list", help="all runs in a folder", allow_abbrev=False)
    every.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="default: runs")
    one = actions.add_parser("show", help="how a run went or stands", allow_abbrev=False)
    one.add_argument("run", type=run_folder, metavar="RUN")
    two = actions.add_parser("diff", help="configs and rows of two runs", allow_abbrev=False)
    two.add_argument("a", type=run_folder, metavar="A")
    two.add_argument("b", type=run_folder, metavar="B")
    for action in (every, one, two):
        action.add_argument("--json", action="store_true", help="JSON on standard output")
    args = parser.parse_args(argv)
    from surefoot.monitor.run import Run

    if args.action == "list":
        return show_list(args.folder, as_json=args.json)
    if args.action == "show":
        return show_run(Run(args.run), as_json=args.json)
    return show_diff(Run(args.a), Run(args.b), as_json=args.json)


def show_list(folder: Path, *, as_json: bool) -> int:
    """A line per run."""
    from surefoot.monitor.run import list_runs
    from surefoot.monitor.summary import summarise

    found = [summarise(run) for run in list_runs(folder)]
    if as_json:
        print(json.dumps([summary.to_dict() for summary in found], indent=2))
    elif not found:
        print(f"no runs in {folder}; `surefoot train tiny` makes one")
    else:
        wide = max(len(summary.name) for summary in found)
        for summary in found:
            print(f"{summary.name:{wide}}  {summary.state:8}  {_progress(summary)}  {_losses(summary)}".rstrip())
    return exit_codes.DONE


def show_run(run: "Run", *, as_json: bool) -> int:
    """The summary of one run; as JSON with its last losses."""
    from surefoot.monitor.console import print_summary
    from surefoot.monitor.summary import summarise

    summary = summarise(run)
    report = run.folder / "report.html"
    shown = str(report) if report.exists() else ""
    if not as_json:
        print_summary(summary, report=shown)
        return exit_codes.DONE
    rows = [row for row in run.rows if "train/loss" in row][-LAST:]
    bits = {domain.name: domain.bits_per_byte for domain in summary.domains}
    facts = summary.to_dict() | {
        "last_losses": [{"batch_index": row["batch_index"], "loss": row["train/loss"]} for row in rows],
        "bits_per_byte": bits,
        "report": shown,
    }
    print(json.dumps(facts, indent=2))
    return exit_codes.DONE


def show_diff(a: "Run", b: "Run", *, as_json: bool) -> int:
    """What the configs differ in, and the first row that does."""
    from surefoot.monitor.compare import compare

    found = compare(a, b)
    first = found.first_difference
    if as_json:
        difference = (
            None
            if first is None
            else {"batch_index": first.batch_index, "name": first.name, "a": first.left, "b": first.right}
        )
        config = [{"key": key, "a": left, "b": right} for key, left, right in found.config]
        print(
            json.dumps(
                {"same": found.same, "config": config, "first_difference": difference, "rows": found.rows}, indent=2
            )
        )
        return exit_codes.DONE
    for key, left, right in found.config:
        print(f"{key}: {left} -> {right}")
    if not found.config:
        print("the same config")
    if first is not None:
        print(f"rows differ first at batch {first.batch_index}: {first.name} is {first.left} and {first.right}")
    else:
        print(f"the same {found.common_rows:,} rows in common ({found.rows[0]:,} and {found.rows[1]:,} in all)")
    return exit_codes.DONE


def _progress(summary: "Summary") -> str:
    return f"step {summary.step:,}/{summary.steps:,}" if summary.steps else f"step {summary.step:,}"


def _losses(summary: "Summary") -> str:
    return ", ".join(f"{domain.name} {domain.bits_per_byte:.3f} bits/byte" for domain in summary.domains)
