"""Signals in, verdict out."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Action, Halt, Proceed, SkipUpdate
from surefoot.guard.detectors import DetectorState, Scores, limits_of, observe_step
from surefoot.guard.evidence import Diagnosis, Evidence
from surefoot.guard.finding import Finding
from surefoot.guard.limits import Limits
from surefoot.guard.record import Record
from surefoot.guard.signals import EvalSignals, ProbeSignals, StepSignals


@dataclass(frozen=True, kw_only=True)
class GuardState:
    """What the guard remembers; rewinds with the weights."""

    consecutive_skips: int = 0
    """Skipped steps in a row, up to now."""
    healthy_batches: int = 0
    """Batches since the last skipped step or alarm: what certifies a checkpoint."""
    detectors: DetectorState = DetectorState()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"detectors": self.detectors.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GuardState":
        """The state that ``to_dict`` wrote; one written before there were detectors starts them afresh."""
        return cls(**(data | {"detectors": DetectorState.from_dict(data.get("detectors", {}))}))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The guard's answer to one step."""

    state: GuardState
    """What it remembers now."""
    findings: tuple[Finding, ...] = ()
    action: Action
    scores: Scores = Scores()
    diagnosis: Diagnosis | None = None
    """After an investigation."""


class Judge(Protocol):
    """A pure function from what is remembered and seen to a verdict; ``judge`` below is the one that runs use."""

    def __call__(
        self,
        state: GuardState,
        signals: StepSignals,
        config: GuardConfig,
        record: Record,
        probe: ProbeSignals | None = None,
        total_steps: int = 0,
    ) -> Verdict:
        """The verdict on one step."""


def limits(state: GuardState, config: GuardConfig) -> Limits:
    """What the next update may not exceed; nothing is refused where the guard only observes."""
    if config.policy == "observe":
        return Limits(refuse_nonfinite=False)
    return limits_of(state.detectors, config.thresholds)


def judge(
    state: GuardState,
    signals: StepSignals,
    config: GuardConfig,
    record: Record,
    probe: ProbeSignals | None = None,
    total_steps: int = 0,
) -> Verdict:
    """The verdict on one step, its cadence probe included where one was taken."""
    if signals.num_targets == 0:
        return Verdict(state=state, action=Proceed())
    detected = observe_step(state.detectors, signals, config.thresholds)
    if signals.finite:
        healthy = GuardState(healthy_batches=state.healthy_batches + 1, detectors=detected.state)
        return Verdict(state=healthy, findings=detected.findings, action=Proceed(), scores=detected.scores)
    cause = _what_is_not_finite(signals)
    after = replace(state, consecutive_skips=state.consecutive_skips + 1, healthy_batches=0)
    if after.consecutive_skips >= config.max_consecutive_skips:
        reason = (
            f"{after.consecutive_skips} skipped steps in a row up to batch {signals.batch_index} ({cause}): the fault is in the state, "
            f"the learning rate or the numerics, not in one batch. Weights are those of step {signals.step}; resume from an "
            "earlier checkpoint with `surefoot fork RUN --at STEP` and a lower optim.lr, or precision fp32"
        )
        return Verdict(state=after, action=Halt(reason=reason))
    return Verdict(state=after, action=SkipUpdate(cause=cause))


def conclude(state: GuardState, evidence: Evidence, config: GuardConfig, record: Record) -> Verdict:
    """The verdict after an investigation; ``state`` is the one that ``judge`` returned with Investigate."""
    return Verdict(state=state, action=SkipUpdate(cause=_what_is_not_finite(evidence.signals)))


def judge_evaluation(state: GuardState, evaluation: EvalSignals, config: GuardConfig) -> Verdict:
    """The verdict on held-out losses: findings, and never an action but Proceed."""
    return Verdict(state=state, action=Proceed())


def _what_is_not_finite(signals: StepSignals) -> str:
    return (
        f"batch {signals.batch_index}: loss {signals.loss:.4g}, gradient norm {signals.gradient_norm:.4g}, not finite"
    )
