"""The parity table, for a terminal, as JSON and as docs/parity.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.proof.parity_bounds import BOUNDS, FLOOR, PRECISIONS, WHOLE_GRADIENT, Kind
from surefoot.proof.parity_layouts import ADAM_EPS, CELLS, Z_LOSS
from surefoot.proof.parity_results import Row, passed, read_rows
from surefoot.proof.tables import markdown_table, text_table
from surefoot.recipes import shrink as small

_WIDTH = 70
KINDS: tuple[Kind, ...] = ("loss", "figure", "gradient", "moment", "weight")
"""Of comparisons that have a bound."""


def text_page(rows: Sequence[Row], precisions: Sequence[str]) -> str:
    """The matrix with the largest deviations, and what shows the one that is nearest to its bound, or furthest beyond it."""
    body = [
        (row["cell"], *(_short(row["results"][name]) for name in precisions), _shown_by(row, precisions))
        for row in rows
    ]
    table = text_table(("layout", *precisions, "shown by"), body)
    return f"{table}\n\n{sentence(rows, precisions)}"


def sentence(rows: Sequence[Row], precisions: Sequence[str]) -> str:
    """The verdict."""
    results = [row["results"][name] for row in rows for name in precisions]
    failed, left = sum(not passed(result) for result in results), sum(bool(result["left_out"]) for result in results)
    run = len(results) - left
    verdict = "all pass" if not failed else f"{failed} FAIL"
    beside = f"; {left} left out by rules of the recipe or for want of a compiler" if left else ""
    return f"{run} runs of {len(rows)} layouts in {', '.join(precisions)}: {verdict}{beside}"


def facts(rows: Sequence[Row], precisions: Sequence[str]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "passed": all(passed(row["results"][name]) for row in rows for name in precisions),
        "bounds": {name: {kind: BOUNDS[name].of(kind) for kind in KINDS} for name in precisions},
        "rows": [dict(row) for row in rows],
    }  # fmt: skip


def markdown_page(folder: Path) -> str:
    """docs/parity.md from the result files in a folder."""
    rows = read_rows(folder)
    precisions = [name for name in PRECISIONS if all(name in row["results"] for row in rows)]
    missing = [cell.title for cell in CELLS if cell.title not in {row["cell"] for row in rows}]
    body = [(row["cell"], str(row["ranks"]), *(_long(row["results"][name]) for name in precisions)) for row in rows]
    first = rows[0]
    parts = [
        "# Layouts held against one process",
        f"Made by `make proof` from the files under `docs/proof/parity`, each with its command, commit and seed; not to be edited. "
        f"`surefoot parity {first['recipe']}` does the same on your machine; `docs/guides/parity.md` says what it means.",
        sentence(rows, precisions) + ".",
        "Each entry is the deviation nearest to its bound, ||a - b|| / ||b||, of all that was compared, and what shows it.",
        markdown_table(("layout", "ranks", *precisions), body),
        _bounds_text(precisions),
        f"The recipe is `{first['recipe']}` made small: {small.NUM_LAYERS} layers of width {small.D_MODEL}, {small.NUM_HEADS} heads, "
        f"{small.VOCAB_SIZE} ids, batches of {small.BATCH_SIZE} rows of {small.SEQ_LEN} tokens, three steps. Adam's epsilon is {ADAM_EPS:g} in all "
        f"columns; z-loss, where it is on, weighs {Z_LOSS:g}.",
    ]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def _bounds_text(precisions: Sequence[str]) -> str:
    table = markdown_table(
        ("bounds", *KINDS), [(name, *(f"{BOUNDS[name].of(kind):g}" for kind in KINDS)) for name in precisions]
    )
    return (
        f"{table}\n\nSample ids, rows, words and state digests are equal or not. A tensor's norm counts as no less than {FLOOR:g} of the root mean "
        "square over all tensors of its kind. Layouts without tensor and context ranks or a compiler have a bf16 bound of "
        f"{WHOLE_GRADIENT['bf16']:g} on gradients. Where the bounds come from stands in `src/surefoot/proof/parity_bounds.py`."
    )


def _short(result: Mapping[str, Any]) -> str:
    if result["left_out"]:
        return "-"
    if result["error"]:
        return "FAILED"
    value = "inf" if result["deviation"] is None else f"{result['deviation']:.1e}"
    return value if passed(result) else f"{value} FAIL"


def _long(result: Mapping[str, Any]) -> str:
    if result["left_out"]:
        return f"left out: {_escaped(result['left_out'])}"
    if result["error"]:
        return f"**failed**: {_escaped(result['error'])}"
    return f"{_short(result)}<br>{_escaped(result['worst'])}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _shown_by(row: Row, precisions: Sequence[str]) -> str:
    """Of all precisions the result nearest to its bound."""
    results = {name: row["results"][name] for name in precisions}
    for name, result in results.items():
        if text := result["left_out"] or result["error"]:
            return f"{name}: {text}".splitlines()[0][:_WIDTH]
    name = max(results, key=lambda name: _share(results[name]))
    return f"{results[name]['worst']} ({name})"[:_WIDTH]


def _share(result: Mapping[str, Any]) -> float:
    if result["deviation"] is None:
        return float("inf")
    return float(result["deviation"]) / result["bound"] if result["bound"] else 0.0
