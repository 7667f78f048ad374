"""Signals in, findings out: all detectors over one step, with what they remember."""

from dataclasses import asdict, dataclass
from typing import Any

from surefoot.config.guard import Thresholds
from surefoot.guard.finding import Finding
from surefoot.guard.limits import Limits
from surefoot.guard.signals import MISSING, EvalSignals, ProbeSignals, StepSignals


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Where a step stands, in robust standard deviations from its trend; NaN where there is no baseline yet or no value."""

    loss: float = MISSING
    document_loss: float = MISSING
    gradient_norm: float = MISSING
    update_size: float = MISSING
    expected_loss: float = MISSING
    """Nats per token: the trend's value for this step."""


@dataclass(frozen=True, kw_only=True)
class DetectorState:
    """All baselines. Plain numbers and tuples, none of them NaN or infinite, so that JSON brings them back to the bit."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "DetectorState":
        """The state that ``to_dict`` wrote."""
        return cls(**data)


@dataclass(frozen=True)
class Detected:
    """What detectors make of one set of signals."""

    state: DetectorState
    findings: tuple[Finding, ...] = ()
    scores: Scores = Scores()


def limits_of(state: DetectorState, thresholds: Thresholds) -> Limits:
    """What the next update may not exceed, from accepted steps only."""
    return Limits()


def observe_step(state: DetectorState, signals: StepSignals, thresholds: Thresholds) -> Detected:
    """Judge one step against the baselines; its values enter them only when the update was applied and is not an outlier."""
    return Detected(state)


def observe_probe(state: DetectorState, probe: ProbeSignals, thresholds: Thresholds, total_steps: int) -> Detected:
    """Judge a cadence probe; ``total_steps`` bounds the forecasts."""
    return Detected(state)


def observe_evaluation(state: DetectorState, evaluation: EvalSignals, thresholds: Thresholds) -> Detected:
    """Judge held-out losses against their own best and the training loss."""
    return Detected(state)


def expected_document_loss(state: DetectorState, domain: str) -> tuple[float, float]:
    """(mean, standard deviation) of a domain's document losses lately, nats per token; (NaN, NaN) where unknown."""
    return MISSING, MISSING


def accept_level(state: DetectorState) -> DetectorState:
    """Take the level of the values lately rejected for the new normal."""
    return state
