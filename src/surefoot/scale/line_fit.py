"""The slope of a straight line through points on logarithmic axes, with its interval. No torch."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, mean

_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Slope:
    """Of log y over log x, with its 95 % interval; infinite where a y is not finite, NaN where one is 0 or there are too few points."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """What is not finite as null."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def fit_slope(points: Sequence[tuple[float, float]]) -> Slope:
    """Least squares over (x, y), both above 0; repeated x (seeds) make the interval, by Student's t with n - 2 degrees of freedom."""
    if any(not math.isfinite(y) for _, y in points):
        return Slope(math.inf, math.nan, math.nan)
    if any(y <= 0 for _, y in points) or len({x for x, _ in points}) < 2 or len(points) < 3:
        return Slope(math.nan, math.nan, math.nan)
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    middle_x, middle_y = mean(xs), mean(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread
    residual = sum((y - middle_y - slope * (x - middle_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    freedom = len(points) - 2
    half = student_t(freedom) * math.sqrt(residual / freedom / spread)
    return Slope(slope, slope - half, slope + half)


def student_t(freedom: int) -> float:
    """The 97.5 % point of Student's t: exact for one and two degrees of freedom, else Abramowitz and Stegun 26.7.5 (to 1 % at three)."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = _Z, float(freedom)
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return sum(terms)
