"""Loss curves as small SVG pictures that need nothing but a browser: every batch is drawn, so that a spike of one batch is seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 44, 10, 8, 26
"""Margins, in pixels."""
TOP_LOSS = 12.0
"""Twice an untrained model's loss: a run that is lost may reach any number."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line; where a loss is not finite it is broken."""

    name: str
    look: str
    """CSS class: clean, unguarded or guarded."""
    batches: Sequence[int]
    losses: Sequence[float]
    refused: Sequence[int] = ()
    """Batches whose update was refused: crosses, off the line."""


@dataclass(frozen=True)
class _Frame:
    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, batch: float, loss: float) -> tuple[float, float]:
        low, high = self.y
        across = (batch - self.x[0]) / max(1e-9, self.x[1] - self.x[0])
        up = (min(max(loss, low), high) - low) / max(1e-9, high - low)
        return (
            LEFT + across * (self.width - LEFT - RIGHT),
            self.height - BOTTOM - up * (self.height - TOP - BOTTOM),
        )


def chart(
    curves: Sequence[Curve],
    *,
    width: int = 480,
    height: int = 220,
    window: range = range(0),
    title: str = "",
    top: float = TOP_LOSS,
) -> str:
    """An SVG element; ``window`` shades the batches that have the fault, what lies above ``top`` is drawn at the edge."""
    frame = _Frame(width, height, *_extent(curves, top))
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title or "loss curves")}" class="curves">',
        _shade(frame, window),
        *_axes(frame),
        *(part for curve in curves for part in _drawn(frame, curve)),
        "</svg>",
    ]
    return "".join(parts)


def legend(curves: Sequence[Curve]) -> str:
    """The names of the lines in their colours, as HTML."""
    keys = "".join(f'<span class="key {curve.look}">{escape(curve.name)}</span>' for curve in curves)
    crosses = '<span class="key refused">update refused</span>' if any(curve.refused for curve in curves) else ""
    return f'<div class="legend">{keys}{crosses}</div>'


def _extent(curves: Sequence[Curve], top: float) -> tuple[tuple[float, float], tuple[float, float]]:
    batches = [batch for curve in curves for batch in curve.batches] or [0, 1]
    losses = [loss for curve in curves for loss in curve.losses if math.isfinite(loss)] or [0.0, 1.0]
    low, high = min(losses), min(max(losses), top)
    room = 0.04 * max(high - low, 0.1)
    return (min(batches), max(batches)), (max(0.0, low - room), high + room)


def _shade(frame: _Frame, window: range) -> str:
    if not window:
        return ""
    left, _ = frame.at(max(window.start, frame.x[0]), 0.0)
    right, _ = frame.at(min(window.stop, frame.x[1]), 0.0)
    tall = frame.height - TOP - BOTTOM
    return f'<rect class="window" x="{left:.1f}" y="{TOP}" width="{max(2.0, right - left):.1f}" height="{tall}"/>'


def _axes(frame: _Frame) -> list[str]:
    parts: list[str] = []
    for value in _ticks(*frame.y, 4):
        _, y = frame.at(frame.x[0], value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in _ticks(*frame.x, 5):
        x, _ = frame.at(value, frame.y[0])
        parts.append(f'<text x="{x:.1f}" y="{frame.height - 8}" text-anchor="middle">{value:g}</text>')
    return parts


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers inside a range."""
    raw = max(high - low, 1e-9) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    first = math.ceil(low / step)
    return [round(n * step, 10) for n in range(first, math.floor(high / step) + 1)]


def _drawn(frame: _Frame, curve: Curve) -> list[str]:
    refused = set(curve.refused)
    parts: list[str] = []
    piece: list[str] = []
    for batch, loss in zip(curve.batches, curve.losses, strict=True):
        if batch in refused:
            parts += _line(piece, curve)
            piece = []
            if math.isfinite(loss):
                x, y = frame.at(batch, loss)
                parts.append(f'<path class="refused" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"/>')
        elif math.isfinite(loss):
            x, y = frame.at(batch, loss)
            piece.append(f"{x:.1f},{y:.1f}")
        else:
            parts += _line(piece, curve)
            piece = []
    return [*_line(piece, curve), *parts]


def _line(points: Sequence[str], curve: Curve) -> list[str]:
    if len(points) < 2:
        return []
    return [
        f'<polyline class="{curve.look}" points="{" ".join(points)}"><title>{escape(curve.name)}</title></polyline>'
    ]
