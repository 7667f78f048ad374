"""transfer.md, transfer.svg and transfer.html: the verdicts, the table, and loss against rate at every size; from the cells alone."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import surefoot.monitor.page as report_page
from surefoot.monitor.durable import write_atomic
from surefoot.scale.loss_charts import COLOURS, Axis, Dot, Series, loss_chart
from surefoot.scale.optimum import loss_at
from surefoot.scale.sweep_page import html_table
from surefoot.scale.transfer_cells import Cell, Family, Row, Verdict, families, read_cells, told_shift, verdicts

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
TALL = 0.6
"""Nats above the lowest loss of a picture where it is cut off."""
_WIDE, _HIGH, _HEAD = 520, 280, 26
_CSS = """
.wide table { font-variant-numeric: tabular-nums; font-size: .8125rem; }
.wide th { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 2px solid var(--line); }
.wide td { padding-right: .7rem; } .wide td:first-child { width: auto; color: var(--text); }
svg.transfer { width: 100%; max-width: 1040px; height: auto; display: block; }
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


def picture(found: Sequence[Family]) -> str:
    """Loss against rate, a panel per family, a line per size; the ring is the fitted optimum. Stands alone."""
    columns = 2 if len(found) > 1 else 1
    high = _HEAD + _HIGH
    size = f"{columns * _WIDE} {-(-len(found) // columns) * high}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" class="transfer" role="img" '
        'aria-label="loss against learning rate at every size" font-family="system-ui, sans-serif" font-size="12">'
    ]
    for place, family in enumerate(found):
        x, y = place % columns * _WIDE, place // columns * high
        parts += [_names(family, x, y + 16), _panel(family, found, x, y + _HEAD)]
    return "".join([*parts, "</svg>\n"])


def _panel(family: Family, found: Sequence[Family], x: int, y: int) -> str:
    """Panels of one axis share their rates and their losses, so that they can be compared by eye."""
    beside = [other for other in found if other.axis == family.axis]
    rates = sorted({lr for other in beside for row in other.rows for lr in row.curve.lrs})
    lowest = min(min(row.curve.means) for other in beside for row in other.rows)
    axis = Axis(label="learning rate", scale="log", ticks=[(lr, f"{lr:g}") for lr in rates])
    series = [
        Series(
            name=str(row.size),
            dots=[
                Dot(x=lr, y=loss, hover=f"{family.axis} {row.size}, rate {lr:g}: {loss:.4f}")
                for lr, losses in zip(row.curve.lrs, row.curve.losses, strict=True)
                for loss in losses
            ],
            line=list(zip(row.curve.lrs, row.curve.means, strict=True)),
        )
        for row in family.rows
    ]
    title = f"{family.kind}: loss against learning rate by {family.axis}"
    chart = loss_chart(series, axis, title=title, top=lowest + TALL, width=_WIDE, height=_HIGH)
    return chart.replace("<svg ", f'<svg x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" ', 1)


def _names(family: Family, x: int, y: int) -> str:
    """The panel's title, and its sizes in their colours, smallest first."""
    sizes = "".join(
        f'<tspan dx="10" fill="{COLOURS[place % len(COLOURS)]}">{row.size}</tspan>'
        for place, row in enumerate(family.rows)
    )
    return f'<text x="{x + 52}" y="{y}"><tspan font-weight="600">{escape(family.kind)}, {family.axis}</tspan>{sizes}</text>'


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
            f"![Loss against learning rate at every size]({picture_name})",
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
    commits = ", ".join(sorted({cell.commit[:10] for cell in cells}))
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
