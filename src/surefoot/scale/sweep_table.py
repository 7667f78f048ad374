"""A sweep's results as tables: all settings, and loss against each of them."""

import math
from collections.abc import Sequence

from surefoot.scale.sweep_axes import short_names, value_text
from surefoot.scale.sweep_score import LeafValue, Line, Score, Spread

SHOWN_VALUES = 15
"""A setting with more values than this, drawn from a range, is shown as a picture only."""
SHOWN_LINES = 20
"""Settings listed on a terminal, best first."""
LEAF_HEADS = ("value", "best mean loss", "min..max", "std", "mean of all", "runs", "diverged")


def setting_heads(score: Score) -> list[str]:
    """Of the table of all settings."""
    return [*short_names(score.keys), "mean loss", "min..max", "std", "seeds", "ended"]


def setting_rows(score: Score, at_most: int = 10**9) -> list[list[str]]:
    """All settings, best first; those that diverged or failed say why."""
    return [
        [
            *(value_text(value) for value in line.values.values()),
            *spread_cells(line.spread),
            f"{len(line.runs)}",
            ended(line),
        ]
        for line in score.ranked[:at_most]
    ]


def leaf_rows(values: Sequence[LeafValue], best: Line | None) -> list[list[str]]:
    """Loss against one setting: of the best setting with each value, and over all."""
    rows = []
    for value in values:
        spread = value.best.spread if value.best else Spread.of([])
        star = " *" if best is not None and value.best is best else ""
        rows.append(
            [value.text + star, *spread_cells(spread), number(value.mean), f"{value.count}", f"{value.diverged or '-'}"]
        )
    return rows


def spread_cells(spread: Spread) -> list[str]:
    """Mean, range, standard deviation."""
    between = f"{spread.low:.4f}..{spread.high:.4f}" if spread.count > 1 else "-"
    return [number(spread.mean), between, number(spread.std)]


def ended(line: Line) -> str:
    """How the seeds of a setting ended, and the first reason where they did not all end well."""
    parts = []
    if waiting := sum(result is None for _, result in line.runs):
        parts.append(f"{waiting} to do")
    for how in ("diverged", "failed"):
        if found := line.ended(how):
            parts.append(f"{len(found)} {how}: {found[0].reason}")
    return ", ".join(parts) or "done"


def number(value: float) -> str:
    """Four digits, or a dash."""
    return f"{value:.4f}" if math.isfinite(value) else "-"
