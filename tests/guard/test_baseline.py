"""A robust local trend: what moves it, what does not."""

import math
import random

import pytest

from surefoot.guard.baseline import FADE, KEPT, LINE, SETTLED, WINDOW, Baseline, forecast, median
from tolerances import SPREAD_SHARE, TREND_NATS


def fed(values: list[float]) -> Baseline:
    baseline = Baseline()
    for value in values:
        baseline = baseline.accept(value)
    return baseline


def noise(count: int, sigma: float = 0.02, level: float = 2.0, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [level + draw.gauss(0, sigma) for _ in range(count)]


def test_a_line_is_continued_and_one_outlier_does_not_bend_it() -> None:
    line = [5 - 0.1 * n for n in range(LINE)]
    assert forecast(line) == pytest.approx(line[-1] - 0.1)
    assert forecast([*line[:7], 50.0, *line[8:]]) == pytest.approx(line[-1] - 0.1, abs=TREND_NATS)


def test_a_sudden_lasting_drop_is_not_continued_downwards() -> None:
    for since in range(1, 12):
        values = ([2.0] * LINE + [1.0] * since)[-LINE:]
        assert 1.0 <= forecast(values) <= 2.0


def test_a_steep_fall_is_followed_within_a_step() -> None:
    baseline = fed([4 + 7 * math.exp(-n / 20) for n in range(40)])
    expected = 4 + 7 * math.exp(-40 / 20)
    assert abs(baseline.center - expected) < TREND_NATS
    assert baseline.above < TREND_NATS


def test_the_spread_is_that_of_the_noise() -> None:
    baseline = fed(noise(200, sigma=0.05))
    assert baseline.above == pytest.approx(0.05, rel=SPREAD_SHARE)
    assert baseline.below == pytest.approx(0.05, rel=SPREAD_SHARE)


def test_a_heavy_upper_tail_widens_the_band_above_only() -> None:
    draw = random.Random(3)
    skewed = fed([2 - 0.3 * math.log(-math.log(draw.random())) for _ in range(300)])
    assert skewed.above > 1.2 * skewed.below
    assert skewed.z(skewed.center + 1, 0.01) == pytest.approx(1 / skewed.above)
    assert skewed.z(skewed.center - 1, 0.01) == pytest.approx(-1 / skewed.below)


def test_no_verdict_before_there_is_a_spread_and_a_wider_band_while_it_is_new() -> None:
    values = noise(200)
    assert fed(values[: 2 * SETTLED - 1]).upper(8, 0.2, 0.01) == math.inf
    young, old = fed(values[: 2 * SETTLED]), fed(values)
    assert young.upper(8, 0.2, 0.01) < math.inf
    assert young.width() == 2.0
    assert 1.4 < fed(values[: SETTLED + WINDOW // 2]).width() < 1.7
    assert old.width() == 1.0


def test_a_band_may_leave_room_for_healthy_outliers_which_fade_and_never_more_than_twice_its_width() -> None:
    baseline = fed(noise(200))
    away = baseline.upper(8, 0.2, 0.01) - baseline.center
    once = baseline.accept(baseline.center + 0.25)
    assert once.peak == pytest.approx(0.25)
    assert once.upper(8, 0.2, 0.01) - once.center == pytest.approx(away, rel=SPREAD_SHARE)  # only where it is asked for
    assert once.upper(8, 0.2, 0.01, 1.5) - once.center == pytest.approx(1.5 * 0.25)
    far = baseline.accept(baseline.center + 50.0)
    width = far.upper(8, 0.2, 0.01) - far.center
    assert far.upper(8, 0.2, 0.01, 1.5) - far.center == pytest.approx(2 * width)
    for value in noise(700):
        once = once.accept(value)
    assert 0.1 < once.peak < 0.15
    for other in (far.reopen(), far.reject(9.0).accept_level()):
        assert other.peak == far.peak
    below = baseline.accept(baseline.center - 50.0)
    assert below.peak == baseline.peak * (1 - FADE)


def test_missing_and_infinite_values_change_nothing() -> None:
    baseline = fed(noise(40))
    for value in (math.nan, math.inf, -math.inf):
        assert baseline.accept(value) == baseline
        assert baseline.reject(value) == baseline


def test_a_constant_series_has_a_band_of_its_own_floor() -> None:
    constant = fed([2.0] * 100)
    assert constant.above == 0.0
    assert constant.upper(8, 0.0, 0.01) == pytest.approx(2.08)
    assert constant.z(2.1, 0.01) == pytest.approx(10)


def test_the_windows_are_bounded() -> None:
    baseline = fed(noise(500))
    assert len(baseline.values) == LINE
    assert len(baseline.residuals) == WINDOW
    for value in noise(100):
        baseline = baseline.reject(value)
    assert len(baseline.rejected) == 16


def test_rejected_values_wait_apart_and_the_next_accepted_one_clears_them() -> None:
    baseline = fed(noise(60))
    after = baseline.reject(9.0).reject(9.1)
    assert after.rejected == (9.0, 9.1)
    assert (after.center, after.above, after.values) == (baseline.center, baseline.above, baseline.values)
    assert after.accept(2.0) == baseline.accept(2.0)


def test_an_accepted_level_is_the_new_normal_wide_at_first_and_then_tight() -> None:
    baseline = fed(noise(100))
    for value in noise(8, level=3.0, seed=5):
        baseline = baseline.reject(value)
    baseline = baseline.accept_level()
    assert baseline.center == pytest.approx(3.0, abs=TREND_NATS)
    assert baseline.rejected == ()
    for value in noise(30, level=3.0, seed=6):
        assert value < baseline.upper(8, 0.2, 0.01)
        baseline = baseline.accept(value)
    assert baseline.upper(8, 0.2, 0.01) < 3.5


def test_a_reopened_level_lets_one_value_through_unseen_and_closes_over_eight() -> None:
    baseline = fed(noise(100)).reopen()
    assert baseline.upper(8, 0.2, 0.01) == math.inf
    widths = []
    for value in noise(9, level=4.0):
        baseline = baseline.accept(value)
        widths.append(baseline.upper(8, 0.2, 0.01) - 4.0)
    assert widths[0] > 1.0
    assert widths[-1] < 0.35


@pytest.mark.parametrize(("values", "middle"), [([3.0], 3.0), ([1.0, 9.0], 5.0), ([9.0, 1.0, 2.0], 2.0)])
def test_the_median_is_the_middle(values: list[float], middle: float) -> None:
    assert median(values) == middle


def test_a_forecast_that_lags_a_noisy_fall_is_put_right_by_its_own_errors() -> None:
    draw = random.Random(2)
    baseline, bare, put_right = Baseline(), [], []
    for n in range(300):
        if n >= 100:
            bare.append(forecast(baseline.values) - (20 - 0.05 * n))
            put_right.append(baseline.center - (20 - 0.05 * n))
        baseline = baseline.accept(20 - 0.05 * n + draw.gauss(0, 0.05))
    assert abs(sum(put_right)) < 0.5 * abs(sum(bare))


def test_the_spread_of_a_new_level_soon_outweighs_the_old_one() -> None:
    baseline = fed(noise(100))
    opened = baseline.reopen()
    assert opened.residuals == baseline.residuals[-KEPT:]
    for value in noise(8, level=3.0, sigma=0.2, seed=5):
        baseline = baseline.reject(value)
    assert baseline.accept_level().above > 2 * fed(noise(100)).above
