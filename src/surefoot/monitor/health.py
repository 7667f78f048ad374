"""Whether a run is well, in one headline and a few sentences. Describes, decides nothing."""

from dataclasses import dataclass
from typing import Literal

from surefoot.monitor.envelope import missing
from surefoot.monitor.run import Run, Status
from surefoot.monitor.summary import Summary
from surefoot.monitor.wording import duration, several


@dataclass(frozen=True)
class Health:
    """For the top of a report."""

    tone: Literal["good", "warning", "bad"]
    headline: str
    sentences: tuple[str, ...]


def health(run: Run, summary: Summary, status: Status) -> Health:
    """Read off the ledger and the rows of a run."""
    halted = bool(status.state == "stopped" and run.ledger.of_kind("verdict") and "skipped steps" in status.reason)
    faults = summary.skipped + summary.rollbacks
    sentences = [f"The run {status.sentence()}."]
    if not faults:
        sentences.append("Every update was applied and nothing had to be undone.")
    if summary.skipped:
        sentences.append(
            f"{several(summary.skipped, 'skipped step').capitalize()}: the update was refused and left no trace in the weights."
        )
    if summary.rollbacks:
        without = f" and went on without {several(len(summary.excluded), 'document')}" if summary.excluded else ""
        sentences.append(
            f"{several(summary.rollbacks, 'rollback').capitalize()}: it returned to an earlier state{without}."
        )
    if summary.lost_s >= 1:
        sentences.append(f"Steps that were taken back cost {duration(summary.lost_s)}.")
    if gaps := missing(run.metrics()["batch_index"]):
        first = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in gaps[:3])
        more = f" and {len(gaps) - 3} more stretches" if len(gaps) > 3 else ""
        sentences.append(f"Rows are missing for batches {first}{more}: the curves have gaps there.")
    if halted:
        return Health("bad", "Halted: it could not cure itself.", tuple(sentences))
    if status.state == "crashed":
        return Health("warning", "Interrupted: nothing is lost up to the last checkpoint.", tuple(sentences))
    if not faults:
        return Health("good", "Healthy.", tuple(sentences))
    return Health(
        "warning" if status.state == "running" else "good",
        "Healthy again: it met faults and recovered.",
        tuple(sentences),
    )
