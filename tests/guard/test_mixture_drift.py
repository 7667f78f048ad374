"""A domain that is gone, or much more of it, where no change of the mixture was planned."""

import random

from surefoot.config.guard import Thresholds
from surefoot.guard.detectors import DetectorState, observe_step
from surefoot.guard.finding import Finding
from surefoot.guard.signals import DomainStats, StepSignals


def batch(number: int, code: int, prose: int, regime: int = 0) -> StepSignals:
    stats = [
        DomainStats(name=n, num_documents=c, mean=2.0, mean_square=4.01) for n, c in (("code", code), ("prose", prose))
    ]
    draw = random.Random(number)
    return StepSignals(
        batch_index=number,
        step=number + 1,
        loss=2.0 + draw.gauss(0, 0.02),
        gradient_norm=1.0 + draw.gauss(0, 0.05),
        num_targets=1000,
        regime=regime,
        domains=tuple(stats),
    )


def mixed(number: int, share: float, regime: int = 0) -> StepSignals:
    draw = random.Random(1000 + number)
    code = sum(draw.random() < share for _ in range(16))
    return batch(number, code, 16 - code, regime)


def found(series: list[StepSignals]) -> list[Finding]:
    state, findings = DetectorState(), []
    for signals in series:
        detected = observe_step(state, signals, Thresholds())
        state = DetectorState.from_dict(detected.state.to_dict())
        findings += [f for f in detected.findings if f.kind == "mixture"]
    return findings


def test_a_jump_to_one_domain_is_said_once_for_each_domain_within_eight_batches() -> None:
    said = found([mixed(n, 0.6) for n in range(100)] + [mixed(100 + n, 1.0) for n in range(40)])
    assert {f.where for f in said} == {"code", "prose"}
    assert all(f.severity == "warning" and 100 <= f.batch_index <= 110 for f in said)
    assert len(said) == 2
    assert any("100% of the documents of the last 8 batches are of code" in f.text for f in said)


def test_a_steady_mixture_is_not_said() -> None:
    assert found([mixed(n, 0.6) for n in range(3000)]) == []
    assert found([mixed(n, 0.95) for n in range(1000)]) == []
    assert found([batch(n, 16, 0) for n in range(100)]) == []


def test_a_planned_change_is_not_said_and_a_later_jump_is() -> None:
    planned = [mixed(n, 0.7) for n in range(100)] + [mixed(100 + n, 0.1, regime=1) for n in range(60)]
    assert found(planned) == []
    assert len(found([*planned, *(mixed(160 + n, 0.9, regime=1) for n in range(20))])) == 2


def test_a_short_run_of_one_domain_is_chance() -> None:
    assert (
        found(
            [mixed(n, 0.6) for n in range(100)]
            + [mixed(n, 1.0) for n in range(100, 103)]
            + [mixed(n, 0.6) for n in range(103, 160)]
        )
        == []
    )
