"""Learning rates are closed forms of the step."""

import itertools
import math

import pytest

from surefoot.config.optim import WSD, Constant, Cosine, Linear, OptimConfig
from surefoot.guard.lr_change import LrChange
from surefoot.optim.schedule import lr_at, lr_factor

PEAK, WARMUP, STEPS = 2e-3, 10, 100


def rates(schedule: Constant | Cosine | Linear | WSD, warmup: int = WARMUP) -> list[float]:
    config = OptimConfig(lr=PEAK, schedule=schedule, warmup_steps=warmup)
    return [lr_at(step, config, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("schedule", [Constant(), Cosine(), Linear(), WSD()])
def test_warm_up_is_linear_moves_from_the_first_step_and_reaches_the_peak(schedule: Constant) -> None:
    found = rates(schedule)
    assert found[:WARMUP] == pytest.approx([PEAK * (step + 1) / WARMUP for step in range(WARMUP)])
    assert max(found) == pytest.approx(PEAK)


@pytest.mark.parametrize(
    ("schedule", "last"),
    [(Constant(), PEAK), (Cosine(min_ratio=0.1), 0.1 * PEAK), (Linear(min_ratio=0.25), 0.25 * PEAK), (WSD(), 0.0)],
)
def test_the_last_step_has_the_final_ratio(schedule: Constant, last: float) -> None:
    assert rates(schedule)[-1] == pytest.approx(last, abs=1e-12)
    assert lr_at(STEPS + 50, OptimConfig(lr=PEAK, schedule=schedule, warmup_steps=WARMUP), STEPS) == pytest.approx(
        last, abs=1e-12
    )


def test_cosine_is_half_a_period() -> None:
    found = rates(Cosine(min_ratio=0.0), warmup=0)
    assert found[49] == pytest.approx(PEAK / 2)
    assert found[24] == pytest.approx(PEAK * 0.5 * (1 + math.cos(math.pi / 4)))


def test_wsd_is_stable_until_its_last_fraction_and_then_falls_in_a_straight_line() -> None:
    found = rates(WSD(decay_fraction=0.2, min_ratio=0.1))
    assert found[WARMUP:80] == pytest.approx([PEAK] * (80 - WARMUP))
    falls = [a - b for a, b in itertools.pairwise(found[79:])]
    assert falls == pytest.approx([PEAK * 0.9 / 20] * 20)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert rates(Constant(), warmup=0)[0] == PEAK


@pytest.mark.parametrize("schedule", [Constant(), Cosine(), Linear(), WSD(decay_fraction=0.5)])
@pytest.mark.parametrize(("warmup", "steps"), [(80, 100), (150, 100), (3, 2)])
def test_in_a_run_too_short_for_both_the_lower_of_warm_up_and_decay_holds(
    schedule: Constant, warmup: int, steps: int
) -> None:
    config = OptimConfig(lr=PEAK, schedule=schedule, warmup_steps=warmup)
    found = [lr_at(step, config, steps) for step in range(steps)]
    assert all(0 <= rate <= PEAK * (step + 1) / warmup + 1e-12 or step >= warmup for step, rate in enumerate(found))
    assert max(found) <= PEAK
    if isinstance(schedule, WSD):
        assert found[-1] == pytest.approx(0, abs=1e-12)


DIP = LrChange(start_step=10, factor=0.2, hold_steps=3, ramp_steps=4, settle=0.6)


def test_an_lr_event_holds_then_climbs_in_a_straight_line_then_settles_for_good() -> None:
    found = [lr_factor(step, (DIP,)) for step in range(8, 20)]
    assert found == pytest.approx([1, 1, 0.2, 0.2, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6])
    assert lr_factor(10**9, (DIP,)) == 0.6
    assert lr_factor(10**9, ()) == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (LrChange(start_step=0, factor=0.2, hold_steps=0, ramp_steps=2, settle=1.0), [0.6, 1.0, 1.0]),
        (LrChange(start_step=0, factor=0.2, hold_steps=2, ramp_steps=0, settle=1.0), [0.2, 0.2, 1.0]),
        (LrChange(start_step=0, factor=0.2, hold_steps=0, ramp_steps=0, settle=0.5), [0.5, 0.5, 0.5]),
        (LrChange(start_step=0, factor=0.2, hold_steps=1, ramp_steps=1, settle=0.5), [0.2, 0.5, 0.5]),
    ],
)
def test_an_lr_event_without_hold_or_ramp(change: LrChange, expected: list[float]) -> None:
    assert [lr_factor(step, (change,)) for step in range(3)] == pytest.approx(expected)


def test_lr_events_multiply_in_any_order() -> None:
    later = LrChange(start_step=15, factor=0.5, hold_steps=100, ramp_steps=0, settle=1.0)
    for step in (9, 12, 15, 16, 30, 200):
        both = lr_factor(step, (DIP, later))
        assert both == pytest.approx(lr_factor(step, (DIP,)) * lr_factor(step, (later,)))
        assert both == pytest.approx(lr_factor(step, (later, DIP)))
    assert lr_factor(30, (DIP, later)) == pytest.approx(0.3)
    assert lr_factor(200, (DIP, DIP)) == pytest.approx(0.36)
