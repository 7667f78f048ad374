"""A log read through the guard's eyes: what it would have seen, and what it would have done."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Action, Halt, Investigate, LrEvent, Proceed, Rollback, SkipUpdate
from surefoot.guard.evidence import Evidence
from surefoot.guard.finding import Finding
from surefoot.guard.guard import GuardState, Verdict, action_name, conclude, judge, limits
from surefoot.guard.ledger_row import plain_value
from surefoot.guard.limits import Limits
from surefoot.guard.record import PastRollback, Record
from surefoot.guard.signals import MISSING, StepSignals


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One row of a log that has a loss."""

    step: int
    loss: float
    """Nats per token; NaN where the log says so (a gap is a row that is not there)."""
    gradient_norm: float = MISSING
    gradient_known: bool = True
    """The row has a gradient norm."""


@dataclass(frozen=True, kw_only=True)
class ReplayedFinding:
    """A finding, and what the guard would have done about its step."""

    step: int
    finding: Finding
    action: Action
    then: Action | None = None
    """After an investigation that could bring nothing back, since a log has no batch to look at."""

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values."""
        row: dict[str, Any] = {"step": self.step, "kind": self.finding.kind, "action": action_name(self.action)}
        if self.then is not None:
            row["then"] = action_name(self.then)
        rest = {key: value for key, value in self.finding.to_dict().items() if key not in ("kind", "batch_index")}
        plain: dict[str, Any] = plain_value(row | rest)
        return plain


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What became of a log."""

    num_steps: int
    """Rows judged."""
    findings: tuple[ReplayedFinding, ...] = ()
    halted: str = ""
    """Why the guard would have stopped the run at the last step judged; empty where it would not."""


def replay(rows: Iterable[LoggedStep], config: GuardConfig) -> Replay:
    """Judge a log's rows in order. The log's run did not stop, skip or go back: each row is judged as if the guard had acted until then, and
    what the log shows next had come all the same."""
    state, record = GuardState(), Record()
    found: list[ReplayedFinding] = []
    num_steps = 0
    for row in rows:
        num_steps += 1
        signals = _signals(row, limits(state, config))
        verdict = judge(state, signals, config, record)
        state, record = verdict.state, _spent(record, signals.batch_index, verdict.action)
        final: Verdict | None = None
        if isinstance(verdict.action, Investigate):
            evidence = Evidence(signals=signals, findings=verdict.findings, expected_loss=verdict.scores.expected_loss)
            final = conclude(state, evidence, config, record)
            state, record = final.state, _spent(record, signals.batch_index, final.action)
        then = final.action if final else None
        found += [
            ReplayedFinding(step=row.step, finding=finding, action=verdict.action, then=then)
            for finding in verdict.findings
        ]
        for action in (verdict.action, then):
            if isinstance(action, Halt):
                return Replay(num_steps=num_steps, findings=tuple(found), halted=action.reason)
    return Replay(num_steps=num_steps, findings=tuple(found))


def _signals(row: LoggedStep, limit: Limits) -> StepSignals:
    """The row as the step's signals: refused where the device would have refused it."""
    signals = StepSignals(
        batch_index=row.step,
        step=row.step,
        loss=row.loss,
        gradient_norm=row.gradient_norm,
        gradient_known=row.gradient_known,
        num_targets=1,
    )
    beyond = row.loss > limit.loss or row.gradient_norm > limit.gradient_norm
    refused = beyond or (limit.refuse_nonfinite and not signals.finite)
    return replace(signals, applied=not refused, clipped_harder=not refused and row.gradient_norm > limit.clip_norm)


def _spent(record: Record, batch_index: int, action: Action) -> Record:
    """The record with one action more, as the ledger of a run would have it."""
    match action:
        case Investigate():
            return replace(record, investigations_at=(*record.investigations_at, batch_index))
        case SkipUpdate():
            return replace(record, num_skips=record.num_skips + 1)
        case LrEvent():
            return replace(record, lr_events_at=(*record.lr_events_at, batch_index))
        case Rollback(to_batch=to_batch, lr_event=lr_event):
            past = PastRollback(at_batch=batch_index, to_batch=to_batch, restored=to_batch)
            dips = record.lr_events_at if lr_event is None else (*record.lr_events_at, batch_index)
            return replace(record, rollbacks=(*record.rollbacks, past), lr_events_at=dips)
        case _:
            return record


def summary(result: Replay) -> str:
    """One line: how much was read, and what came of it."""
    steps = f"{result.num_steps:,} steps" if result.num_steps != 1 else "1 step"
    if not result.findings:
        return f"no finding in {steps}"
    acted = len({f.step for f in result.findings if not isinstance(f.action, Proceed)})
    kinds: dict[str, int] = {}
    for item in result.findings:
        kinds[item.finding.kind] = kinds.get(item.finding.kind, 0) + 1
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    noun = "finding" if len(result.findings) == 1 else "findings"
    text = f"{len(result.findings)} {noun} in {steps} ({counted}); the guard would have acted at {acted} step{'s' * (acted != 1)}"
    return text if not result.halted else f"{text}, and stopped the run at the last"
