"""Where a loss is lowest over learning rates, with an interval over seeds, and how far that place moves with size. No torch."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

STEP = math.log(2.0)
"""One grid step, a factor of two of the rate, in natural logarithms."""
EXACT_SEEDS = 5
"""Up to so many seeds every resample is taken, n^n of them; beyond, ``DRAWS`` random ones."""
DRAWS = 2000
COVERAGE = 0.95

Edge = Literal["none", "low", "high"]


@dataclass(frozen=True)
class LossCurve:
    """Final losses of one size over learning rates and seeds."""

    lrs: tuple[float, ...]
    """Ascending."""
    losses: tuple[tuple[float, ...], ...]
    """Nats per token, by rate, then by seed; the same seeds at every rate, so that what seeds share cancels."""

    def __post_init__(self) -> None:
        if len(self.lrs) < 2 or list(self.lrs) != sorted(set(self.lrs)):
            raise ValueError(f"a curve takes two different learning rates at least, ascending; got {self.lrs}")
        if len(self.losses) != len(self.lrs) or len({len(row) for row in self.losses}) != 1 or not self.losses[0]:
            raise ValueError("a curve takes the losses of the same seeds, one at least, at every learning rate")
        if not all(math.isfinite(loss) for row in self.losses for loss in row):
            raise ValueError("losses must be finite; a diverged run counts with its initial loss")

    @property
    def means(self) -> tuple[float, ...]:
        """Over seeds, by rate."""
        return tuple(math.fsum(row) / len(row) for row in self.losses)

    @cached_property
    def resampled(self) -> npt.NDArray[np.float64]:
        """log2 of the optimum of every resample of the seeds, ascending."""
        by_seed = np.array(self.losses)
        draws = _resamples(by_seed.shape[1])
        means = by_seed[:, draws].mean(axis=2).T
        return np.sort([_vertex(self.lrs, row)[0] for row in means.tolist()])


@dataclass(frozen=True)
class Optimum:
    """Where one curve is lowest."""

    lr: float
    """Vertex of the parabola; at an edge, the edge."""
    low: float
    high: float
    """Of the rate: the middle 95 % of the optima of resampled seeds; equal with one seed, which has no spread."""
    loss: float
    """Of the vertex, nats per token, mean over seeds."""
    edge: Edge
    """The lowest run is the first (low) or the last (high) of the grid: ``lr`` is then a bound, the optimum lies at it or beyond."""
    num_seeds: int

    @property
    def width(self) -> float:
        """Of the interval, in factor-of-two steps."""
        return math.log2(self.high / self.low)


def optimum(curve: LossCurve) -> Optimum:
    """The vertex of the parabola through the lowest mean loss and its two neighbours, in log2 of the rate.

    Three points and no more: far from the optimum the loss is no parabola (it climbs a cliff on the right), and a wider fit would let
    the cliff say where the valley is. So the vertex is never further than half a spacing from the lowest run. The interval is the
    percentile bootstrap over seeds, a seed with all its rates at once; with three seeds it is a little too narrow (by sqrt(2/3) for a mean).
    """
    place, loss, edge = _vertex(curve.lrs, curve.means)
    low, high = _middle(curve.resampled)
    return Optimum(
        lr=2.0**place,
        low=2.0 ** min(low, place),
        high=2.0 ** max(high, place),
        loss=loss,
        edge=edge,
        num_seeds=len(curve.losses[0]),
    )


@dataclass(frozen=True)
class Shift:
    """How far an optimum lies from another one, in factor-of-two steps; above 0 is a higher rate."""

    steps: float
    low: float
    high: float
    """The middle 95 % over resamples of both."""
    bound: Literal["none", "at_most", "at_least"]
    """at_most, at_least: an optimum at an edge of its grid leaves ``steps`` one-sided, as in "at most -2"."""


def shift(first: LossCurve, second: LossCurve) -> Shift:
    """From the optimum of ``first`` to that of ``second``."""
    one, two = optimum(first), optimum(second)
    differences = np.sort((second.resampled[None, :] - first.resampled[:, None]).ravel())
    low, high = _middle(differences)
    steps = math.log2(two.lr / one.lr)
    return Shift(steps, min(low, steps), max(high, steps), _bound(one.edge, two.edge))


def _bound(first: Edge, second: Edge) -> Literal["none", "at_most", "at_least"]:
    """What edges leave of a difference; where both leave something open on opposite sides, the second's."""
    if second == "low" or (second == "none" and first == "high"):
        return "at_most"
    if second == "high" or (second == "none" and first == "low"):
        return "at_least"
    return "none"


def _vertex(lrs: Sequence[float], losses: Sequence[float]) -> tuple[float, float, Edge]:
    """log2 of the lowest rate of the parabola, its loss, and whether the lowest point is an edge."""
    at = min(range(len(losses)), key=losses.__getitem__)
    if at == 0 or at == len(losses) - 1:
        return math.log2(lrs[at]), losses[at], "low" if at == 0 else "high"
    x0, x1, x2 = (math.log2(lr) for lr in lrs[at - 1 : at + 2])
    y0, y1, y2 = losses[at - 1 : at + 2]
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    if bend <= 0.0:  # all three the same
        return x1, y1, "none"
    # Newton's form: y = y0 + left (x - x0) + bend (x - x0)(x - x1)
    x = 0.5 * (x0 + x1 - left / bend)
    return x, y0 + left * (x - x0) + bend * (x - x0) * (x - x1), "none"


def _resamples(num_seeds: int) -> npt.NDArray[np.int64]:
    """Indices of seeds drawn with replacement, one row a resample: all there are, or many."""
    if num_seeds <= EXACT_SEEDS:
        return np.array(list(itertools.product(range(num_seeds), repeat=num_seeds)))
    draw = random.Random(0)
    return np.array([[draw.randrange(num_seeds) for _ in range(num_seeds)] for _ in range(DRAWS)])


def _middle(sorted_values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The bounds of the middle ``COVERAGE``."""
    tail = (1.0 - COVERAGE) / 2.0
    low, high = np.quantile(sorted_values, [tail, 1.0 - tail])
    return float(low), float(high)


def loss_at(curve: LossCurve, lr: float) -> float:
    """Mean loss at a rate inside the grid: the parabola in log2 through the three rates around the nearest one; NaN outside."""
    if not curve.lrs[0] <= lr <= curve.lrs[-1]:
        return math.nan
    places = [math.log2(each) for each in curve.lrs]
    x = math.log2(lr)
    nearest = min(range(len(places)), key=lambda n: abs(places[n] - x))
    first = min(max(nearest - 1, 0), max(len(places) - 3, 0))
    around = range(first, min(first + 3, len(places)))
    # Lagrange's form
    return math.fsum(
        curve.means[n] * math.prod((x - places[m]) / (places[n] - places[m]) for m in around if m != n) for n in around
    )


def by_rate(losses: Mapping[tuple[float, int], float]) -> LossCurve | None:
    """The curve of {(rate, seed): loss}: as many seeds as three rates or more have in common, and the rates that have them all.

    None where no three rates share a seed. So a sweep that is under way counts with what it has in full.
    """
    seeds = {lr: frozenset(seed for each, seed in losses if each == lr) for lr, _ in losses}
    for chosen in sorted({*seeds.values()}, key=lambda one: (-len(one), sorted(one))):
        lrs = sorted(lr for lr, held in seeds.items() if held >= chosen)
        if len(lrs) >= 3:
            return LossCurve(tuple(lrs), tuple(tuple(losses[lr, seed] for seed in sorted(chosen)) for lr in lrs))
    return None
