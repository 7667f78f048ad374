"""transfer.svg: loss against rate at every size, a panel per parametrization, and where the best rate goes with size. Stands alone."""

import math
from collections.abc import Sequence
from html import escape

from surefoot.scale.loss_charts import COLOURS, Axis, Dot, Series, loss_chart
from surefoot.scale.transfer_cells import Family, Row

TALL = 0.6
"""Nats above the lowest loss of an axis where panels are cut off."""
WIDE, HIGH, HEAD = 400, 270, 26
"""Of a panel, and of the line of text above it, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 42
_SOFT, _LINE = "var(--soft, #5b6470)", "var(--line, #dfe3e8)"
_TESTED, _CONTROL = COLOURS[0], COLOURS[1]


def picture(found: Sequence[Family]) -> str:
    """An SVG document: a row per axis."""
    axes = [axis for axis in ("width", "depth") if any(family.axis == axis for family in found)]
    beside = {axis: [family for family in found if family.axis == axis] for axis in axes}
    columns = max((len(families) + 1 for families in beside.values()), default=1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * WIDE} {len(axes) * (HEAD + HIGH)}" class="transfer" role="img" '
        'aria-label="loss against learning rate at every size" font-family="system-ui, sans-serif" font-size="11">'
    ]
    for line, families in enumerate(beside.values()):
        y = line * (HEAD + HIGH)
        for place, family in enumerate(families):
            parts += [_names(family, place * WIDE, y + 16), _panel(family, families, place * WIDE, y + HEAD)]
        parts.append(_optima(families, len(families) * WIDE, y))
    return "".join([*parts, "</svg>\n"])


def _panel(family: Family, beside: Sequence[Family], x: int, y: int) -> str:
    """Loss against rate, a line per size. Panels of an axis share their rates, so that they can be compared by eye."""
    rates = sorted({lr for other in beside for row in other.rows for lr in row.curve.lrs})
    lowest = min(min(row.curve.means) for other in beside for row in other.rows)
    axis = Axis(label="learning rate", scale="log", ticks=[(lr, f"{lr:g}") for lr in rates[:: 1 + len(rates) // 8]])
    title = f"{family.kind}: loss against learning rate by {family.axis}"
    series = [_series(family, row) for row in family.rows]
    chart = loss_chart(series, axis, title=title, top=lowest + TALL, width=WIDE, height=HIGH)
    return chart.replace("<svg ", f'<svg x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" ', 1)


def _series(family: Family, row: Row) -> Series:
    dots = [
        Dot(x=lr, y=loss, hover=f"{family.axis} {row.size}, rate {lr:g}: {loss:.4f}")
        for lr, losses in zip(row.curve.lrs, row.curve.losses, strict=True)
        for loss in losses
    ]
    return Series(name=str(row.size), dots=dots, line=list(zip(row.curve.lrs, row.curve.means, strict=True)))


def _names(family: Family, x: int, y: int) -> str:
    """The panel's title, and its sizes in their colours, smallest first."""
    sizes = "".join(
        f'<tspan dx="10" fill="{COLOURS[place % len(COLOURS)]}">{row.size}</tspan>'
        for place, row in enumerate(family.rows)
    )
    return f'<text x="{x + _LEFT}" y="{y}"><tspan font-weight="600">{escape(family.kind)}, {family.axis}</tspan>{sizes}</text>'


def _optima(families: Sequence[Family], x: int, y: int) -> str:
    """The best rate against size, both in factors of two: a line per parametrization, a bar for the interval."""
    sizes = sorted({row.size for family in families for row in family.rows})
    ends = [rate for family in families for row in family.rows for rate in (row.optimum.low, row.optimum.high)]
    rates = sorted({lr for family in families for row in family.rows for lr in row.curve.lrs})
    # the rates that were run, from the last one below all optima to the first above
    ticks = [lr for lr in rates if min(ends) / 2.0 < lr < max(ends) * 2.0]
    low, high = math.log2(min(*ends, *ticks)), math.log2(max(*ends, *ticks))
    span = max(1e-9, math.log2(sizes[-1] / sizes[0]))

    def across(size: int) -> float:
        return x + _LEFT + 12 + math.log2(size / sizes[0]) / span * (WIDE - _LEFT - _RIGHT - 24)

    def up(rate: float) -> float:
        share = (math.log2(rate) - low) / max(1e-9, high - low)
        return y + HEAD + HIGH - _BOTTOM - share * (HIGH - _TOP - _BOTTOM)

    parts = [f'<text x="{x + _LEFT}" y="{y + 16}"><tspan font-weight="600">best rate by {families[0].axis}</tspan>']
    colours = [_CONTROL if family.kind == "standard" else _TESTED for family in families]
    parts += [
        f'<tspan dx="10" fill="{colour}">{escape(family.kind)}</tspan>'
        for family, colour in zip(families, colours, strict=True)
    ]
    parts.append("</text>")
    for rate in ticks:
        level = up(rate)
        parts.append(
            f'<line x1="{x + _LEFT}" x2="{x + WIDE - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}" stroke="{_LINE}"/>'
        )
        parts.append(f'<text x="{x + _LEFT - 6}" y="{level + 4:.1f}" fill="{_SOFT}" text-anchor="end">{rate:g}</text>')
    bottom = y + HEAD + HIGH - _BOTTOM + 16
    parts += [
        f'<text x="{across(size):.1f}" y="{bottom}" fill="{_SOFT}" text-anchor="middle">{size}</text>' for size in sizes
    ]
    for family, colour in zip(families, colours, strict=True):
        points = [(across(row.size), up(row.optimum.lr), row) for row in family.rows]
        line = " ".join(f"{at:.1f},{level:.1f}" for at, level, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for at, level, row in points:
            ends_of = f'y1="{up(row.optimum.low):.1f}" y2="{up(row.optimum.high):.1f}"'
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" {ends_of} stroke="{colour}" stroke-width="5" stroke-opacity="0.35"/>'
            )
            hollow = "none" if row.optimum.edge != "none" else colour
            parts.append(
                f'<circle cx="{at:.1f}" cy="{level:.1f}" r="3.5" fill="{hollow}" stroke="{colour}">'
                f"<title>{family.kind}, {family.axis} {row.size}: {row.optimum.lr:.2g}</title></circle>"
            )
    return "".join(parts)
