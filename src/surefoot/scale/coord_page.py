"""The picture of a coordinate check: one page that opens offline, the parametrization beside the standard one."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import surefoot.monitor.page as report_page
from surefoot.scale.coord_data import QUANTITIES
from surefoot.scale.coordcheck import FLAT, GROWS, Axis, CoordinateCheck, Reading, shape
from surefoot.scale.line_fit import Slope

TITLES = {
    "embedding": "Embedding",
    "attention": "Attention, mean over blocks",
    "feed_forward": "Feed-forward, mean over blocks",
    "residual": "Residual stream after the last block",
    "attention_logits": "Attention logits, mean over blocks",
    "logits": "Output logits",
}
_TONES = {"flat": "", "not_flat": " bad", "inconclusive": " warning"}
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 230, 52, 14, 10, 38
_STYLE = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px; }
svg.coordinates { width: 100%; background: var(--card); border-radius: 6px; }
svg.coordinates text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg.coordinates .grid { stroke: var(--line); }
svg.coordinates polyline { fill: none; stroke: var(--main); stroke-width: 2; }
svg.coordinates circle { fill: var(--main); }
svg.coordinates .control polyline { stroke: var(--second); } svg.coordinates .control circle { fill: var(--second); }
"""


def coordinate_page(check: CoordinateCheck) -> str:
    """The whole HTML document."""
    css = (Path(report_page.__file__).parent / "page.css").read_text() + _STYLE
    name = check.plan.kind
    told = "".join(f"<p>{escape(sentence(check, axis))}</p>" for axis in check.axes)
    body = [
        f"<h1>Coordinate check: {name}</h1>",
        f"<p>How far {check.plan.steps} updates at a rate of {check.plan.config.optim.lr:g} move each activation of a model: mean absolute change "
        f"since initialisation, on the batch trained on; seeds: {check.plan.seeds}. Level lines mean that what was tuned at one size holds at "
        "the next. Both axes are logarithmic; pale lines are earlier steps, dots the seeds of the last.</p>",
        f'<div class="verdict{_TONES[check.verdict]}"><b>{check.verdict.replace("_", " ")}</b>{told}</div>',
        *(part for axis in check.axes for part in _section(check, axis)),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Coordinate check: {escape(name)}</title><style>{css}</style></head><body>"
    )
    return "\n".join([head, *body, "</body></html>\n"])


def sentence(check: CoordinateCheck, axis: Axis) -> str:
    """The verdict along one axis in words."""
    mine = {name: slope for name, slope in check.slopes.items() if name.startswith(axis)}
    control = {name: slope for name, slope in check.control_slopes.items() if name.startswith(axis)}
    worst = max(mine, key=lambda name: _order(mine[name]))
    most = max(control, key=lambda name: _order(control[name]))
    verdict = check.verdict_of(axis)
    text = f"{axis}: {verdict.replace('_', ' ')}. Steepest under {check.plan.kind}: {_named(worst)} {mine[worst].value:+.2f}"
    text += f"; under standard: {_named(most)} {control[most].value:+.2f}."
    if verdict == "inconclusive":
        text += f" Standard must show more than {GROWS}, or the check could not have told: a higher --lr, more --steps or larger sizes."
    if verdict == "not_flat":
        text += f" Flat is below {FLAT}."
        if mine[worst].value < 0:
            text += " A slope that falls is often chance that larger sizes average out: more --steps, larger sizes, more --seeds."
    return text


def _named(name: str) -> str:
    return name.partition("/")[2].replace("_", " ")


def _order(slope: Slope) -> float:
    return math.inf if math.isnan(slope.value) else abs(slope.value)


def _section(check: CoordinateCheck, axis: Axis) -> list[str]:
    mine = [reading for reading in check.readings if reading.axis == axis]
    sizes = sorted({reading.size: shape(reading.model) for reading in mine}.items())
    unit = "d_model" if axis == "width" else "num_layers"
    parts = [f"<h2>{axis.capitalize()}</h2><p class='soft small'>{escape('; '.join(text for _, text in sizes))}.</p>"]
    for name in QUANTITIES:
        key = f"{axis}/{name}"
        if key not in check.slopes:
            continue
        pair = [[reading for reading in mine if reading.control == control] for control in (False, True)]
        values = [v for group in pair for reading in group for v in _changes(reading, name) if _drawable(v)]
        if not values:
            continue
        span = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9))
        pictures = "".join(
            f"<div><p class='small'>{label}, slope {_told(slopes[key])}</p>{_panel(group, name, span, unit, css)}</div>"
            for group, label, slopes, css in (
                (pair[0], check.plan.kind, check.slopes, "own"),
                (pair[1], "standard", check.control_slopes, "control"),
            )
        )
        parts.append(f"<h3>{escape(TITLES[name])}</h3><div class='pair'>{pictures}</div>")
    return parts


def _told(slope: Slope) -> str:
    return f"{slope.value:+.3f} (95 %: {slope.low:+.3f} to {slope.high:+.3f})"


def _changes(reading: Reading, name: str) -> list[float]:
    """After each update."""
    return [size.change for at in reading.steps[1:] if (size := at.quantity(name)) is not None]


def _drawable(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _panel(readings: Sequence[Reading], name: str, span: tuple[int, int], unit: str, css: str) -> str:
    sizes = sorted({reading.size for reading in readings})
    first, last = math.log(sizes[0]), math.log(sizes[-1])

    def at(size: int, value: float) -> tuple[float, float]:
        across = (math.log(size) - first) / (last - first)
        up = (math.log10(value) - span[0]) / max(1, span[1] - span[0])
        return (
            round(_LEFT + across * (_WIDTH - _LEFT - _RIGHT), 1),
            round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM), 1),
        )

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(f"{name}, {css}")}" class="coordinates">'
    ]
    for power in range(span[0], span[1] + 1):
        y = at(sizes[0], 10.0**power)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">1e{power}</text>')
    for size in sizes:
        x = at(size, 10.0 ** span[0])[0]
        parts.append(f'<text x="{x}" y="{_HEIGHT - 20}" text-anchor="middle">{size}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle">{unit}</text><g class="{css}">')
    steps = len(_changes(readings[0], name))
    for step in range(steps):
        points = []
        for size in sizes:
            values = [_changes(reading, name)[step] for reading in readings if reading.size == size]
            good = [math.log(value) for value in values if _drawable(value)]
            if good:
                points.append(at(size, math.exp(sum(good) / len(good))))
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{line}" opacity="{(step + 1) / steps:.2f}"/>')
    for reading in readings:
        if _drawable(value := _changes(reading, name)[-1]):
            x, y = at(reading.size, value)
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" opacity="0.6"/>')
    return "".join([*parts, "</g></svg>"])
