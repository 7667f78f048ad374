"""The fitted optimum against parabolas whose vertex is known, its edges, its interval, and the distance between two."""

import itertools
import math
import random
import statistics

import pytest

from surefoot.scale.optimum import LossCurve, by_rate, loss_at, optimum, shift
from tolerances import VERTEX

RATES = (0.001, 0.002, 0.004, 0.008, 0.016)


def bowl(best: float, rates: tuple[float, ...] = RATES, bend: float = 0.05) -> LossCurve:
    """A parabola in log2 of the rate, one seed."""
    return LossCurve(rates, tuple((1.5 + bend * math.log2(lr / best) ** 2,) for lr in rates))


@pytest.mark.parametrize("best", [0.0021, 0.004, 0.0055, 0.01])
def test_the_vertex_of_a_parabola_is_found_between_the_runs(best: float) -> None:
    found = optimum(bowl(best))
    assert found.lr == pytest.approx(best, rel=VERTEX)
    assert found.loss == pytest.approx(1.5, rel=VERTEX)
    assert found.edge == "none"
    assert found.num_seeds == 1
    assert found.low == found.high == found.lr


def test_rates_need_not_be_evenly_spaced() -> None:
    assert optimum(bowl(0.003, (0.0005, 0.002, 0.0036, 0.02))).lr == pytest.approx(0.003, rel=VERTEX)


def test_a_cliff_beyond_the_neighbours_does_not_move_the_optimum() -> None:
    calm = bowl(0.0045)
    cliff = LossCurve(RATES, (*calm.losses[:-1], (5.5,)))
    assert optimum(cliff).lr == optimum(calm).lr


def test_a_diverged_neighbour_moves_it_by_half_a_spacing_at_most() -> None:
    losses = [*bowl(0.004).losses]
    losses[3] = (1e6,)
    assert optimum(LossCurve(RATES, tuple(losses))).lr == pytest.approx(0.004 / math.sqrt(2.0), rel=1e-4)


def test_a_flat_bottom_has_its_middle_as_the_optimum() -> None:
    assert optimum(LossCurve(RATES[:3], ((2.0,), (2.0,), (2.0,)))).edge == "low"
    assert optimum(LossCurve(RATES[:4], ((3.0,), (2.0,), (2.0,), (3.0,)))).lr == pytest.approx(0.002 * math.sqrt(2))


@pytest.mark.parametrize(("best", "edge", "lr"), [(0.0001, "low", 0.001), (0.1, "high", 0.016)])
def test_a_minimum_at_the_edge_is_a_bound(best: float, edge: str, lr: float) -> None:
    found = optimum(bowl(best))
    assert found.edge == edge
    assert found.lr == pytest.approx(lr)


def noisy(best: float, seeds: int, noise: float, draw: random.Random) -> LossCurve:
    return LossCurve(
        RATES,
        tuple(
            tuple(1.5 + 0.05 * math.log2(lr / best) ** 2 + draw.gauss(0.0, noise) for _ in range(seeds)) for lr in RATES
        ),
    )


def test_the_interval_is_that_of_all_resamples_counted_by_hand() -> None:
    curve = noisy(0.0045, 3, 0.004, random.Random(1))
    places = []
    for chosen in itertools.product(range(3), repeat=3):
        means = [sum(row[seed] for seed in chosen) / 3 for row in curve.losses]
        at = means.index(min(means))
        below, here, above = means[at - 1 : at + 2]
        places.append(math.log2(RATES[at]) + (below - above) / (2.0 * (below - 2.0 * here + above)))
    places.sort()
    # numpy's linear quantile of 27 values: positions 0.65 and 25.35
    low, high = 0.35 * places[0] + 0.65 * places[1], 0.65 * places[25] + 0.35 * places[26]
    found = optimum(curve)
    assert math.log2(found.low) == pytest.approx(low, abs=VERTEX)
    assert math.log2(found.high) == pytest.approx(high, abs=VERTEX)
    assert found.width == pytest.approx(high - low, abs=VERTEX)


def test_what_seeds_share_is_not_noise() -> None:
    calm = bowl(0.0045)
    shared = LossCurve(RATES, tuple((row[0], row[0] + 0.3, row[0] - 0.2) for row in calm.losses))
    found = optimum(shared)
    assert found.low == pytest.approx(found.high, rel=VERTEX)
    assert found.lr == pytest.approx(0.0045, rel=VERTEX)


def test_the_interval_of_many_seeds_holds_the_truth_nine_times_in_ten() -> None:
    draw = random.Random(7)
    held = 0
    for _ in range(40):
        found = optimum(noisy(0.0045, 8, 0.004, draw))
        held += found.low <= 0.0045 <= found.high
    assert 32 <= held <= 40  # 95 % wanted; a percentile bootstrap of 8 seeds is a little too narrow


def test_more_noise_gives_a_wider_interval() -> None:
    quiet = statistics.mean(optimum(noisy(0.0045, 3, 0.002, random.Random(n))).width for n in range(10))
    loud = statistics.mean(optimum(noisy(0.0045, 3, 0.008, random.Random(n))).width for n in range(10))
    assert 2.0 < loud / quiet < 8.0


def test_a_shift_is_counted_in_factors_of_two() -> None:
    found = shift(bowl(0.008), bowl(0.002))
    assert found.steps == pytest.approx(-2.0, abs=VERTEX)
    assert found.low == pytest.approx(-2.0, abs=VERTEX)
    assert found.high == pytest.approx(-2.0, abs=VERTEX)
    assert found.bound == "none"


@pytest.mark.parametrize(
    ("first", "second", "bound"),
    [(0.004, 0.0001, "at_most"), (0.004, 0.1, "at_least"), (0.0001, 0.004, "at_least"), (0.1, 0.004, "at_most")],
)
def test_a_shift_to_or_from_an_edge_is_one_sided(first: float, second: float, bound: str) -> None:
    assert shift(bowl(first), bowl(second)).bound == bound


def test_the_loss_between_runs_is_the_parabolas() -> None:
    curve = bowl(0.0045)
    for lr in (0.001, 0.0013, 0.0045, 0.015, 0.016):
        assert loss_at(curve, lr) == pytest.approx(1.5 + 0.05 * math.log2(lr / 0.0045) ** 2, rel=VERTEX)
    # away from the cliff on the left, the parabola is that of the three rates nearest
    cliff = LossCurve(curve.lrs, ((5.5,), *curve.losses[1:]))
    assert loss_at(cliff, 0.0125) == pytest.approx(1.5 + 0.05 * math.log2(0.0125 / 0.0045) ** 2, rel=VERTEX)
    assert all(math.isnan(loss_at(curve, lr)) for lr in (0.02, 0.0009))


def test_the_curve_is_of_the_seeds_that_three_rates_have_in_common() -> None:
    def curve_of(missing: set[tuple[float, int]]) -> LossCurve | None:
        return by_rate({(lr, seed): lr + seed for lr in RATES for seed in (0, 1, 2) if (lr, seed) not in missing})

    whole = curve_of(set())
    assert whole is not None
    assert whole.lrs == RATES
    assert whole.losses[0] == (0.001, 1.001, 2.001)
    fewer_rates = curve_of({(0.001, 1), (0.001, 2), (0.016, 2)})
    assert fewer_rates is not None
    assert fewer_rates.lrs == (0.002, 0.004, 0.008)
    assert fewer_rates.losses[0] == (0.002, 1.002, 2.002)
    fewer_seeds = curve_of({(lr, 2) for lr in RATES[:3]})
    assert fewer_seeds is not None
    assert fewer_seeds.lrs == RATES
    assert len(fewer_seeds.losses[0]) == 2
    assert by_rate({(0.1, 0): 1.0, (0.2, 1): 1.0, (0.3, 2): 1.0}) is None


@pytest.mark.parametrize(
    ("lrs", "losses", "text"),
    [
        ((0.1,), ((1.0,),), "two different learning rates"),
        ((0.2, 0.1), ((1.0,), (1.0,)), "ascending"),
        ((0.1, 0.2), ((1.0,), (1.0, 2.0)), "the same seeds"),
        ((0.1, 0.2), ((1.0,), (math.nan,)), "must be finite"),
    ],
)
def test_what_is_no_curve_is_refused(lrs: tuple[float, ...], losses: tuple[tuple[float, ...], ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LossCurve(lrs, losses)
