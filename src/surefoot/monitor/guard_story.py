"""What the guard saw and did, deed by deed, with the evidence that the ledger keeps of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.guard.ledger_row import Row
from surefoot.monitor.run import Run
from surefoot.monitor.sentences import sentence
from surefoot.monitor.wording import several

Deeds = Literal["noted", "clipped harder", "skipped", "learning rate", "rolled back", "left out", "halted"]

_BY_ACTION: Mapping[str, Deeds] = {
    "proceed": "noted",
    "clip_harder": "clipped harder",
    "lr_event": "learning rate",
    "rollback": "rolled back",
    "exclude": "left out",
    "halt": "halted",
}
EVIDENCE = ("diagnosis", "passes", "suspects", "findings")
"""Fields of a ledger row that say why."""


@dataclass(frozen=True)
class Deed:
    """One thing the guard did, or only said."""

    batch_index: int
    """The batch it was about."""
    what: Deeds
    text: str
    survives: bool
    """Its batch is part of the run as it stands."""
    diagnosis: Mapping[str, Any]
    """``cause`` and ``text``; empty where nothing was investigated."""
    passes: Sequence[Mapping[str, Any]]
    suspects: Sequence[Mapping[str, Any]]
    findings: Sequence[Mapping[str, Any]]

    @property
    def grave(self) -> bool:
        """Something was wrong, or changed: more than a note."""
        return self.what != "noted" or any(finding.get("severity") != "note" for finding in self.findings)

    @property
    def bare(self) -> bool:
        """There is nothing to tell but its sentence."""
        return not (self.diagnosis or self.passes or self.suspects or self.findings)


def deeds(run: Run) -> list[Deed]:
    """All of them, newest first; bare skipped steps of consecutive batches as one.

    The verdict that orders a rollback or another rate and the row that carries it out are one deed: told as it was carried out, with the
    evidence of the verdict.
    """
    told: list[Deed] = []
    ordered: Row | None = None
    attempt = 0
    for row in run.ledger.rows:
        kind = row["kind"]
        if kind == "attempt":
            attempt = row["attempt"]
        carries_out = (kind == "attempt" and row["reason"] == "rollback") or kind == "lr_event"
        if ordered is not None and carries_out and _what(ordered) == _what(row):
            told.append(_deed(run, row, ordered, attempt))
            ordered = None
        elif kind == "verdict" and _what(row) in ("rolled back", "left out", "learning rate"):
            told += [_deed(run, ordered, ordered, attempt)] if ordered is not None else []
            ordered = row
        elif kind in ("verdict", "skip") or carries_out:
            told.append(_deed(run, row, row, attempt))
    told += [_deed(run, ordered, ordered, attempt)] if ordered is not None else []
    return _briefly(told)[::-1]


def _what(row: Row) -> Deeds:
    match row["kind"]:
        case "skip":
            return "skipped"
        case "lr_event":
            return "learning rate"
        case "attempt":
            return "left out" if row["checkpoint"] == "in place" else "rolled back"
        case _:
            return _BY_ACTION.get(str(row.get("action")), "noted")


def _deed(run: Run, row: Row, why: Row, attempt: int) -> Deed:
    """``row`` says what was done, ``why`` has the evidence; they may be the same."""
    batch = int(why.get("batch_index", row.get("batch_index", row.get("from_batch", 0))))
    evidence: dict[str, Any] = {key: why.get(key) or ({} if key == "diagnosis" else ()) for key in EVIDENCE}
    if row["kind"] == "attempt":
        survives = run.ledger.row_survives(row["attempt"], row["from_batch"])
    else:
        # A decision about the rate stays in force whatever is taken back.
        survives = row["kind"] == "lr_event" or not attempt or run.ledger.row_survives(attempt, batch)
    return Deed(batch, _what(row), sentence(row["kind"], row), survives, **evidence)


def _briefly(told: list[Deed]) -> list[Deed]:
    """The same with runs of bare skipped steps in one sentence each."""
    brief: list[Deed] = []
    count = 0
    for deed in told:
        last = brief[-1] if brief else None
        if last and _same_again(last, deed, count):
            count += 1
            first = last.text.split(". The first: ")[-1] if count > 2 else last.text
            text = f"{several(count, 'update')} in a row skipped, batches {last.batch_index} to {deed.batch_index}. The first: {first}"
            brief[-1] = replace(last, text=text)
        else:
            brief.append(deed)
            count = 1
    return brief


def _same_again(last: Deed, deed: Deed, count: int) -> bool:
    skips = last.what == deed.what == "skipped" and last.bare and deed.bare
    return skips and deed.batch_index == last.batch_index + count and deed.survives == last.survives
