"""Held-out loss, documents of a domain, and the pace of the run."""

import json
import math
import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from guard_series import THRESHOLDS, Watch, calm, step
from surefoot.guard.detectors import DetectorState, expected_document_loss, observe_evaluation, observe_probe
from surefoot.guard.finding import Finding
from surefoot.guard.pace import PaceState, observe_pace
from surefoot.guard.signals import (
    BatchFacts,
    DomainStats,
    EvalSignals,
    LayerProbe,
    PaceSignals,
    ProbeSignals,
    RoleProbe,
)
from tolerances import TREND_NATS


def evaluated(state: DetectorState, losses: list[float], domain: str = "code") -> list[Finding]:
    found: list[Finding] = []
    for n, loss in enumerate(losses):
        detected = observe_evaluation(state, EvalSignals(step=100 * n, losses=((domain, loss),)), THRESHOLDS)
        state = detected.state
        found += detected.findings
    return found


def test_a_domain_that_worsens_while_training_is_at_its_best_is_a_warning_at_the_second_evaluation() -> None:
    fine = Watch().all(calm(300)).state
    (finding,) = evaluated(fine, [2.5, 2.4, 2.5, 2.52, 2.55])
    assert (finding.kind, finding.severity, finding.where) == ("validation", "warning", "code")
    assert "0.12 nats above its best at step 100" in finding.text
    assert evaluated(fine, [2.5, 2.4, 2.5, 2.41, 2.5, 2.40]) == []
    assert evaluated(fine, [2.5, 2.4, math.nan, 2.43, 2.44]) == []


def test_held_out_loss_that_rises_with_the_training_loss_is_not_this_finding() -> None:
    rising = Watch().all([*calm(300), *calm(60, loss=2.32, seed=1)]).state
    assert rising.slow.excess > 0.03
    assert evaluated(rising, [2.4, 2.5, 2.52, 2.55]) == []


def documents(mean: float, deviation: float) -> tuple[DomainStats, ...]:
    return (DomainStats(name="code", num_documents=20, mean=mean, mean_square=mean**2 + deviation**2),)


def test_what_a_domains_documents_usually_lose_is_known_and_one_bad_batch_hardly_moves_it() -> None:
    draw = random.Random(0)
    watch = Watch().all([replace(s, domains=documents(3 + draw.gauss(0, 0.05), 0.5)) for s in calm(200)])
    mean, deviation = expected_document_loss(watch.state, "code")
    assert mean == pytest.approx(3.0, abs=TREND_NATS)
    assert deviation == pytest.approx(0.5, abs=TREND_NATS)
    watch.see(step(2.2, 0.25, domains=documents(60.0, 30.0)))
    after = expected_document_loss(watch.state, "code")
    assert after[0] - mean < TREND_NATS
    assert after[1] < 1.5 * deviation
    assert all(math.isnan(value) for value in expected_document_loss(watch.state, "prose"))


def test_a_domain_with_one_document_a_batch_has_the_spread_between_batches() -> None:
    draw = random.Random(0)
    watch = Watch().all([replace(s, domains=documents(3 + draw.gauss(0, 0.5), 0.0)) for s in calm(400)])
    assert expected_document_loss(watch.state, "code")[1] == pytest.approx(0.5, rel=0.3)


# Saved and restored


def everything(num_steps: int) -> Watch:
    watch = Watch()
    for n, signals in enumerate(calm(num_steps, sigma=0.1)):
        watch.see(
            replace(
                signals,
                lr=1e-3,
                update_size=3e-4 * (1 + n % 5 / 10),
                document_loss_max=4 + n % 3 / 10,
                domains=documents(3.0, 0.5),
                role_gradient_norms=(("embedding", 0.1 + n % 7 / 100),),
                logsumexp_mean=9.0,
                facts=BatchFacts(copied=0.05, repeated=0.0),
            )
        )
        if n % 20 == 0:
            layer = LayerProbe(layer=0, attention_logit_max=5.0, attention_entropy=0.5, activation_rms=1.0)
            role = RoleProbe(role="hidden", weight_norm=1.0, update_norm=0.1, largest_weight=4.0)
            probe = ProbeSignals(step=n, layers=(layer,), roles=(role,), beta2=0.95)
            watch.state = observe_probe(watch.state, probe, THRESHOLDS, 1000).state
            evaluation = EvalSignals(step=n, losses=(("code", 2.5),))
            watch.state = observe_evaluation(watch.state, evaluation, THRESHOLDS).state
    watch.see(step(9.0, 0.25, document_loss_max=9.0))
    return watch


def test_the_state_comes_back_through_json_to_the_bit_and_judges_alike() -> None:
    watch = everything(120)
    text = json.dumps(watch.state.to_dict(), allow_nan=False)
    restored = DetectorState.from_dict(json.loads(text))
    assert restored == watch.state
    assert json.dumps(restored.to_dict()) == text
    again = Watch(state=restored)
    again.batch_index, again.step = watch.batch_index, watch.step
    more = [*calm(30, sigma=0.1, seed=5), step(6.0, 0.25), *calm(10, seed=6)]
    assert again.all(more).state == watch.all(more).state
    assert again.findings == watch.findings[-len(again.findings) :]


def plain(value: Any) -> bool:
    if is_dataclass(value):
        return all(plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return all(map(plain, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def test_the_state_holds_only_finite_numbers_texts_and_tuples() -> None:
    assert plain(everything(60).state)
    assert plain(DetectorState())


def test_a_state_of_an_older_version_starts_afresh_what_it_lacks() -> None:
    saved = everything(60).state.to_dict()
    older = {key: value for key, value in saved.items() if key not in ("loss", "held_out")} | {"gone": 1}
    restored = DetectorState.from_dict(older)
    assert restored.loss == DetectorState().loss
    assert restored.gradient == everything(60).state.gradient
    assert DetectorState.from_dict({}) == DetectorState()


# Pace


def paced(seconds: list[float], waits: list[float] | None = None) -> list[Finding]:
    state, found = PaceState(), []
    for n, second in enumerate(seconds):
        wait = waits[n] if waits else 0.0
        result = observe_pace(state, PaceSignals(batch_index=n, seconds=second, data_wait=wait, tokens=1000))
        state = result.state
        found += result.findings
    return found


def test_a_throughput_that_stays_low_is_a_note_said_once_until_it_has_recovered() -> None:
    (note,) = paced([1.0] * 40 + [2.5] * 30)
    assert (note.kind, note.severity, note.onset) == ("throughput", "note", 40)
    assert note.normal == pytest.approx(1000)
    assert paced([1.0] * 40 + [2.5] * 5 + [1.0] * 40) == []
    assert len(paced([1.0] * 40 + [2.5] * 20 + [1.0] * 20 + [2.5] * 20)) == 2


def test_a_slow_pace_that_stays_is_the_usual_one_in_the_end() -> None:
    assert len(paced([1.0] * 40 + [2.5] * 100 + [6.0] * 10)) == 2


def test_waiting_for_data_for_long_is_a_note() -> None:
    (note,) = paced([1.0] * 40, [0.02] * 20 + [0.5] * 20)
    assert (note.kind, note.severity) == ("data_wait", "note")
    assert "50%" in note.text
    assert paced([1.0] * 40, [0.02, 0.9] * 20) == []


def test_no_number_however_wild_breaks_a_detector_or_enters_the_state() -> None:
    draw = random.Random(0)
    wild = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-300, 1e300, 1.7e308, 3.5e38, 1e39, 2.2]
    watch = Watch()

    def any_of() -> float:
        return draw.choice(wild) if draw.random() < 0.3 else 2.0 + draw.random()

    for n in range(1500):
        watch.see(
            step(
                any_of(),
                any_of(),
                lr=any_of(),
                update_size=any_of(),
                document_loss_max=any_of(),
                logsumexp_mean=any_of(),
                regime=n // 500,
                optimizer_steps=draw.choice([-1, n]),
                domains=(
                    DomainStats(name="a", num_documents=draw.choice([0, 3]), mean=any_of(), mean_square=any_of()),
                ),
                role_gradient_norms=(("embedding", any_of()),),
            )
        )
        if n % 50 == 0:
            layer = LayerProbe(
                layer=0, attention_logit_max=any_of(), attention_entropy=any_of(), activation_rms=any_of()
            )
            role = RoleProbe(
                role="hidden", weight_norm=any_of(), update_norm=1.0, largest_weight=any_of(), rms_t=any_of()
            )
            probe = ProbeSignals(step=n, layers=(layer,), roles=(role,), beta2=0.95)
            watch.state = observe_probe(watch.state, probe, THRESHOLDS, 1000).state
            losses = (("a", any_of()),)
            watch.state = observe_evaluation(watch.state, EvalSignals(step=n, losses=losses), THRESHOLDS).state
        assert plain(watch.state), n
