"""Results of parity on disk, one file per row of the table, and the rows that have none yet."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from surefoot.proof.parity import Parity, Verdict
from surefoot.proof.parity_layouts import CELLS, Cell
from surefoot.train.opening import commit_of

Row = Mapping[str, Any]
Say = Callable[[str], None]
_SHOWN = 5


def chosen(pattern: str, *, quick: bool) -> tuple[Cell, ...]:
    """The rows whose title holds the pattern, or matches it where it has a ``*``; all of them where it is empty."""
    wild = pattern if "*" in pattern else f"*{pattern}*"
    return tuple(cell for cell in CELLS if fnmatch(cell.title, wild) and (cell.quick or not quick))


def run_rows(
    parity: Parity, cells: Iterable[Cell], precisions: Sequence[str], command: str, say: Say, out: Path | None = None
) -> list[Row]:
    """Every row, from ``out`` where it has one that was run with the same settings; what is run is written there."""
    rows = []
    for cell in cells:
        path = out / f"{file_name(cell.title)}.json" if out else None
        row = read_row(path, parity.fingerprint, precisions) if path else None
        if row is None:
            row = run_row(parity, cell, precisions, command, say)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                part.write_text(json.dumps(row, indent=1) + "\n")
                part.replace(path)
        rows.append(row)
    return rows


def run_row(parity: Parity, cell: Cell, precisions: Sequence[str], command: str, say: Say) -> Row:
    """One row in every precision; a line of progress for each."""
    results: dict[str, Any] = {}
    for precision in precisions:
        verdict = parity.judge(cell, precision)
        say(f"{cell.title}, {precision}: {told(verdict)}")
        results[precision] = _plain(verdict)
    return {
        "cell": cell.title,
        "ranks": cell.ranks,
        "recipe": parity.config.recipe,
        "fingerprint": parity.fingerprint,
        "seed": parity.config.seed,
        "command": command,
        "commit": commit_of(),
        "results": results,
    }


def told(verdict: Verdict) -> str:
    """A verdict in one line, or a few where something is beyond its bound."""
    if verdict.left_out:
        return f"left out: {verdict.left_out}"
    if verdict.error:
        return f"FAILED: {verdict.error}"
    if verdict.passed:
        return f"{verdict.deviation:.1e} {verdict.worst} ({verdict.compared} comparisons, {verdict.seconds:.1f} s)"
    rest = len(verdict.beyond) - _SHOWN
    more = f"\n  and {rest} more" if rest > 0 else ""
    return "FAILED, beyond its bound:\n  " + "\n  ".join(verdict.beyond[:_SHOWN]) + more


def read_row(path: Path, fingerprint: str, precisions: Sequence[str]) -> Row | None:
    """A row that passed, or was left out, with these settings in all these precisions; None where it must be run."""
    if not path.exists():
        return None
    row: Row = json.loads(path.read_text())
    good = all(precision in row["results"] and passed(row["results"][precision]) for precision in precisions)
    return row if row["fingerprint"] == fingerprint and good else None


def read_rows(folder: Path) -> list[Row]:
    """Every row in a folder, in the order of the table."""
    rows = {row["cell"]: row for path in folder.glob("*.json") for row in [json.loads(path.read_text())]}
    return [rows[cell.title] for cell in CELLS if cell.title in rows]


def passed(result: Mapping[str, Any]) -> bool:
    """Nothing is beyond its bound, or it was left out."""
    return not result["beyond"] and not result["error"]


def file_name(title: str) -> str:
    """A title as the name of a file."""
    kept = "".join(letter if letter.isalnum() else "-" for letter in title)
    return "-".join(word for word in kept.split("-") if word)


def _plain(verdict: Verdict) -> dict[str, Any]:
    """As JSON has it: what is infinite is null."""
    fields = dataclasses.asdict(verdict)
    return {key: value for key, value in fields.items() if key not in ("cell", "precision")} | {
        "deviation": _finite(verdict.deviation),
        "beyond": list(verdict.beyond),
        "largest": {kind: [_finite(value), what] for kind, (value, what) in verdict.largest.items()},
        "seconds": round(verdict.seconds, 1),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
