"""Signals in, verdict out."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Protocol

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Action, ClipHarder, Halt, Investigate, LrEvent, Proceed, Rollback, SkipUpdate
from surefoot.guard.broken_state import broken_by, weights_broken
from surefoot.guard.detectors import (
    Detected,
    DetectorState,
    Scores,
    accept_level,
    limits_of,
    observe_evaluation,
    observe_probe,
    observe_step,
)
from surefoot.guard.diagnosis import cause_of, diagnose, shown_by_tokens, usual
from surefoot.guard.evidence import Diagnosis, Evidence
from surefoot.guard.finding import Finding, Kind
from surefoot.guard.ladder import (
    Situation,
    accepts_level,
    after_investigation,
    after_refusal,
    after_update,
    said_without_dip,
)
from surefoot.guard.limits import Limits
from surefoot.guard.record import Record
from surefoot.guard.signals import EvalSignals, ProbeSignals, StepSignals

OUTLIERS: frozenset[Kind] = frozenset({"loss_spike", "document_spike", "gradient_spike"})
"""Alarms that a new level would explain when they come in a row."""


@dataclass(frozen=True, kw_only=True)
class GuardState:
    """What the guard remembers; rewinds with the weights."""

    consecutive_skips: int = 0
    """Skipped steps in a row, up to now."""
    healthy_batches: int = 0
    """Batches since the last skipped step or alarm: what certifies a checkpoint."""
    data_skips: int = 0
    """Of the skipped steps in a row, those shown to be the data's fault."""
    rejections: int = 0
    """Finite outliers in a row, the data not shown at fault."""
    detectors: DetectorState = DetectorState()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "consecutive_skips": self.consecutive_skips,
            "healthy_batches": self.healthy_batches,
            "data_skips": self.data_skips,
            "rejections": self.rejections,
            "detectors": self.detectors.to_dict(),
        }

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
    """With every action but Proceed, and with every warning or alarm."""


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


def limits(state: GuardState, config: GuardConfig, regime: int | None = None) -> Limits:
    """What the next update may not exceed; nothing is refused where the guard only observes. ``regime``: the next batch's, where known."""
    if config.policy == "observe":
        return Limits(refuse_nonfinite=False)
    return limits_of(state.detectors, config.thresholds, regime)


def judge(
    state: GuardState,
    signals: StepSignals,
    config: GuardConfig,
    record: Record,
    probe: ProbeSignals | None = None,
    total_steps: int = 0,
) -> Verdict:
    """The verdict on one step, its cadence probe included where one was taken."""
    if signals.num_targets == 0 or signals.overflowed:
        return Verdict(state=state, action=Proceed())
    detected = observe_step(state.detectors, signals, config.thresholds)
    if probe is not None:
        inside = observe_probe(detected.state, probe, config.thresholds, total_steps)
        detected = Detected(inside.state, (*detected.findings, *inside.findings), detected.scores)
    return decide(state, signals, detected, config, record, probe)


def decide(
    state: GuardState,
    signals: StepSignals,
    detected: Detected,
    config: GuardConfig,
    record: Record,
    probe: ProbeSignals | None = None,
) -> Verdict:
    """The verdict once the detectors have spoken.

    A skipped step changes only the counters and the detectors' list of values refused in a row. An applied one clears the count of skipped
    steps; the batches that certify a checkpoint count from the last one that was skipped or raised an alarm.
    """
    findings = detected.findings
    refused = not signals.applied and config.policy != "observe"
    shown = shown_by_tokens(signals.facts, findings)
    broken = broken_by(findings) or weights_broken(probe)
    alarmed = any(f.severity == "alarm" for f in findings) or not signals.finite
    outlier = (
        signals.finite
        and not shown
        and (refused or any(f.kind in OUTLIERS and f.severity == "alarm" for f in findings))
    )
    after = GuardState(
        consecutive_skips=state.consecutive_skips + 1 if refused else 0,
        healthy_batches=0 if refused or alarmed else state.healthy_batches + 1,
        data_skips=state.data_skips + 1 if refused and shown else state.data_skips if refused else 0,
        rejections=state.rejections + 1 if outlier else 0,
        detectors=detected.state,
    )
    now = Situation(
        signals=signals,
        findings=findings,
        config=config,
        record=record,
        cause=_as_before(state, _first_guess(findings, signals, shown, broken)),
        skips=after.consecutive_skips,
        data_skips=after.data_skips,
        rejections=after.rejections,
        broken=broken,
    )
    action: Action = Proceed()
    if refused:
        action = after_refusal(now)
    elif config.policy != "observe":
        action = after_update(now)
        findings = said_without_dip(now) if isinstance(action, Proceed) else findings
    if accepts_level(now, action):
        shift = _level_shift(now, detected.scores)
        findings = (*findings, shift)
        action = replace(action, cause=f"{action.cause}; {shift.text}") if isinstance(action, SkipUpdate) else action
        after = replace(after, rejections=0, detectors=accept_level(after.detectors))
    worth_saying = not isinstance(action, Proceed) or any(f.severity != "note" for f in findings)
    return Verdict(
        state=after,
        findings=findings,
        action=action,
        scores=detected.scores,
        diagnosis=now.cause if worth_saying else None,
    )


def conclude(state: GuardState, evidence: Evidence, config: GuardConfig, record: Record) -> Verdict:
    """The verdict after an investigation; ``state`` is the one that ``judge`` returned with Investigate."""
    found = diagnose(evidence)
    counted = bool(shown_by_tokens(evidence.signals.facts, evidence.findings))
    if found.cause == "data" and found.certain and not evidence.signals.applied and not counted:
        state = replace(state, data_skips=state.data_skips + 1, rejections=0)
    now = Situation(
        signals=evidence.signals,
        findings=evidence.findings,
        config=config,
        record=record,
        cause=found,
        skips=state.consecutive_skips,
    )
    return Verdict(state=state, findings=evidence.findings, action=after_investigation(now), diagnosis=found)


def judge_evaluation(state: GuardState, evaluation: EvalSignals, config: GuardConfig) -> Verdict:
    """The verdict on held-out losses: findings, and never an action but Proceed."""
    detected = observe_evaluation(state.detectors, evaluation, config.thresholds)
    healthy = 0 if any(f.severity == "alarm" for f in detected.findings) else state.healthy_batches
    after = replace(state, healthy_batches=healthy, detectors=detected.state)
    cause = cause_of(detected.findings)
    diagnosis = Diagnosis(cause=cause, text=usual(cause)) if detected.findings else None
    return Verdict(
        state=after, findings=detected.findings, action=Proceed(), scores=detected.scores, diagnosis=diagnosis
    )


def verdict_digest(verdict: Verdict) -> int:
    """48 bits that agree on all ranks exactly when action, findings and what is remembered do: a double holds them exactly."""
    text = repr((verdict.action, verdict.findings, verdict.state))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def action_name(action: Action) -> str:
    """The action as ledger rows name it."""
    match action:
        case Proceed():
            return "proceed"
        case ClipHarder():
            return "clip_harder"
        case SkipUpdate():
            return "skip"
        case Investigate():
            return "investigate"
        case LrEvent():
            return "lr_event"
        case Rollback():
            return "rollback"
        case Halt():
            return "halt"


def _first_guess(findings: tuple[Finding, ...], signals: StepSignals, shown: str, broken: str) -> Diagnosis:
    """The cause as far as the findings, the weights and the batch's own tokens say it."""
    if broken:
        return Diagnosis(cause="hardware", text=broken, state_is_broken=True, certain=True)
    if shown:
        return Diagnosis(cause="data", text=shown, certain=True)
    cause = cause_of(findings) if findings or signals.finite else "numerics"
    return Diagnosis(cause=cause, text=usual(cause))


def _as_before(state: GuardState, guess: Diagnosis) -> Diagnosis:
    """A step refused right after others that the data were shown to be at fault for: until it is looked at, the same."""
    if guess.certain or not 0 < state.consecutive_skips == state.data_skips:
        return guess
    return Diagnosis(cause="data", text="probably the data again, as in the batches before it")


def _level_shift(now: Situation, scores: Scores) -> Finding:
    """What is accepted, and what was normal before."""
    signals = now.signals
    return Finding(
        kind="level_shift",
        severity="warning",
        text=f"{now.rejections} finite outliers in a row, and nothing says that data or weights are at fault: the new level (loss "
        f"{signals.loss:.3f} nats, gradient norm {signals.gradient_norm:.3g}) is taken for the new normal; look at what changed at batch "
        f"{signals.batch_index - now.rejections + 1}",
        batch_index=signals.batch_index,
        onset=max(0, signals.batch_index - now.rejections + 1),
        value=signals.loss,
        normal=scores.expected_loss if scores.expected_loss == scores.expected_loss else 0.0,
    )
