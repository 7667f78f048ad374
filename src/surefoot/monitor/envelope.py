"""Long series made short without losing a spike: the smallest and largest value of every bucket, where they happened."""

import numpy as np
import numpy.typing as npt

BUCKETS = 1000
"""Twice this many points are as many as a wide screen has pixels."""


def envelope(
    x: npt.NDArray[np.int64], y: npt.NDArray[np.float64], buckets: int = BUCKETS
) -> tuple[list[int], list[float | None]]:
    """Points to draw as a line: both extremes of each bucket of x, in their order; None breaks the line at a gap.

    x is increasing. A gap is a missing x or a y that is not finite. Series of up to ``2 * buckets`` points are kept
    whole, gaps included; in longer ones only gaps as long as a bucket still show.
    """
    if not len(x):
        return [], []
    if len(x) <= 2 * buckets:
        return _whole(x, y)
    kept = np.isfinite(y)
    bucket = ((x - x[0]) * buckets) // (x[-1] - x[0] + 1)
    x, y, bucket = x[kept], y[kept], bucket[kept]
    if not len(x):
        return [], []
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    stops = [*starts[1:].tolist(), len(x)]
    xs: list[int] = []
    ys: list[float | None] = []
    last = bucket[0] - 1
    for start, stop in zip(starts.tolist(), stops, strict=True):
        if bucket[start] > last + 1:
            xs.append(int(x[start]))
            ys.append(None)
        last = bucket[start]
        part = y[start:stop]
        for place in sorted({int(part.argmin()), int(part.argmax())}):
            xs.append(int(x[start + place]))
            ys.append(float(part[place]))
    return xs, ys


def _whole(x: npt.NDArray[np.int64], y: npt.NDArray[np.float64]) -> tuple[list[int], list[float | None]]:
    xs: list[int] = []
    ys: list[float | None] = []
    for place, value in zip(x.tolist(), y.tolist(), strict=True):
        if xs and place > xs[-1] + 1:
            xs.append(xs[-1] + 1)
            ys.append(None)
        xs.append(place)
        ys.append(value if np.isfinite(value) else None)
    return xs, ys


def missing(x: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """First and last of each stretch of whole numbers that x leaves out."""
    places = np.flatnonzero(np.diff(x) > 1)
    return [(int(x[place]) + 1, int(x[place + 1]) - 1) for place in places]
