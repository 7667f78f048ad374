"""transfer.md and transfer.html: the verdicts, the picture and the table; from the cells alone."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import surefoot.monitor.page as report_page
from surefoot.monitor.durable import write_atomic
from surefoot.scale.optimum import loss_at
from surefoot.scale.sweep_page import html_table
from surefoot.scale.transfer_cells import Cell, Family, Row, Verdict, families, read_cells, told_shift, verdicts
from surefoot.scale.transfer_picture import picture

HEADS = (
    "parametrization",
    "size",
    "parameters",
    "best rate",
    "95 % interval",
    "loss there",
    "moved, factor-of-two steps",
    "with the smallest size's rate",
    "runs",
    "diverged",
)
_CSS = """
.wide table { font-variant-numeric: tabular-nums; font-size: .8125rem; }
.wide th { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 2px solid var(--line); }
.wide td { padding-right: .7rem; } .wide td:first-child { width: auto; color: var(--text); }
.wide th, .wide td { overflow-wrap: normal; }
svg.transfer { width: 100%; max-width: 1200px; height: auto; display: block; }
"""


def swept(cells: Iterable[Cell]) -> list[Family]:
    """All families of a sweep: width, then depth."""
    held = list(cells)
    return [*families(held, "width"), *families(held, "depth")]


def rows(found: Sequence[Family]) -> list[tuple[str, ...]]:
    """One line per parametrization and size."""
    return [_line(family, row) for family in found for row in family.rows]


def _line(family: Family, row: Row) -> tuple[str, ...]:
    best, first = row.optimum, family.rows[0]
    bound = {"none": "", "low": "at most ", "high": "at least "}[best.edge]
    kept = loss_at(row.curve, first.optimum.lr)
    return (
        family.kind,
        f"{family.axis} {row.size}",
        f"{row.num_params:,}",
        f"{bound}{best.lr:.2g}",
        f"{best.low:.2g} to {best.high:.2g} ({best.width:.2f} steps)",
        f"{best.loss:.4f}",
        "" if row is first else told_shift(row.shift),
        "" if row is first else (f"{kept - best.loss:+.4f}" if math.isfinite(kept) else "outside the grid"),
        f"{row.num_runs}",
        f"{row.diverged}",
    )


def headline(found: Sequence[Verdict]) -> list[str]:
    """A sentence per verdict."""
    return [f"{one.kind} over {one.axis}: {one.word}. {one.reason[0].upper()}{one.reason[1:]}." for one in found]


def markdown(cells: Sequence[Cell], picture_name: str) -> str:
    """docs/transfer.md."""
    found = swept(cells)
    lines = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}", *(f"| {' | '.join(row)} |" for row in rows(found))]
    return "\n".join(
        [
            "# Learning rates that transfer",
            "",
            f"Written by `{cells[0].command}` from the {len(cells)} result files in `docs/proof/transfer`; not by hand. {_facts(cells)}",
            "",
            *(f"- {sentence}" for sentence in headline(verdicts(cells))),
            "",
            method(cells),
            "",
            f"![Loss against learning rate at every size, and the best rate by size]({picture_name})",
            "",
            *lines,
            "",
            READING,
            "",
        ]
    )


READING = (
    "`best rate` is the vertex of the parabola through the lowest mean loss and its two neighbours, over log2 of the rate; its interval is the "
    "middle 95 % of the optima of resampled seeds, a little too narrow with three seeds. `moved` is against the smallest size, with the interval of "
    "the difference. `with the smallest size's rate` is what this size loses, nats per token, when it is trained with the rate tuned at "
    "the smallest one (on the parabola of its neighbours). Losses are held-out, nats per token; a run that diverged counts with its initial loss. At the "
    "base sizes all parametrizations are the same model, and its runs are shared."
)


def method(cells: Sequence[Cell]) -> str:
    """What was run, in two sentences."""
    one = cells[0]
    tokens = {cell.num_tokens for cell in cells}
    seeds = {cell.seed for cell in cells}
    return (
        f"Every run trains on {max(tokens):,} tokens; {len(seeds)} seeds, each its own initial weights and order of data, the same at every rate. "
        f"Base: width {one.base_d_model}, {one.base_num_layers} layers, where every parametrization is `standard`; heads keep their width. "
        "`transfers` is said where no optimum moves by more than one factor-of-two step, each inside its grid and known to within a step, "
        "while the same protocol moves `standard` by two steps or more; anything in between is `inconclusive`."
    )


def _facts(cells: Sequence[Cell]) -> str:
    commits = ", ".join(sorted({cell.commit[:11] for cell in cells}))
    versions = ", ".join(sorted({cell.torch for cell in cells}))
    return (
        f"Commits {commits}, torch {versions}, {math.fsum(cell.seconds for cell in cells) / 60:.0f} minutes in steps."
    )


def page(cells: Sequence[Cell], *, title: str, command: str) -> str:
    """transfer.html: one file, opens offline."""
    found = swept(cells)
    told = "".join(f"<p>{escape(sentence)}</p>" for sentence in headline(verdicts(cells)))
    css = (Path(report_page.__file__).parent / "page.css").read_text() + _CSS
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head><body>"
    )
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<div class="verdict">{told or "<p>No size has enough runs yet.</p>"}</div>',
        picture(found) if found else "",
        html_table(HEADS, rows(found)),
        f"<p class='soft small'>{escape(READING.replace('`', ''))}</p>",
        f"<h2>Going on</h2><p>The same command runs what is missing, or more:</p><pre>{escape(command)}</pre>",
    ]
    return "\n".join([head, *body, "</body></html>\n"])


def write_docs(folder: Path, docs: Path) -> None:
    """``transfer.md`` and ``transfer.svg`` in ``docs``, of the cells in ``folder``."""
    cells = list(read_cells(folder).values())
    write_atomic(docs / "transfer.svg", picture(swept(cells)))
    write_atomic(docs / "transfer.md", markdown(cells, "transfer.svg"))
