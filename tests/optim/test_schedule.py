"""Learning rates are closed forms of the step."""

import itertools
import math
from collections.abc import Callable

import pytest

from surefoot.config.optim import WSD, Constant, Cosine, InverseSqrt, Linear, OneMinusSqrt, OptimConfig, Power
from surefoot.config.ramp import ramp_factor
from surefoot.guard.lr_change import LrChange
from surefoot.optim.schedule import Landing, decay_begins, decay_steps, landing, landing_within, lr_at, lr_factor

PEAK, WARMUP, STEPS = 2e-3, 10, 100


def rates(schedule: "Schedule", warmup: int = WARMUP) -> list[float]:
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


# Closed forms, written out: s is the number of the update, from 1

Schedule = Constant | Cosine | Linear | OneMinusSqrt | InverseSqrt | Power | WSD
SHAPES = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "one_minus_sqrt": lambda p: 1 - p**0.5,
}


def wsd(shape: str, length: float, low: float) -> Callable[[int], float]:
    def ratio(s: int) -> float:
        progress = max(0.0, (s - (STEPS - length)) / length)
        return low + (1 - low) * SHAPES[shape](progress)

    return ratio


WRITTEN: list[tuple[Schedule, Callable[[int], float]]] = [
    (Constant(), lambda s: 1.0),
    (Linear(min_ratio=0.2), lambda s: 1 - 0.8 * (s - 10) / 90),
    (Cosine(min_ratio=0.1), lambda s: 0.1 + 0.9 * (1 + math.cos(math.pi * (s - 10) / 90)) / 2),
    (OneMinusSqrt(min_ratio=0.3), lambda s: 0.3 + 0.7 * (1 - math.sqrt((s - 10) / 90))),
    (InverseSqrt(), lambda s: math.sqrt(10 / s)),
    (Power(), lambda s: (10 / s) ** 0.51),
    (Power(exponent=0.7, peak_steps=40), lambda s: 1.0 if s <= 40 else (40 / s) ** 0.7),
    (WSD(), wsd("linear", 20, 0.0)),
    (WSD(shape="one_minus_sqrt", decay_steps=35, min_ratio=0.05), wsd("one_minus_sqrt", 35, 0.05)),
    (WSD(shape="cosine", decay_fraction=0.5), wsd("cosine", 50, 0.0)),
    (WSD(decay_steps=7, decay_fraction=0.9), wsd("linear", 7, 0.0)),
]


@pytest.mark.parametrize(("schedule", "ratio"), WRITTEN)
def test_after_the_warm_up_every_schedule_is_its_published_form(
    schedule: Schedule, ratio: Callable[[int], float]
) -> None:
    found = rates(schedule)
    assert found[:WARMUP] == pytest.approx([PEAK * s / 10 for s in range(1, 11)])
    assert found[WARMUP:] == pytest.approx([PEAK * ratio(s) for s in range(11, STEPS + 1)], abs=1e-15)


@pytest.mark.parametrize(("schedule", "ratio"), WRITTEN)
def test_no_schedule_jumps(schedule: Schedule, ratio: Callable[[int], float]) -> None:
    """In a long run the largest change between two updates is the steepest the form allows: 1 - sqrt falls by a root at its start."""
    config = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=1000)
    long = [lr_at(step, config, 10_000) for step in range(10_000)]
    length = schedule.decay_steps or 10_000 * schedule.decay_fraction if isinstance(schedule, WSD) else 9000
    rooted = isinstance(schedule, OneMinusSqrt) or getattr(schedule, "shape", "") == "one_minus_sqrt"
    steepest = max(math.sqrt(1 / length) if rooted else 1.6 / length, 1e-3)
    assert max(abs(a - b) for a, b in itertools.pairwise(long)) <= steepest * 1.0001


def test_the_power_law_of_tokens_is_the_one_of_steps_for_a_batch_that_stays() -> None:
    """arXiv:2408.13359: min(lr, a x batch x tokens^b) with a = 4, b = -0.51; the step at which it meets lr is the amplitude."""
    rows, seq_len, lr = 128, 4096, 0.02
    meets = (lr / (4 * rows)) ** (1 / -0.51) / (rows * seq_len)
    config = OptimConfig(lr=lr, warmup_steps=10, schedule=Power(peak_steps=round(meets)))
    for step in (20, round(meets) - 1, 3 * round(meets), 100 * round(meets)):
        law = min(lr, 4 * rows * ((step + 1) * rows * seq_len) ** -0.51)
        assert lr_at(step, config, 10**9) == pytest.approx(law, rel=0.51 / meets)


@pytest.mark.parametrize("schedule", [OneMinusSqrt(), InverseSqrt(), Power(), WSD(decay_steps=90)])
@pytest.mark.parametrize(("warmup", "steps"), [(80, 100), (150, 100)])
def test_the_new_schedules_too_stay_below_the_warm_up(schedule: Schedule, warmup: int, steps: int) -> None:
    config = OptimConfig(lr=PEAK, schedule=schedule, warmup_steps=warmup)
    for step in range(min(warmup, steps)):
        assert 0 <= lr_at(step, config, steps) <= PEAK * (step + 1) / warmup + 1e-18


@pytest.mark.parametrize("schedule", [WSD(), WSD(decay_fraction=0.37), WSD(decay_steps=12)])
@pytest.mark.parametrize("step", [1, 7, 100, 1234])
def test_a_decay_that_begins_now_begins_now_and_ends_at_its_landing(schedule: WSD, step: int) -> None:
    end = landing(schedule, step)
    last = end.last_step
    assert end.decay_steps == decay_steps(schedule, last)
    assert step <= decay_begins(schedule, last) < step + 1
    config = OptimConfig(lr=PEAK, schedule=schedule, warmup_steps=0)
    assert lr_at(step - 1, config, last) == PEAK
    assert lr_at(step + 1, config, last) < PEAK
    assert lr_at(last - 1, config, last) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("schedule", [WSD(decay_fraction=0.5), WSD(decay_steps=50)])
def test_a_decay_without_time_is_cut_to_the_time_there_is_and_to_no_less_than_a_step(schedule: WSD) -> None:
    assert [landing_within(schedule, 50, left) for left in (90, 50, 49)] == [landing(schedule, 50)] * 3
    assert [landing_within(schedule, 50, left) for left in (48, 2, 1, 0)] == [
        Landing(98, 48),
        Landing(52, 2),
        Landing(51, 1),
        Landing(51, 1),
    ]
    config = OptimConfig(lr=PEAK, schedule=schedule, warmup_steps=0)
    rates = [lr_at(step, config, 54, 4) for step in range(48, 54)]
    assert rates == pytest.approx([PEAK, PEAK, 0.75 * PEAK, 0.5 * PEAK, 0.25 * PEAK, 0.0], abs=1e-12)


def test_a_share_is_of_the_steps_after_those_that_the_weights_had_before() -> None:
    assert landing(WSD(decay_fraction=0.25), 115, 100) == Landing(120, 5.0)
    assert landing(WSD(decay_fraction=0.25), 100, 100) == Landing(101, 0.25)
    assert landing(WSD(decay_steps=9), 115, 100) == Landing(124, 9)


def test_a_ramp_of_the_batch_moves_the_rate_by_its_root_or_in_proportion() -> None:
    assert [ramp_factor(rows, 32, "none") for rows in (8, 32, 128)] == [1, 1, 1]
    assert [ramp_factor(rows, 32, "sqrt") for rows in (8, 32, 128)] == [0.5, 1, 2]
    assert [ramp_factor(rows, 32, "linear") for rows in (8, 32, 128)] == [0.25, 1, 4]
