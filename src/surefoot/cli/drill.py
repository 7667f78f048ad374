"""``surefoot drill``: puts faults into small real runs, with and without the guard, and keeps the score."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli import exit_codes
from surefoot.config.errors import ConfigError, unknown_choice

if TYPE_CHECKING:  # help must answer at once, and the drill takes torch
    from surefoot.proof.drill import Base
    from surefoot.proof.drill_score import Score

CACHE = Path("runs/.data")
HEALTHY_STEPS = 300_000


def main(argv: Sequence[str]) -> int:
    """Runs ``surefoot drill``."""
    args = _parser().parse_args(argv)
    return quick(args.out or Path("runs/drill-quick"), as_json=args.json) if args.quick else full(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="surefoot drill",
        description="Puts faults into small real runs, from outside, with and without the guard, and keeps the score: what was seen, how late, "
        "which cause was named, what was done, how the run ended. Finished runs are kept, and not run again.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quick", action="store_true", help="one bad document, three runs, about a minute; writes drill.html"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="results and drill.html (default: runs/drill, or runs/drill-quick)"
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.add_argument("--seeds", default="", metavar="N,N..", help="default: 0,1,2,3,4")
    parser.add_argument("--faults", default="", metavar="NAME,NAME..", help="default: all")
    parser.add_argument(
        "--undiluted", action="store_true", help="leave out faults of the data in 10, 1 and 0.1 %% of the tokens"
    )
    parser.add_argument(
        "--calibration",
        action="store_true",
        help="on the model that thresholds are calibrated on (default seeds 100 to 104)",
    )
    parser.add_argument(
        "--healthy-steps",
        type=int,
        default=HEALTHY_STEPS,
        metavar="N",
        help="healthy steps to count false alarms in (default: %(default)s; 0: none)",
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes of one thread each (default: 2)")
    parser.add_argument("--score-only", action="store_true", help="run nothing; score what FOLDER holds")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the whole score as Markdown, too")
    return parser


def quick(out: Path, *, as_json: bool) -> int:
    """One bad document."""
    from surefoot.proof.drill_quick import run_quick, to_json
    from surefoot.proof.drill_quick_page import quick_page, text_summary

    begun = time.monotonic()
    result = run_quick(out, _say)
    page = out / "drill.html"
    page.write_text(quick_page(result))
    if as_json:
        print(to_json(result))
    else:
        print(text_summary(result, min(120, shutil.get_terminal_size().columns)))
        print(f"\n{page} shows the curves ({time.monotonic() - begun:.0f} s)")
    return exit_codes.DONE


def full(args: argparse.Namespace) -> int:
    """The whole grid, its controls, and healthy runs; then the score of all that the folder holds."""
    from surefoot.proof.drill_cells import PREFIX, SEEDS, controls, grid, read_cells, run_grid
    from surefoot.proof.drill_page import write_page
    from surefoot.proof.drill_score import score
    from surefoot.proof.drill_table import markdown
    from surefoot.proof.false_alarms import run_segments
    from surefoot.proof.fault_catalogue import FAULTS

    out = args.out or Path("runs/drill")
    base: Base = "A" if args.calibration else "B"
    seeds = _seeds(args.seeds) or (tuple(range(100, 105)) if args.calibration else SEEDS)
    faults = _names(args.faults, list(FAULTS))
    problems: list[str] = []
    if not args.score_only:
        command = "surefoot drill " + " ".join(_shown(args))
        tasks = [task for task in grid(seeds, faults, base) if task.share == 1.0 or not args.undiluted]
        problems += run_grid(tasks, out, CACHE, command.strip(), workers=args.workers, say=_say)
        wanted = {task.name for task in tasks}
        done = [cell for cell in read_cells(out) if cell["name"] in wanted]
        problems += run_grid(controls(done), out, CACHE, command.strip(), workers=args.workers, say=_say)
        if args.healthy_steps:
            problems += run_segments(
                args.healthy_steps, out / "healthy", CACHE, command.strip(), workers=args.workers, say=_say
            )
    cells = read_cells(out)
    found = score(cells, base)
    if not found.lines:
        raise ConfigError(
            [
                f"--out {out}: holds no pair of an unguarded and a guarded run{f' named {PREFIX[base]}...' if PREFIX[base] else ''}"
            ]
        )
    write_page(out, out / "drill.html", base)
    if args.markdown:
        args.markdown.write_text(markdown(out, base))
    print(_json(found) if args.json else _text(found, out))
    for problem in problems:
        print(problem, file=sys.stderr)
    return exit_codes.INTERNAL if problems else exit_codes.DONE


def _text(found: "Score", out: Path) -> str:
    from surefoot.proof.alarm_rates import HEADS as ALARM_HEADS
    from surefoot.proof.alarm_rates import alarm_rows, read_segments
    from surefoot.proof.drill_table import HEADS, headline, rows
    from surefoot.proof.tables import text_table

    parts = [text_table(HEADS, rows(found)), "\n".join(headline(found))]
    if segments := read_segments(out / "healthy"):
        parts.append(text_table(ALARM_HEADS, alarm_rows(segments)))
    return "\n\n".join([*parts, f"{out / 'drill.html'} shows the curves"])


def _json(found: "Score") -> str:
    from surefoot.proof.drill_table import HEADS, rows

    facts = {
        "harmful": len(found.harmful),
        "detected": len(found.detected),
        "causes_right": found.right,
        "median_delay_of_fast_ones": found.fast_delay if found.detected else None,
        "curable_kinds": len(found.curable),
        "curable_kinds_cured": sum(line.cured for line in found.curable),
        "false_alarms": found.false_alarms,
        "healthy_steps": found.healthy_steps,
        "table": [dict(zip(HEADS, row, strict=True)) for row in rows(found)],
    }
    return json.dumps(facts, indent=2)


def _seeds(text: str) -> tuple[int, ...]:
    if bad := [word for word in text.split(",") if word and not word.isdigit()]:
        raise ConfigError([f"--seeds {text}: {bad[0]!r} is not a whole number; give them as 0,1,2"])
    return tuple(int(word) for word in text.split(",") if word)


def _names(text: str, known: list[str]) -> list[str]:
    words = [word for word in text.split(",") if word]
    if problems := [unknown_choice("fault", word, known) for word in words if word not in known]:
        raise ConfigError(problems)
    return words or known


def _shown(args: argparse.Namespace) -> list[str]:
    """The flags that decide what is run, as they would be typed."""
    flags = [f"--seeds {args.seeds}" * bool(args.seeds), f"--faults {args.faults}" * bool(args.faults)]
    flags += ["--undiluted" * args.undiluted, "--calibration" * args.calibration]
    return [flag for flag in flags if flag]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
