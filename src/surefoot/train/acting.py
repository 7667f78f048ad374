"""Carrying out a verdict: first the ledger row, then the deed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, assert_never

from surefoot.data.loader import Batch, Loader
from surefoot.guard.actions import ClipHarder, Halt, Investigate, LrEvent, Proceed, Rollback, SkipUpdate
from surefoot.guard.evidence import Evidence
from surefoot.guard.finding import Finding
from surefoot.guard.guard import GuardState, Verdict
from surefoot.train.keeping import Keeping
from surefoot.train.rollback import NoTarget, read_again, roll_back
from surefoot.train.setup import Setup
from surefoot.train.snapshot import SnapshotRing
from surefoot.train.state import TrainState
from surefoot.train.step import StepOutcome


@dataclass(frozen=True)
class Ending:
    """Why the loop ended."""

    reason: Literal["done", "stopped", "halted"]
    text: str = ""


@dataclass(frozen=True)
class Judged:
    """A batch with all that was found out about it."""

    batch: Batch
    outcome: StepOutcome
    before: GuardState
    """What the guard remembered before the step."""
    first: Verdict
    """The guard's answer to the step."""
    concluded: Verdict | None = None
    """Its answer after an investigation, where there was one."""
    evidence: Evidence | None = None
    """What the investigation brought back."""

    @property
    def verdict(self) -> Verdict:
        """The last word."""
        return self.concluded or self.first

    @property
    def refused(self) -> bool:
        """There was an update to apply, and it was not applied."""
        return self.outcome.skipped and self.outcome.signals.num_targets > 0

    @property
    def cause(self) -> str:
        """Why the update was refused, for the row; empty where it was not, or where the verdict is about more than it."""
        if self.outcome.signals.overflowed:
            return "fp16 overflow: the loss scale was halved"
        action = self.verdict.action
        if isinstance(action, SkipUpdate):
            return action.cause
        return in_words(self.verdict.findings) if self.refused and isinstance(action, Proceed) else ""


def act(
    judged: Judged, state: TrainState, setup: Setup, loader: Loader, keeping: Keeping, snapshots: SnapshotRing
) -> Literal["on", "back"] | Ending:
    """Do what the verdict says; "back" means that an earlier state was restored. Collective, with the same verdict on every rank."""
    action, told = judged.verdict.action, evidence_fields(judged)
    place = {"batch_index": judged.batch.batch_index, "step": state.step}
    if judged.outcome.signals.overflowed:
        say_overflow(judged, state, keeping)
        return "on"
    if judged.refused and isinstance(action, Proceed | ClipHarder | SkipUpdate | LrEvent):
        keeping.record("skip", **place, cause=judged.cause or getattr(action, "cause", "beyond a limit"), **told)
    match action:
        case Proceed():
            if judged.verdict.findings and not judged.refused:
                keeping.record("verdict", action="proceed", text=noted(judged.verdict.findings), **place, **told)
        case SkipUpdate(cause=cause):
            if not judged.refused:
                raise RuntimeError(
                    f"batch {judged.batch.batch_index}: its update was applied, and cannot be skipped: {cause}"
                )
        case ClipHarder(cause=cause):
            keeping.record("verdict", action="clip_harder", text=cause, **place, **told)
        case LrEvent(cause=cause):
            keeping.record("verdict", action="lr_event", text=cause, **place, **told)
            keeping.record("lr_event", **place, start_step=state.step, **asdict(action))
        case Rollback(cause=cause) if judged.refused and action.exclude and action.to_batch == judged.batch.batch_index:
            read_again(action, told, judged.before, state, loader, keeping)
            return "back"
        case Rollback(cause=cause):
            try:
                roll_back(action, told, state, setup, loader, keeping, snapshots)
            except NoTarget as nowhere:
                return halt(f"{cause}; {nowhere}", place, told, keeping)
            return "back"
        case Halt(reason=reason):
            return halt(reason, place, told, keeping)
        case Investigate(cause=cause):
            raise RuntimeError(
                f"batch {judged.batch.batch_index} was investigated, and is to be investigated again: {cause}"
            )
        case _:
            assert_never(action)
    return "on"


def say_overflow(judged: Judged, state: TrainState, keeping: Keeping) -> None:
    """An fp16 overflow is an event, not a decision: said at the first, the second, the fourth, the eighth; rows hold all of them."""
    number = state.loss_scale.overflows
    if number & (number - 1) == 0:
        text = (
            f"At batch {judged.batch.batch_index}: fp16 overflow number {number}. The update was skipped, and the loss is scaled by "
            f"{state.loss_scale.value:g} from here on."
        )
        keeping.warn(state, text, "note")


def halt(reason: str, place: dict[str, int], told: dict[str, Any], keeping: Keeping) -> Ending:
    """End the run with a diagnosis in the ledger."""
    keeping.wait()
    keeping.record("verdict", action="halt", text=reason, **place, **told)
    keeping.record("stop", reason=reason)
    return Ending("halted", reason)


def evidence_fields(judged: Judged) -> dict[str, Any]:
    """What a ledger row says besides the action: findings, and of an investigated batch the passes, the diagnosis and the suspects."""
    verdict = judged.verdict
    fields: dict[str, Any] = {}
    if verdict.findings:
        fields["findings"] = [finding.to_dict() for finding in verdict.findings]
    if judged.evidence is not None:
        fields["passes"] = [asdict(result) for result in judged.evidence.results]
    if (diagnosis := verdict.diagnosis) is not None:
        fields["diagnosis"] = {name: value for name, value in asdict(diagnosis).items() if name != "suspects"}
        fields["suspects"] = [asdict(suspect) for suspect in diagnosis.suspects]
    return fields


def noted(findings: Sequence[Finding]) -> str:
    """The sentence about findings after which the run goes on as it was."""
    text = in_words(findings)
    return f"{text[:1].upper()}{text[1:]}. Nothing was changed."


def in_words(findings: Sequence[Finding]) -> str:
    """What was seen, in one line."""
    return "; ".join(finding.text for finding in findings)
