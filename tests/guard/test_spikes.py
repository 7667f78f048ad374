"""Fast spikes: the published ones, steep falls, level shifts, and the faults that published detectors have."""

import json
import math
import random
import struct
from dataclasses import replace

import pytest

from guard_series import THRESHOLDS, Watch, calm, falling, step
from surefoot.guard.detectors import DetectorState, accept_level, limits_of, observe_step
from surefoot.guard.signals import StepSignals
from tolerances import TREND_NATS

# (iteration, loss, gradient norm), bigscience chronicles as quoted in science.md 1.2
BLOOM = [
    (31214, 2.198845, 0.242), (31215, 2.220424, 0.947), (31216, 2.595213, 2.390), (31217, 2.241558, 15.886),
    (31218, 2.345279, 145.119), (31219, 5.098124, 960.351), (31220, 3.492029, 353.201), (31221, 3.213059, 379.330),
    (31222, 2.804948, 650.246), (31250, 2.215699, 0.267), (31251, 2.235667, 0.205),
]  # fmt: skip
WIDE = [(11446, 3.062589, 12952.562), (11447, 3.114286, 262623.331), (11448, 7.712340, 254699.302)]
WIDE_EARLIER = [
    (8738, 3.317482, 231817.368), (8739, 3.417051, 89608.482), (8740, 3.682950, 1490753.218),
    (8741, 7.267764, 3273877.676), (8742, 4.130868, 1839649.510), (8743, 7.596509, 1369067.435),
]  # fmt: skip


def after_calm(lines: list[tuple[int, float, float]], loss: float, norm: float, seed: int) -> list[tuple[int, str]]:
    """(iteration, kind) of the alarms on published lines that follow 200 calm steps."""
    watch = Watch().all(calm(200, loss, norm, seed=seed))
    assert watch.alarms() == []
    found = []
    for iteration, value, gradient in lines:
        found += [
            (iteration, finding.kind) for finding in watch.see(step(value, gradient)) if finding.severity == "alarm"
        ]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_blooms_spike_is_seen_by_its_gradient_three_steps_before_the_loss_peaks(seed: int) -> None:
    alarms = after_calm(BLOOM, 2.2, 0.25, seed)
    assert min(i for i, kind in alarms if kind == "gradient_spike") == 31216
    assert (31219, "loss_spike") in alarms
    assert max(i for i, _ in alarms) == 31222  # back to normal at 31250: nothing more is said


@pytest.mark.parametrize("seed", range(5))
def test_the_wide_104bs_spikes_are_seen_a_step_before_the_loss(seed: int) -> None:
    assert after_calm(WIDE, 3.06, 13_000, seed)[0] == (11447, "gradient_spike")
    assert after_calm(WIDE_EARLIER, 3.32, 150_000, seed)[0][0] == 8740


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_divergence_logged_every_ten_steps_is_seen(seed: int) -> None:
    slow = [(6900, 6.365808), (6910, 6.598378), (6920, 7.314456), (6930, 9.121927), (6940, 10.23865)]
    watch = Watch().all(calm(200, 6.36, sigma=0.03, seed=seed))
    for iteration, loss in slow:  # noqa: B007 -- which it was is asserted
        signals = replace(step(loss, math.nan), gradient_known=False)
        if any(finding.severity == "alarm" for finding in watch.see(signals)):
            break
    assert iteration <= 6920


FALLS = {
    "exponential": [3.5 + 7 * math.exp(-n / 25) for n in range(400)],
    "power law": [1.8 + 9 * (1 + n / 8) ** -0.6 for n in range(400)],
    "flat during warm-up, then steep": [10.5 - 6 / (1 + math.exp(-(n - 22) / 5)) for n in range(400)],
    "public GPT-3 15B": [
        *(12.956, 12.915, 12.061, 11.966, 11.862, 11.824, 11.606, 11.127, 10.996, 10.825, 10.616, 10.592, 10.391, 10.206, 10.148),
        *(9.958, 9.831, 9.716, 9.603, 9.503, 9.404, 9.309, 9.217, 9.128, 9.042),
        *(9.0 - 0.06 * n for n in range(60)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FALLS)
@pytest.mark.parametrize("seed", range(4))
def test_a_steep_fall_raises_no_alarm_and_a_spike_in_it_does(name: str, seed: int) -> None:
    fall = FALLS[name]
    healthy = falling(len(fall), fall, seed=seed)
    assert Watch().all(healthy).alarms() == []
    for at in (20, 25, 30, 50):
        watch = Watch().all(healthy[:at])
        spiked = replace(healthy[at], loss=healthy[at].loss + 2.5)
        assert [f.kind for f in watch.see(spiked)] == ["loss_spike"], at
        assert watch.see(healthy[at]) == ()


def test_the_devices_limit_is_the_alarm_to_the_bit() -> None:
    watch = Watch().all(calm(100, document_loss_max=4.0))
    limits = limits_of(watch.state, THRESHOLDS)
    for name, limit in (
        ("loss", limits.loss), ("gradient_norm", limits.gradient_norm), ("document_loss_max", limits.document_loss)
    ):  # fmt: skip
        assert struct.unpack("f", struct.pack("f", limit))[0] == limit  # the same number in fp32
        normal = replace(step(2.2, 0.25, document_loss_max=4.0), batch_index=100, step=101)
        at = observe_step(watch.state, replace(normal, **{name: limit}), THRESHOLDS)
        beyond = observe_step(watch.state, replace(normal, **{name: math.nextafter(limit, math.inf)}), THRESHOLDS)
        assert not [f for f in at.findings if f.severity == "alarm"]
        assert [f.severity for f in beyond.findings] == ["alarm"]
        assert beyond.state.loss.values == watch.state.loss.values


def test_a_gradient_between_clipping_and_refusal_is_said_once_and_enters_as_clipped() -> None:
    watch = Watch().all(calm(100))
    limits = limits_of(watch.state, THRESHOLDS)
    assert 0.4 < limits.clip_norm < limits.gradient_norm
    norm = 0.9 * limits.gradient_norm
    first = watch.see(step(2.2, norm))
    assert [(f.kind, f.severity) for f in first] == [("gradient_spike", "warning")]
    assert math.exp(watch.state.gradient.values[-1]) == pytest.approx(limits.clip_norm)
    assert watch.see(step(2.2, norm)) == ()


def test_noise_with_both_sigmas_and_a_large_ratio_is_needed_for_a_gradient_alarm() -> None:
    quiet = Watch().all(calm(100))
    assert (
        quiet.see(step(2.2, 0.25 * 4)) == () or quiet.findings[-1].severity == "warning"
    )  # 14 sigmas, but only 4 times
    assert quiet.see(step(2.2, 0.25 * 9))[0].severity == "alarm"


def test_ten_times_the_trend_is_an_alarm_at_half_the_sigmas() -> None:
    draw = random.Random(0)
    wide = [replace(s, gradient_norm=0.25 * math.exp(draw.gauss(0, 0.32))) for s in calm(200)]
    watch = Watch().all(wide)
    assert watch.alarms() == []
    (finding,) = watch.see(step(2.2, 0.25 * 11.5))
    assert (finding.kind, finding.severity) == ("gradient_spike", "alarm")
    assert 5 < finding.z < 10


def test_healthy_outliers_of_the_gradient_widen_its_band_and_a_great_spike_is_still_seen() -> None:
    def after(outliers: bool) -> Watch:
        watch = Watch()
        for n, signals in enumerate(calm(300)):
            watch.see(replace(signals, gradient_norm=0.25 * 5.0) if outliers and n in (150, 240) else signals)
        return watch

    assert after(outliers=True).findings == []
    assert [f.severity for f in after(outliers=False).see(step(2.2, 0.25 * 9))] == ["alarm"]
    assert after(outliers=True).see(step(2.2, 0.25 * 9)) == ()
    assert [f.severity for f in after(outliers=True).see(step(2.2, 0.25 * 60))] == ["alarm"]


def test_a_bad_document_is_seen_by_the_largest_document_loss_alone() -> None:
    watch = Watch().all([replace(s, document_loss_max=3.4 + 0.2 * math.sin(n)) for n, s in enumerate(calm(100))])
    (finding,) = watch.see(step(2.21, 0.25, document_loss_max=9.5))
    assert finding.kind == "document_spike"
    assert "9.5" in finding.text


# The five failures of systems.md a.3, each a case that a published detector gets wrong


def test_a_nan_does_not_blind_the_window() -> None:
    watch = Watch().all(calm(100))
    for bad in (math.nan, math.inf):
        assert [f.kind for f in watch.see(step(bad, 0.25))] == ["nonfinite"]
    assert watch.all(calm(20, seed=9)).alarms()[2:] == []  # every clean step is taken
    assert [f.kind for f in watch.see(step(5.0, 0.25))] == ["loss_spike"]


def test_a_refused_spike_does_not_enter_its_own_baseline() -> None:
    watch = Watch().all(calm(100, loss=2.0))
    before = watch.state
    assert watch.see(step(5.0, 0.25))
    assert watch.state == replace(
        before, **{name: getattr(watch.state, name) for name in ("loss", "document", "gradient")}
    )
    watch.all(calm(10, loss=2.0, seed=4))
    assert [f.kind for f in watch.see(step(3.0, 0.25))] == ["loss_spike"]


def test_a_resumed_detector_sees_at_once() -> None:
    watch = Watch().all(calm(100))
    saved = json.loads(json.dumps(watch.state.to_dict(), allow_nan=False))
    resumed = Watch(state=DetectorState.from_dict(saved))
    assert resumed.state == watch.state
    assert [f.kind for f in resumed.see(step(5.0, 0.25))] == ["loss_spike"]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_fivefold_spike_of_any_length_is_seen_at_every_step_of_it(length: int) -> None:
    watch = Watch().all(calm(100))
    for n in range(length):
        assert [f.kind for f in watch.see(step(11.0 + 0.1 * n, 0.25))] == ["loss_spike"]
    assert watch.see(step(2.2, 0.25)) == ()


@pytest.mark.parametrize("sigmas", [4.0, 20.0, 100.0])
def test_no_setting_disables_the_detector(sigmas: float) -> None:
    watch = Watch(replace(THRESHOLDS, loss_sigmas=sigmas)).all(calm(100))
    assert [f.kind for f in watch.see(step(11.0, 0.25))] == ["loss_spike"]


# Levels


def test_a_level_shift_is_found_and_normal_once_accepted() -> None:
    watch = Watch().all(calm(100))
    for signals in calm(8, loss=3.0, seed=1):
        assert [f.kind for f in watch.see(signals)] == ["loss_spike"]
    watch.state = accept_level(watch.state)
    watch.findings.clear()
    # What a new mixture does: a steep fall from the new level.
    fall = [2.6 + 0.4 * math.exp(-n / 15) for n in range(120)]
    watch.all([replace(s, gradient_norm=0.25) for s in falling(120, fall, seed=2)])
    assert watch.alarms() == []
    assert [f.kind for f in watch.see(step(3.2, 0.3))] == ["loss_spike"]


def test_a_planned_change_of_regime_raises_no_alarm_and_skips_nothing() -> None:
    watch = Watch().all(calm(100))
    fall = [2.7 + 0.8 * math.exp(-n / 15) for n in range(100)]
    watch.all([replace(s, regime=1) for s in falling(100, fall, seed=2)])
    assert watch.alarms() == []
    assert watch.step == 200
    assert [f.kind for f in watch.see(step(3.4, 0.3, regime=1))] == ["loss_spike"]


def test_a_device_that_did_not_know_of_the_regime_costs_one_step_and_no_alarm() -> None:
    watch = Watch().all(calm(100))
    late = replace(step(3.5, 0.25, regime=1), batch_index=100, step=100, applied=False)
    detected = observe_step(watch.state, late, THRESHOLDS)
    assert detected.findings == ()
    assert limits_of(detected.state, THRESHOLDS).loss == math.inf


def test_the_same_switch_unplanned_is_found() -> None:
    watch = Watch().all(calm(100))
    assert [f.kind for f in watch.see(step(3.5, 0.25))] == ["loss_spike"]


def test_gaps_in_a_log_are_passed_over() -> None:
    steps = calm(300)
    whole, gaps = DetectorState(), DetectorState()
    for n, signals in enumerate(steps):
        at = replace(signals, batch_index=n, step=n + 1)
        whole = observe_step(whole, at, THRESHOLDS).state
        if not 120 <= n < 150:
            gaps = observe_step(gaps, at, THRESHOLDS).state
    # only the farthest outlier fades with the number of values
    assert replace(gaps.loss, peak=0.0) == replace(whole.loss, peak=0.0)
    assert replace(gaps.gradient, peak=0.0) == replace(whole.gradient, peak=0.0)


def test_after_a_long_gap_a_lower_loss_is_no_news_and_a_spike_still_is() -> None:
    watch = Watch().all(calm(100, loss=5.0))
    watch.step = 5000
    watch.all(calm(40, loss=2.5, seed=3))
    assert watch.findings == []
    assert [f.kind for f in watch.see(step(4.0, 0.25))] == ["loss_spike"]


def test_a_missing_loss_part_is_no_verdict() -> None:
    watch = Watch().all(calm(60))
    before = watch.state
    watch.see(step(2.2, 0.25, document_loss_max=math.nan, update_size=math.nan, lr=math.nan))
    assert watch.findings == []
    assert watch.state.document == before.document


# What is no failure


def test_constant_series_plateau_and_sudden_lasting_drop_raise_no_alarm() -> None:
    frozen = Watch().all([step(2.0, 0.5 + n % 7 / 100) for n in range(300)])
    assert frozen.findings == []
    plateau = Watch().all(calm(1500, sigma=0.05))
    assert plateau.alarms() == []
    grokked = Watch().all(calm(200) + calm(200, loss=0.4, norm=0.05, seed=1))
    assert grokked.alarms() == []
    assert [f.kind for f in grokked.findings] == ["too_good"]  # said once, as a warning
    assert grokked.step == 400


def test_memorisation_to_nothing_raises_no_alarm() -> None:
    fall = [4 * math.exp(-n / 60) + 1e-4 for n in range(900)]
    assert Watch().all(falling(900, fall, sigma=0.0)).alarms() == []


def test_logs_in_steps_of_a_thirty_second_raise_no_alarm() -> None:
    watch = Watch().all([replace(s, loss=round(s.loss * 32) / 32) for s in calm(1000, sigma=0.015)])
    assert watch.alarms() == []
    assert [f.kind for f in watch.see(step(2.6875, 0.25))] == ["loss_spike"]


def test_a_batch_without_targets_changes_nothing() -> None:
    watch = Watch().all(calm(60))
    before = watch.state
    empty = StepSignals(batch_index=60, step=60, loss=math.nan, gradient_norm=math.nan, num_targets=0, applied=False)
    assert observe_step(before, empty, THRESHOLDS).state == before


def test_scores_say_where_a_step_stands_and_nothing_before_there_is_a_baseline() -> None:
    watch = Watch()
    watch.see(step(2.2, 0.25))
    assert math.isnan(watch.scores.loss)
    watch.all(calm(100))
    watch.see(step(2.4, 0.25))
    assert 4 < watch.scores.loss < 16
    assert watch.scores.expected_loss == pytest.approx(2.2, abs=TREND_NATS)
