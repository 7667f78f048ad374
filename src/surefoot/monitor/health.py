"""Whether a run is well, in one headline and a few sentences. Describes, decides nothing."""

from dataclasses import dataclass, replace
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
    faults = summary.skipped + summary.rollbacks + summary.lr_events + summary.read_again
    sentences = [f"The run {replace(status, step=summary.step).sentence()}."]
    if status.state == "empty":
        return Health("warning", "Not started.", tuple(sentences))
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
    if summary.read_again:
        again = "1 batch was" if summary.read_again == 1 else f"{summary.read_again} batches were"
        sentences.append(f"{again} read again without documents that had spoilt it.")
    if summary.lr_events:
        sentences.append(f"The learning rate was changed {several(summary.lr_events, 'time')} to calm it.")
    if summary.lost_s >= 1:
        sentences.append(f"Steps that were taken back cost {duration(summary.lost_s)}.")
    if gaps := missing(run.metrics()["batch_index"]):
        first = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in gaps[:3])
        more = f" and {len(gaps) - 3} more stretches" if len(gaps) > 3 else ""
        sentences.append(f"Rows are missing for batches {first}{more}: the curves have gaps there.")
    if run.ledger.halt:
        return Health("bad", "Halted: the guard gave up.", tuple(sentences))
    if status.state == "crashed":
        kept = f"nothing is lost up to {summary.checkpoint}" if summary.checkpoint else "before its first checkpoint"
        return Health("warning", f"Interrupted: {kept}.", tuple(sentences))
    if not faults:
        return Health("good", "Healthy.", tuple(sentences))
    return Health(
        "warning" if status.state == "running" else "good",
        "Healthy again: it met faults and recovered.",
        tuple(sentences),
    )
