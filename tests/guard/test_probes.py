"""Probes of the inside: attention on its way to ruin, collapse, explosions, stale moments, broken weights."""

import math
from dataclasses import replace

import pytest

from guard_series import THRESHOLDS
from surefoot.guard.detectors import DetectorState, observe_probe
from surefoot.guard.finding import Finding
from surefoot.guard.signals import MISSING, LayerProbe, ProbeSignals, RoleProbe

HEALTHY = LayerProbe(layer=0, attention_logit_max=5.0, attention_entropy=0.6, activation_rms=1.0, activation_max=8.0)
HIDDEN = RoleProbe(role="hidden", weight_norm=10.0, update_norm=0.01, largest_weight=4.5, rms_t=1.0)


def probes(layers: list[LayerProbe], roles: list[RoleProbe], beta2: float = 0.95) -> list[ProbeSignals]:
    """One probe per item, every 50 steps."""
    return [
        ProbeSignals(step=50 * (n + 1), layers=(layer,), roles=(role,), beta2=beta2)
        for n, (layer, role) in enumerate(zip(layers, roles, strict=True))
    ]


def watched(series: list[ProbeSignals], total_steps: int = 100_000) -> list[Finding]:
    state, found = DetectorState(), []
    for probe in series:
        detected = observe_probe(state, probe, THRESHOLDS, total_steps)
        state = detected.state
        found += detected.findings
    return found


def logits(values: list[float], total_steps: int = 100_000) -> list[Finding]:
    layers = [replace(HEALTHY, layer=3, attention_logit_max=value) for value in values]
    return watched(probes(layers, [HIDDEN] * len(values)), total_steps)


def test_growing_attention_logits_are_forecast_with_layer_and_step() -> None:
    growth = [20 * 1.3**n for n in range(9)]  # beyond 100 at the 8th probe, 1e4 at step 50 * 24.7
    (finding,) = logits(growth)
    assert (finding.kind, finding.severity, finding.where) == ("attention_growth", "alarm", "layer 3")
    assert "at this slope layer 3 reaches 1e4 at step 1,23" in finding.text


def test_growth_that_arrives_after_the_runs_end_is_a_warning() -> None:
    (finding,) = logits([20 * 1.3**n for n in range(10)], total_steps=1000)
    assert finding.severity == "warning"


def test_growth_that_slows_down_is_not_continued() -> None:
    slowing = [40 + 80 * (1 - math.exp(-n / 3)) for n in range(20)]
    assert [f.severity for f in logits(slowing)] == ["warning"]


def test_large_logits_that_stand_still_and_small_ones_that_grow_are_not_said() -> None:
    assert logits([150.0, 151.0, 149.5, 150.5, 150.0, 149.0, 151.0, 150.0]) == []
    assert logits([1 * 1.3**n for n in range(15)]) == []


def test_an_alarm_is_said_again_when_its_excess_has_doubled_and_anew_after_it_has_ended() -> None:
    growth = [20 * 1.3**n for n in range(14)]  # 125 at the 8th, above 200 at the 10th, above 400 at the 13th
    assert [f.severity for f in logits(growth)] == ["alarm"] * 3
    assert len(logits([2e4, 2e4, 5.0, 5.0, 2e4])) == 2


def test_a_layer_that_has_gone_silent_is_no_growth() -> None:
    assert logits([20 * 1.3**n for n in range(5)] + [0.0, 0.0, 0.0]) == []
    assert logits([-1.0, -0.5, 0.0, -0.1, 0.0]) == []


def test_logits_beyond_ruin_are_an_alarm_at_once_and_said_once() -> None:
    (finding,) = logits([2e4, 2e4, 2.1e4])
    assert finding.severity == "alarm"
    assert "diverged" in finding.text
    assert [f.severity for f in logits([math.inf])] == ["alarm"]


@pytest.mark.parametrize(
    ("entropies", "found"), [([0.6, 0.5, 0.01, 0.01, 0.01], 1), ([0.6, 0.01, 0.5], 0), ([0.015] * 5, 0)]
)
def test_entropy_collapse_needs_two_probes_in_a_row_and_a_higher_past(entropies: list[float], found: int) -> None:
    layers = [replace(HEALTHY, attention_entropy=value) for value in entropies]
    findings = watched(probes(layers, [HIDDEN] * len(layers)))
    assert [f.kind for f in findings] == ["entropy_collapse"] * found


def test_activations_ten_times_what_they_were_or_not_finite_are_an_alarm() -> None:
    layers = [HEALTHY] * 4
    exploded = watched(probes([*layers, replace(HEALTHY, activation_rms=12.0)], [HIDDEN] * 5))
    assert [(f.kind, f.where) for f in exploded] == [("activation_explosion", "layer 0")]
    assert [f.kind for f in watched(probes([replace(HEALTHY, activation_rms=math.inf)], [HIDDEN]))] == [
        "activation_explosion"
    ]
    two = ProbeSignals(step=50, layers=(HEALTHY, replace(HEALTHY, layer=1, activation_rms=math.nan)))
    assert [f.where for f in watched([two])] == ["layer 1"]
    assert watched([ProbeSignals(step=50, layers=(LayerProbe(layer=0), LayerProbe(layer=1)))]) == []
    assert watched(probes([replace(HEALTHY, activation_rms=1.3**n) for n in range(12)], [HIDDEN] * 12)) == []


def activations(values: list[float]) -> list[str]:
    series = [replace(HEALTHY, activation_rms=value) for value in values]
    return [f.kind for f in watched(probes(series, [HIDDEN] * len(series)))]


def test_activations_that_grow_out_of_their_start_are_healthy_and_a_leap_over_all_past_ones_is_not() -> None:
    # Measured: probes every 10 and every 50 steps of clean runs, the first after step 1.
    assert activations([0.0191, 0.0503, 0.328, 0.63, 0.436, 0.537, 0.588, 0.659]) == []
    assert activations([0.02, 0.41, 0.46, 0.23, 0.39, 0.39, 0.41]) == []
    healthy = [0.02, 1.4, 0.3, 0.4, 0.3, 0.3]
    assert activations([*healthy, 12.0]) == []  # 30 times the median, not ten times the largest
    assert activations([*healthy, 15.0]) == ["activation_explosion"]
    assert activations([*healthy, 15.0, 300.0]) == ["activation_explosion"]  # said once while it goes on
    assert activations([*healthy, 15.0, 15.0, 300.0]) == ["activation_explosion"] * 2


@pytest.mark.parametrize(("beta2", "stale", "fine"), [(0.95, 1.8, 1.6), (0.99, 2.4, 2.2), (0.999, 4.0, 3.2)])
def test_a_stale_second_moment_is_judged_by_its_ceiling_and_by_what_is_usual(
    beta2: float, stale: float, fine: float
) -> None:
    usual = replace(HIDDEN, rms_t=0.7)

    def found(*roles: RoleProbe) -> list[str]:
        return [f.kind for f in watched(probes([HEALTHY] * len(roles), list(roles), beta2))]

    assert found(usual, usual, usual, replace(usual, rms_t=stale)) == ["stale_second_moment"]
    assert found(usual, usual, usual, replace(usual, rms_t=fine)) == []
    assert found(usual, usual, replace(usual, rms_t=stale)) == []  # too few to say what is usual
    assert found(HIDDEN, HIDDEN, HIDDEN, replace(HIDDEN, rms_t=min(stale, 2.4))) == []
    for role in ("norm", "bias"):  # few elements: their mean leaps in health
        few = replace(usual, role=role)
        assert found(few, few, few, replace(few, rms_t=stale)) == []
    assert found(*[replace(HIDDEN, role="embedding", rms_t=MISSING)] * 4) == []


def shares(values: list[float], role: str = "hidden", first: int = 50) -> list[Finding]:
    series = [
        ProbeSignals(step=first + 50 * n, roles=(replace(HIDDEN, role=role, update_norm=value * HIDDEN.weight_norm),))
        for n, value in enumerate(values)
    ]
    return watched(series)


def test_an_update_that_is_a_large_share_of_its_weights_is_an_alarm_said_again_when_it_has_doubled() -> None:
    assert shares([0.047, 0.135, 0.04, 0.01]) == []  # the most that clean runs have had
    (finding,) = shares([0.05, 0.25, 0.3, 0.22])
    assert (finding.kind, finding.severity, finding.where) == ("update_ratio", "alarm", "hidden")
    assert "0.25 times the size of hidden weights" in finding.text
    assert len(shares([0.25, 0.5])) == 2
    assert len(shares([0.25, 0.02, 0.25])) == 2
    assert [f.where for f in shares([0.25], role="output")] == ["output"]
    for role in ("embedding", "norm", "bias"):
        assert shares([0.9], role=role) == []
    assert watched([ProbeSignals(step=1, roles=(replace(HIDDEN, weight_norm=0.0, update_norm=1.0),))]) == []


def test_the_first_update_is_held_to_a_third_of_that_so_that_a_missing_warm_up_shows_at_once() -> None:
    assert shares([0.033], first=1) == []  # the largest of a clean run: 1.2e-2 over 20 steps of warm-up
    assert [f.kind for f in shares([0.072], first=1)] == ["update_ratio"]
    assert shares([0.072], first=2) == []


def test_a_weight_or_norm_that_leaps_between_probes_is_an_alarm_at_its_role() -> None:
    leap = watched(probes([HEALTHY] * 3, [HIDDEN, HIDDEN, replace(HIDDEN, largest_weight=120.0)]))
    assert [(f.kind, f.severity, f.where) for f in leap] == [("activation_explosion", "alarm", "hidden")]
    assert "4.5 at the last probe" in leap[0].text
    norm = watched(probes([HEALTHY] * 5, [*[HIDDEN] * 4, replace(HIDDEN, weight_norm=64.0)]))
    assert [f.where for f in norm] == ["hidden"]
    grown = [replace(HIDDEN, weight_norm=1e-3 * 4.0**n, update_norm=1e-5, largest_weight=1 + n / 2) for n in range(3)]
    assert watched(probes([HEALTHY] * 3, grown)) == []  # from zero


def test_weights_that_are_not_finite_are_an_alarm() -> None:
    (finding,) = watched([ProbeSignals(step=50, weights_finite=False)])
    assert (finding.kind, finding.severity, finding.where) == ("nonfinite", "alarm", "weights")


def test_a_second_probe_of_one_step_takes_the_place_of_the_first() -> None:
    state = DetectorState()
    for value in (5.0, 6.0):
        probe = ProbeSignals(step=50, layers=(replace(HEALTHY, attention_logit_max=value),))
        state = observe_probe(state, probe, THRESHOLDS, 0).state
    assert dict(state.probes)["attention_logit/0"] == ((50, 6.0),)


def test_what_is_remembered_is_bounded_and_finite() -> None:
    state = DetectorState()
    for n in range(40):
        layer = replace(HEALTHY, attention_logit_max=math.nan if n % 3 else 5.0, attention_entropy=0.9 - n / 100)
        state = observe_probe(state, ProbeSignals(step=n, layers=(layer,), roles=(HIDDEN,)), THRESHOLDS, 0).state
    series = dict(state.probes)
    assert max(map(len, series.values())) == 8
    assert all(math.isfinite(value) for points in series.values() for _, value in points)
    assert series["highest_entropy/0"] == ((0, 0.9),)
