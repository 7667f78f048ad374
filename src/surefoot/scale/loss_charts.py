"""Loss against one setting as a small SVG picture: a point per run, a line through the means, a cross at the top for what diverged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 42
"""Margins, in pixels."""
COLOURS = (
    "var(--main, #1f5fa8)",
    "var(--second, #c2571a)",
    "var(--third, #2c8a4b)",
    "var(--fourth, #8a4fbf)",
    "var(--fifth, #b0892b)",
    "var(--sixth, #4b8f9e)",
)
"""The report's, and what they are where a picture stands alone."""
_SOFT, _LINE = "var(--soft, #5b6470)", "var(--line, #dfe3e8)"


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One run."""

    x: float
    y: float
    """Loss, nats per token; not finite is drawn as diverged."""
    diverged: bool = False
    hover: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Runs that share a colour."""

    name: str
    dots: Sequence[Dot]
    line: Sequence[tuple[float, float]] = ()
    """(x, y) of the line through them, usually means; empty is none."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where values of the setting stand."""

    label: str
    scale: Literal["log", "linear", "words"]
    ticks: Sequence[tuple[float, str]]
    """(value, text); for words the values are 0, 1, 2.."""


@dataclass(frozen=True)
class _Frame:
    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    logarithmic: bool

    def across(self, value: float) -> float:
        low, high = self.x
        share = (self._on_axis(value) - low) / max(1e-9, high - low)
        return LEFT + share * (self.width - LEFT - RIGHT)

    def up(self, loss: float) -> float:
        low, high = self.y
        share = (min(max(loss, low), high) - low) / max(1e-9, high - low)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def _on_axis(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def loss_chart(
    series: Sequence[Series],
    axis: Axis,
    *,
    title: str,
    top: float = math.inf,
    width: int = 520,
    height: int = 280,
    y_label: str = "held-out loss",
) -> str:
    """An SVG element that needs no style sheet; losses above ``top`` are drawn at the edge."""
    frame = _frame(series, axis, top, width, height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" class="losses" '
        f'font-family="system-ui, sans-serif" font-size="11">',
        *_axes(frame, axis, y_label),
        *(part for place, one in enumerate(series) for part in _drawn(frame, one, COLOURS[place % len(COLOURS)])),
        "</svg>",
    ]
    return "".join(parts)


def legend(names: Sequence[str]) -> str:
    """The names of the series in their colours, as HTML."""
    keys = (
        f'<span style="color:{COLOURS[place % len(COLOURS)]}">&#9679; {escape(name)}</span>'
        for place, name in enumerate(names)
    )
    return f'<p class="small">{" &nbsp; ".join(keys)} &nbsp; <span class="soft">&#215; diverged</span></p>'


def _frame(series: Sequence[Series], axis: Axis, top: float, width: int, height: int) -> _Frame:
    values = [dot.x for one in series for dot in one.dots] + [value for value, _ in axis.ticks]
    places = [math.log10(value) if axis.scale == "log" else value for value in values]
    room = 0.5 if axis.scale == "words" else 0.05 * max(max(places) - min(places), 1e-9)
    losses = [dot.y for one in series for dot in one.dots if math.isfinite(dot.y) and not dot.diverged]
    losses += [y for one in series for _, y in one.line if math.isfinite(y)]
    low, high = (min(losses), min(max(losses), top)) if losses else (0.0, 1.0)
    gap = 0.06 * max(high - low, 0.02)
    ends = (min(places) - room, max(places) + room)
    return _Frame(width, height, ends, (max(0.0, low - gap), high + 2 * gap), axis.scale == "log")


def _axes(frame: _Frame, axis: Axis, y_label: str) -> list[str]:
    parts = []
    for value in round_numbers(*frame.y, 5):
        y = frame.up(value)
        parts.append(f'<line x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_LINE}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}", "end"))
    for value, word in axis.ticks:
        parts.append(_text(frame.across(value), frame.height - BOTTOM + 16, word, "middle"))
    parts.append(_text((LEFT + frame.width - RIGHT) / 2, frame.height - 6, axis.label, "middle"))
    middle = (TOP + frame.height - BOTTOM) / 2
    turned = f'transform="rotate(-90 12 {middle:.1f})"'
    parts.append(f'<text x="12" y="{middle:.1f}" fill="{_SOFT}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return parts


def _text(x: float, y: float, word: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{_SOFT}" text-anchor="{anchor}">{escape(word)}</text>'


def round_numbers(low: float, high: float, about: int) -> list[float]:
    """About so many round numbers inside a range."""
    raw = max(high - low, 1e-9) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    return [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _drawn(frame: _Frame, series: Series, colour: str) -> list[str]:
    finite = [(x, y) for x, y in series.line if math.isfinite(y)]
    parts = []
    if len(finite) > 1:
        points = " ".join(f"{frame.across(x):.1f},{frame.up(y):.1f}" for x, y in finite)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    for dot in series.dots:
        x, hover = frame.across(dot.x), f"<title>{escape(dot.hover)}</title>"
        if dot.diverged or not math.isfinite(dot.y):
            parts.append(
                f'<path d="M{x - 4:.1f} {TOP - 4}l8 8m0 -8l-8 8" stroke="{colour}" stroke-width="1.6">{hover}</path>'
            )
        else:
            parts.append(
                f'<circle cx="{x:.1f}" cy="{frame.up(dot.y):.1f}" r="3" fill="{colour}" fill-opacity="0.55">{hover}</circle>'
            )
    return parts
