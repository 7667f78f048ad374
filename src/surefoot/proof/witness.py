"""What a run says of itself while it runs: its rows and the guard's decisions, for whoever keeps the score."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.monitor.step_report import StepReport

SERIOUS = ("warning", "alarm")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One decision or new finding of the guard, as its ledger row tells it."""

    batch_index: int
    action: str
    kinds: tuple[str, ...]
    severity: str
    """The gravest of its findings; empty where there are none."""
    cause: str
    """Diagnosed; empty where there was no diagnosis."""
    text: str
    suspects: tuple[str, ...] = ()
    """Documents that it names."""
    after_onset: bool
    """The fault had begun."""

    @property
    def serious(self) -> bool:
        """A warning, an alarm or an action."""
        return self.action != "proceed" or self.severity in SERIOUS

    @property
    def what(self) -> str:
        """The kinds of its findings, or else its action."""
        return "+".join(self.kinds) or self.action

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """One consumed batch."""

    loss: float
    skipped: bool
    idle: bool
    """It had no targets, so there was nothing to skip."""


@dataclass
class Witness:
    """Watches a run from outside: a watcher of its steps, and the one who is notified of its ledger rows."""

    onset: int
    """Batch from which on findings are no false alarms."""
    reports: list[tuple[int, Row]] = field(default_factory=list)
    """Every batch consumed, in the order of time, abandoned ones too."""
    events: list[Event] = field(default_factory=list)
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    """The ledger's rows."""

    def step(self, report: StepReport) -> None:
        """One batch was consumed."""
        loss = report.metrics.get("train/loss", math.nan)
        idle = report.metrics.get("train/num_targets") == 0
        self.reports.append((report.batch_index, Row(loss, report.skipped, idle)))

    def notify(self, kind: str, row: Mapping[str, Any]) -> None:
        """A ledger row or an event."""
        if kind in ("skip", "verdict"):
            self.rows.append(row)
            self.events.append(self._event(kind, row))
        elif kind == "note":
            # Rank 0's clock speaks in notes, which no ledger keeps.
            told = {
                "findings": [{"kind": "pace", "severity": "note"}],
                "action": "proceed",
                "text": row.get("text", ""),
            }
            self.rows.append(told)
            self.events.append(self._event("verdict", told))

    def surviving(self) -> dict[int, Row]:
        """The last reading of every batch, in order."""
        last: dict[int, Row] = {}
        for batch_index, row in self.reports:
            last = {b: r for b, r in last.items() if b < batch_index} if batch_index in last else last
            last[batch_index] = row
        return last

    def _event(self, kind: str, row: Mapping[str, Any]) -> Event:
        findings = row.get("findings") or ()
        diagnosis = row.get("diagnosis") or {}
        severities = {str(finding["severity"]) for finding in findings}
        batch_index = int(row.get("batch_index", self.reports[-1][0] if self.reports else 0))
        return Event(
            batch_index=batch_index,
            action="skip" if kind == "skip" else str(row.get("action", kind)),
            kinds=tuple(dict.fromkeys(str(finding["kind"]) for finding in findings)),
            severity=next((s for s in ("alarm", "warning", "note") if s in severities), ""),
            cause=str(diagnosis.get("cause", "")) if isinstance(diagnosis, Mapping) else str(diagnosis),
            text=str(row.get("text") or row.get("cause") or ""),
            suspects=tuple(str(s["document"]) for s in row.get("suspects") or () if isinstance(s, Mapping)),
            after_onset=max([batch_index, *(b for b, _ in self.reports)]) >= self.onset,
        )
