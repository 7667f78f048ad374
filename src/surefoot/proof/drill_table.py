"""The drill's score in words and tables: for the terminal, and as docs/drill.md, which is generated and not written by hand."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.proof.alarm_rates import alarms_section, read_segments
from surefoot.proof.drill import Base
from surefoot.proof.drill_cells import read_cells, share_code
from surefoot.proof.drill_score import NAMES, NEAR, SIGMAS, Line, Pair, Score, score
from surefoot.proof.exact_intervals import share_interval
from surefoot.proof.tables import markdown_table

HEADS = (
    "fault",
    "share",
    "harmful",
    "seen",
    "late",
    "cause",
    "action",
    "clean",
    "unguarded",
    "guarded",
    "control",
    "wasted",
)
"""Of the table. ``harmful``: runs of all. ``seen``, ``cause``: of the harmful ones, in brackets of all where none was. ``late``: batches, median."""
ACTIONS = {"clip_harder": "clip", "lr_event": "dip the rate", "rollback": "roll back"}
TRUTHS = ("data", "optimiser", "numerics", "hardware")


def rows(found: Score) -> list[tuple[str, ...]]:
    """The table's cells as text, a row per fault and dilution."""
    return [_row(line) for line in found.lines]


def _row(line: Line) -> tuple[str, ...]:
    harmful = len(line.harmful)
    seen = f"{line.detected}/{harmful}" if harmful else f"({line.seen_at_all}/{len(line.pairs)})"
    actions = ", ".join(ACTIONS.get(name, name) for name, _ in line.actions.most_common(3)) or "none"
    return (
        line.fault.title,
        f"{line.share * 100:g} %" if line.fault.dilutable else "",
        f"{harmful}/{len(line.pairs)}",
        seen,
        _whole(line.delay),
        f"{line.right}/{line.detected}" if line.detected else "",
        actions,
        _loss(line.clean),
        _loss(line.unguarded),
        _loss(line.guarded),
        _loss(line.target) if line.fault.curable else "",
        _whole(line.wasted),
    )


def headline(found: Score) -> list[str]:
    """The score in sentences, each with what was aimed at."""
    harmful, detected = len(found.harmful), len(found.detected)
    ended = [line for line in found.curable if line.cured]
    return [
        f"{_of(detected, harmful)} of the harmful faults were detected (aim 95 %).",
        f"{_of(found.right, detected)} of their causes were named rightly, 'unknown' counting as wrong (aim 90 %).",
        f"Fast ones were seen after {_whole(found.fast_delay)} batches in the median (aim 2 at most).",
        f"{len(ended)} of {len(found.curable)} curable kinds end, in the mean over seeds, within {100 * NEAR:g} % of clean or of a control "
        "that skips as many healthy batches.",
        f"{found.false_alarms} warnings or alarms came in {found.healthy_steps:,} healthy steps of these runs.",
        f"{found.clean_same} of {found.clean_pairs} healthy runs are the same with and without the guard, to the printed digit.",
    ]


def markdown(folder: Path, base: Base = "B") -> str:
    """docs/drill.md, from the result files in ``folder``."""
    cells = [cell for cell in read_cells(folder) if cell["base"] == base]
    found, facts = score(cells, base), _facts(cells)
    parts = [
        "# The drill",
        f"Written by `surefoot drill` from the {facts['cells']} result files in `docs/proof/drill`; not by hand. "
        f"Commits {facts['commits']}, torch {facts['torch']}, {facts['seconds'] / 60:.0f} core-minutes.",
        "\n".join(f"- {sentence}" for sentence in headline(found)),
        method(found),
        "## By fault",
        markdown_table(HEADS, rows(found)),
        reading(),
        "## Causes: what it was, and what the guard called it",
        "Harmful faults:",
        markdown_table(("truth", *NAMES), confusion_rows(found, found.harmful)),
        "All, harmful or not:",
        markdown_table(("truth", *NAMES), confusion_rows(found, (pair for line in found.lines for pair in line.pairs))),
        "## Missed or misnamed",
        "\n".join(f"- {sentence}" for sentence in misses(found)) or "None.",
        alarms_section(read_segments(folder / "healthy")),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def confusion_rows(found: Score, pairs: Iterable[Pair]) -> list[tuple[str, ...]]:
    """Rows by true cause, columns by the one that was named."""
    table = found.confusion(pairs)
    return [(truth, *(str(table[truth][name] or "") for name in NAMES)) for truth in TRUTHS if truth in table]


def misses(found: Score) -> list[str]:
    """Harmful faults that were not seen, or whose cause was named wrongly, one by one."""
    return [
        f"{pair.fault.name} ({share_code(pair.share)}, seed {pair.seed}): "
        + ("not seen" if not pair.detected else f"called {pair.named}, is {pair.fault.cause}")
        for pair in found.harmful
        if pair.named != pair.fault.cause
    ]


def method(found: Score) -> str:
    """How the score was taken."""
    return (
        "Each fault is put into a small real run from outside, at a moment and in a strength drawn from the seed, once with the guard only "
        "watching and once with it acting; the guard knows nothing of it. Harmful is decided from the unguarded run alone: not finite, or "
        f"a held-out loss above the clean run of the same seed by {SIGMAS:g} standard deviations, which are {100 * found.noise:.2f} % "
        f"(the end of {found.noise_runs} healthy runs that skip 1 to 8 batches, against the same run without). Thresholds were calibrated on another "
        "model and other seeds."
    )


def reading() -> str:
    """What the table's columns hold."""
    return (
        "`share` of a batch's tokens. `seen` and `cause` are of the harmful runs; in brackets, of all, where none was harmful. `late` is in "
        "batches, the median. Losses are means over seeds, nats per byte, held-out text of both domains. `control` is the worse of clean and "
        "of a healthy run that skips the batches which the guarded one skipped. `wasted` are batches consumed without a surviving update."
    )


def _facts(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "cells": len(cells),
        "commits": ", ".join(sorted({str(cell["commit"])[:10] for cell in cells})),
        "torch": ", ".join(sorted({str(cell["torch"]) for cell in cells})),
        "seconds": sum(cell["seconds"] for cell in cells),
    }


def _of(hits: int, trials: int) -> str:
    if not trials:
        return "None of 0"
    low, high = share_interval(hits, trials)
    return f"{100 * hits / trials:.1f} % ({hits} of {trials}; 95 % interval {100 * low:.1f} to {100 * high:.1f} %)"


def _loss(value: float) -> str:
    return "" if math.isnan(value) else "not finite" if math.isinf(value) else f"{value:.3f}"


def _whole(value: float) -> str:
    return "" if math.isnan(value) else f"{value:g}" if value == round(value) else f"{value:.1f}"
