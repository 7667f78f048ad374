"""Exact confidence intervals of counts: a share of trials (Clopper and Pearson, Biometrika 1934) and a Poisson rate (Garwood, Biometrika 1936)."""

import math
from collections.abc import Callable

LEVEL = 0.95
"""Of both intervals, two-sided."""


def share_interval(hits: int, trials: int, level: float = LEVEL) -> tuple[float, float]:
    """The shares under which neither so many hits nor so few would be less likely than (1 - level) / 2."""
    if trials == 0:
        return 0.0, 1.0
    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else _root(lambda p: 1 - _binomial_at_most(hits - 1, trials, p) - tail, 0.0, 1.0)
    high = 1.0 if hits == trials else _root(lambda p: tail - _binomial_at_most(hits, trials, p), 0.0, 1.0)
    return low, high


def count_interval(count: int, level: float = LEVEL) -> tuple[float, float]:
    """The expected counts under which neither so many events nor so few would be less likely than (1 - level) / 2."""
    tail = (1 - level) / 2
    top = count + 10 * math.sqrt(count + 1) + 10
    low = 0.0 if count == 0 else _root(lambda mean: 1 - _poisson_at_most(count - 1, mean) - tail, 0.0, top)
    return low, _root(lambda mean: tail - _poisson_at_most(count, mean), 0.0, top)


def _binomial_at_most(hits: int, trials: int, share: float) -> float:
    return math.fsum(math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(hits + 1))


def _poisson_at_most(count: int, mean: float) -> float:
    if mean == 0:
        return 1.0
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses 0, by bisection down to the last bit."""
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
