"""Faults that last: slow spikes, updates out of line, frozen and creeping gradients, drifting logits, leaked and repeated data."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from guard_series import THRESHOLDS, Watch, calm, falling, step
from surefoot.guard.detectors import DetectorState, limits_of, observe_step
from surefoot.guard.finding import Finding
from surefoot.guard.limits import Limits
from surefoot.guard.signals import BatchFacts, StepSignals


def kinds(watch: Watch, kind: str) -> list[Finding]:
    return [finding for finding in watch.findings if finding.kind == kind]


def rising(num_steps: int, start: float, per_step: float, **more: Any) -> list[StepSignals]:
    draw = random.Random(7)
    return [step(start + per_step * n + draw.gauss(0, 0.02), 0.25, **more) for n in range(num_steps)]


# Slow spikes


def test_a_slow_rise_is_found_traced_to_its_best_and_said_again_when_it_has_doubled() -> None:
    watch = Watch().all(calm(300) + rising(400, 2.2, 0.002))
    first, *again = kinds(watch, "slow_spike")
    assert first.severity == "alarm"
    assert 330 < first.batch_index < 470
    assert first.onset < 310
    assert len(again) == 2  # 0.2 and 0.4 nats
    assert again[0].text.startswith("still rising")
    assert kinds(watch, "loss_spike") == []


def test_a_rise_within_what_is_allowed_and_one_that_does_not_last_are_not_said() -> None:
    small = Watch().all(calm(300) + rising(300, 2.2, 0.0003))
    sensitive = replace(THRESHOLDS, slow_nats=0.03)
    short = Watch(sensitive).all(calm(300) + calm(12, loss=2.38, seed=1) + calm(200, seed=2))
    assert kinds(small, "slow_spike") == kinds(short, "slow_spike") == []


def test_noise_alone_makes_no_slow_spike_on_a_long_plateau() -> None:
    assert kinds(Watch().all(calm(3000, sigma=0.3)), "slow_spike") == []


def test_a_rewarmed_rate_may_raise_the_loss_but_not_for_ever() -> None:
    decayed = calm(300, lr=1e-4)
    rewarmed = [step(2.2 + 0.2 * min(1, n / 100), 0.25, lr=1e-3) for n in range(400)]
    assert kinds(Watch().all([*decayed, *rewarmed]), "slow_spike") == []
    same_rate = [replace(signals, lr=1e-4) for signals in rewarmed]
    assert kinds(Watch().all([*decayed, *same_rate]), "slow_spike")
    diverging = [step(2.2 + 0.004 * n, 0.25, lr=1e-3) for n in range(300)]
    assert kinds(Watch().all([*decayed, *diverging]), "slow_spike")


def test_a_new_regime_starts_the_best_anew() -> None:
    harder = [replace(signals, regime=1) for signals in calm(300, loss=2.6, seed=3)]
    assert kinds(Watch().all([*calm(300), *harder]), "slow_spike") == []


# Updates


def updates(
    num_steps: int, size: float = 0.3, sigma: float = 0.05, seed: int = 0, lr: float = 1e-3
) -> list[StepSignals]:
    draw = random.Random(seed)
    return [
        replace(s, lr=lr, update_size=lr * size * math.exp(draw.gauss(0, sigma))) for s in calm(num_steps, seed=seed)
    ]


@pytest.mark.parametrize(("times", "found"), [(10.0, 1), (0.1, 1), (1.5, 0), (0.7, 0)])
def test_an_update_out_of_line_with_the_rate_is_an_alarm_either_way(times: float, found: int) -> None:
    watch = Watch().all([*updates(100), *updates(5, size=0.3 * times, seed=1)])
    alarms = kinds(watch, "update_size")
    assert len(alarms) == found  # five steps, one finding
    if found:
        assert watch.state.updates.baseline.center == pytest.approx(
            Watch().all(updates(100)).state.updates.baseline.center
        )
        assert alarms[0].batch_index == 100
        assert f"{times:g} times"[:2] in alarms[0].text


def test_adams_first_updates_and_a_warm_up_raise_no_alarm() -> None:
    series = [
        replace(s, lr=1e-3 * (n + 1) / 200, update_size=1e-3 * (n + 1) / 200 * (0.2 + 0.8 * math.exp(-n / 6)))
        for n, s in enumerate(calm(200))
    ]
    assert Watch().all(series).alarms() == []


def test_an_update_that_moved_nothing_is_an_alarm_unless_the_rate_has_run_out() -> None:
    (lost,) = kinds(Watch().all([*updates(100), replace(updates(1)[0], update_size=0.0)]), "update_size")
    assert "silently lost" in lost.text
    spent = [replace(s, lr=1e-9, update_size=0.0) for s in calm(5)]
    assert kinds(Watch().all([*updates(100), *spent]), "update_size") == []


def test_an_update_too_large_for_a_dipped_rate_is_only_said_while_it_is_no_larger_than_those_before_the_dip() -> None:
    watch = Watch().all([*updates(100), *updates(10, lr=1e-4, seed=1), *updates(5, size=3.0, lr=1e-4, seed=2)])
    (warning,) = kinds(watch, "update_size")
    assert (warning.severity, warning.batch_index) == ("warning", 110)
    assert watch.alarms() == []
    (alarm,) = watch.see(replace(updates(1)[0], lr=1e-4, update_size=1e-3))  # three times the usual size
    assert (alarm.kind, alarm.severity) == ("update_size", "alarm")
    small = Watch().all([*updates(100), *updates(10, lr=1e-4, seed=1), *updates(1, size=0.03, lr=1e-4, seed=2)])
    assert [f.severity for f in kinds(small, "update_size")] == ["alarm"]  # too small is an alarm at any rate


def test_what_updates_the_weights_have_borne_fades_and_survives_being_saved() -> None:
    watch = Watch().all([*updates(100), *updates(400, lr=1e-4, seed=1)])
    assert 3e-5 < watch.state.updates.largest < 6e-5  # a fifth of 3e-4 and of its usual scatter
    saved = json.loads(json.dumps(watch.state.to_dict(), allow_nan=False))
    assert DetectorState.from_dict(saved) == watch.state


def test_an_update_size_that_stays_is_the_usual_one_in_the_end() -> None:
    watch = Watch().all([*updates(100), *updates(40, size=3.0, seed=1)])
    assert len(kinds(watch, "update_size")) == 1
    assert "update_size" not in watch.state.active
    assert watch.scores.update_size < 8


def test_the_optimisers_own_count_must_be_the_runs() -> None:
    watch = Watch()
    for n, signals in enumerate(calm(30)):
        watch.see(replace(signals, optimizer_steps=n + 1 + (n >= 20)))
    (finding,) = kinds(watch, "optimizer_steps")
    assert finding.batch_index == 20
    assert "22 updates, the run 21" in finding.text


# Gradients


def test_a_gradient_norm_that_is_the_same_to_the_bit_four_times_is_said_once() -> None:
    watch = Watch().all([*calm(50), *[step(2.2, 0.2468) for _ in range(9)]])
    (finding,) = kinds(watch, "frozen_gradient")
    assert (finding.batch_index, finding.onset, finding.severity) == (53, 50, "warning")
    watch.all([*calm(10, seed=3), *[step(2.2, 0.25) for _ in range(4)]])
    assert len(kinds(watch, "frozen_gradient")) == 2


def test_a_log_that_prints_few_digits_is_not_frozen() -> None:
    watch = Watch().all([replace(s, gradient_norm=round(s.gradient_norm, 1)) for s in calm(300)])
    assert kinds(watch, "frozen_gradient") == []


def test_a_gradient_that_creeps_up_for_long_is_a_warning() -> None:
    grown = [step(2.2, 0.25 * math.exp(min(n / 200, 2.2)) * (1 + 0.1 * (n % 7) / 7)) for n in range(800)]
    watch = Watch().all([*calm(200), *grown])
    (finding,) = kinds(watch, "gradient_creep")
    assert finding.severity == "warning"
    assert kinds(Watch().all(calm(1200)), "gradient_creep") == []


def test_the_embeddings_gradient_has_a_baseline_of_its_own() -> None:
    series = [replace(s, role_gradient_norms=(("hidden", 0.2), ("embedding", s.gradient_norm / 5))) for s in calm(100)]
    watch = Watch().all(series)
    assert watch.findings == []
    watch.see(replace(series[0], role_gradient_norms=(("hidden", 0.2), ("embedding", 0.9))))
    (finding,) = kinds(watch, "embedding_gradient")
    assert (finding.severity, finding.where) == ("warning", "embedding")
    assert math.exp(watch.state.embedding.values[-1]) < 0.5  # the spike enters as its limit


def test_output_logits_that_drift_away_are_a_warning() -> None:
    series = [replace(s, logsumexp_mean=9.0 + 0.05 * max(0, n - 100)) for n, s in enumerate(calm(1200))]
    watch = Watch().all(series)
    (finding,) = kinds(watch, "logit_drift")
    assert "z-loss" in finding.text
    steady = [replace(s, logsumexp_mean=9.0 + 0.2 * (n % 5)) for n, s in enumerate(calm(400))]
    assert kinds(Watch().all(steady), "logit_drift") == []


# Data


def texts(num_steps: int, seed: int = 0, **more: Any) -> list[StepSignals]:
    draw = random.Random(seed)
    return [
        replace(s, facts=BatchFacts(copied=0.05 + draw.gauss(0, 0.004), repeated=abs(draw.gauss(0, 0.001))), **more)
        for s in calm(num_steps, seed=seed)
    ]


def test_misaligned_targets_are_an_alarm_from_the_first_batch() -> None:
    (finding,) = Watch().see(step(8.3, 2.0, facts=BatchFacts(misaligned=0.98)))
    assert (finding.kind, finding.severity) == ("misaligned", "alarm")
    assert "98" in finding.text
    assert Watch().see(step(8.3, 2.0, facts=BatchFacts(misaligned=0.0005))) == ()


@pytest.mark.parametrize(
    ("facts", "where"), [(BatchFacts(copied=0.97), "copied"), (BatchFacts(copied=0.05, repeated=0.9), "repeated")]
)
def test_a_loss_out_of_its_band_with_tokens_that_say_why_is_an_alarm_either_way(facts: BatchFacts, where: str) -> None:
    watch = Watch().all(texts(100))
    (low,) = watch.see(step(0.3, 0.25, facts=facts))
    assert (low.kind, low.severity, low.where) == ("too_good", "alarm", where)
    high = watch.see(step(5.0, 0.25, facts=facts))[-1]
    assert (high.kind, high.severity, high.where) == ("loss_spike", "alarm", where)
    assert "usually" in high.text


def test_tokens_that_are_odd_are_no_alarm_inside_the_band_but_a_plain_leak_is() -> None:
    watch = Watch().all(texts(100))
    assert watch.see(step(2.2, 0.25, facts=BatchFacts(copied=0.05, repeated=0.9))) == ()
    assert watch.see(step(2.2, 0.25, facts=BatchFacts(copied=0.45))) == ()
    (leak,) = watch.see(step(2.2, 0.25, facts=BatchFacts(copied=0.97)))
    assert (leak.kind, leak.severity, leak.where) == ("too_good", "alarm", "copied")


def test_the_device_refuses_what_the_tokens_show_and_nothing_else() -> None:
    watch = Watch().all(texts(100))
    limits = limits_of(watch.state, THRESHOLDS)
    assert limits.odd(BatchFacts(copied=0.45))
    assert not limits.odd(BatchFacts(copied=0.05))
    assert limits.wrong(BatchFacts(copied=0.97))
    assert not limits.wrong(BatchFacts(copied=0.45, repeated=0.9))
    assert limits.wrong(BatchFacts(misaligned=0.002))
    assert not limits.wrong(BatchFacts(misaligned=0.0005))
    assert 0.3 < limits.loss_floor < 2.2
    assert not Limits().odd(BatchFacts(copied=1.0, repeated=1.0))
    assert not Limits().wrong(BatchFacts(copied=1.0))


def test_a_diluted_leak_is_found_by_a_smaller_drop_than_an_unexplained_one() -> None:
    watch = Watch().all(texts(100))
    (finding,) = watch.see(step(2.05, 0.25, facts=BatchFacts(copied=0.14)))
    assert (finding.kind, finding.severity) == ("too_good", "alarm")
    # One row of eight, in a real small batch, whose loss falls by five sigmas.
    dashes = BatchFacts(copied=0.05, repeated=0.125)
    assert Watch().all(texts(100)).see(step(2.09, 0.25, facts=dashes)) == ()
    unexplained = Watch().all([*texts(100), step(1.9, 0.25), step(1.9, 0.25)])
    assert unexplained.findings == []


def test_too_good_without_evidence_is_a_warning_said_once_at_its_second_step() -> None:
    watch = Watch().all([*texts(100), step(1.2, 0.25)])
    assert watch.findings == []
    watch.all([step(1.2, 0.25), step(1.2, 0.25)])
    assert [(f.kind, f.severity, f.batch_index) for f in watch.findings] == [("too_good", "warning", 101)]


def test_data_that_always_repeat_are_no_evidence() -> None:
    tables = [replace(s, facts=BatchFacts(copied=0.3, repeated=0.4 + 0.02 * (n % 3))) for n, s in enumerate(calm(100))]
    watch = Watch().all(tables)
    assert watch.see(step(1.9, 0.25, facts=BatchFacts(copied=0.3, repeated=0.45))) == ()


def test_what_stood_out_is_usual_once_its_level_is_accepted() -> None:
    watch = Watch().all(texts(100))
    other = BatchFacts(copied=0.3)
    watch.all([step(1.9, 0.25, facts=other)] * 8)  # the eighth is accepted
    assert [f.kind for f in watch.findings] == ["too_good"] * 8
    assert watch.see(step(1.6, 0.25, facts=other)) == ()


# Steps refused


def test_a_refused_step_leaves_only_its_values_waiting() -> None:
    watch = Watch().all([*texts(60), *[step(2.2, 0.25, facts=BatchFacts(copied=0.05))] * 2])
    refused = replace(
        step(9.0, 4.0, facts=BatchFacts(copied=0.9), lr=1e-3, update_size=0.0), batch_index=62, step=62, applied=False
    )
    after = observe_step(watch.state, refused, THRESHOLDS).state
    cleared = {name: replace(getattr(after, name), rejected=()) for name in ("loss", "document", "gradient")}
    assert replace(after, **cleared) == watch.state
    assert after.loss.rejected == (9.0,)


def test_a_whole_steep_early_run_with_everything_measured_raises_no_alarm() -> None:
    fall = [2.0 + 8.4 * (1 + n / 30) ** -0.7 for n in range(1500)]
    series = [
        replace(
            s,
            lr=1e-3 * min(1, (n + 1) / 100),
            update_size=1e-3 * min(1, (n + 1) / 100) * (0.25 + 0.75 * math.exp(-n / 8)),
            document_loss_max=s.loss + 1.5,
            logsumexp_mean=9 - 3 * math.exp(-n / 50),
            role_gradient_norms=(("embedding", s.gradient_norm / 3),),
            facts=BatchFacts(copied=0.04 + 0.01 * (n % 3), repeated=0.001 * (n % 2)),
        )
        for n, s in enumerate(falling(1500, fall))
    ]
    watch = Watch().all(series)
    assert watch.findings == []
