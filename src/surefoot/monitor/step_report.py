"""The frozen record of one step that watchers get."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class StepReport:
    """What one consumed batch did. Watchers read it and return nothing."""

    batch_index: int
    """The batch that was consumed."""
    step: int
    """Applied updates after it."""
    tokens: int
    """Tokens consumed by the run so far, this batch included."""
    skipped: bool
    """The update was refused."""
    cause: str
    """Why it was refused; empty otherwise."""
    metrics: Mapping[str, float]
    """Numbers by the names of ``monitor/metrics.py``."""
    sample_digest: str
    """16 hex over the sample ids of the whole batch."""
    excluded: tuple[str, ...]
    """Documents blanked in this batch."""
    state_digest: str = ""
    """Digest of weights and moments after the batch, where one was due."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", MappingProxyType({k: float(v) for k, v in self.metrics.items()}))

    def row(self) -> dict[str, Any]:
        """The line of metrics.jsonl: flat, metrics under their own names, empty fields left out."""
        row: dict[str, Any] = {
            "batch_index": self.batch_index,
            "step": self.step,
            "tokens": self.tokens,
            "sample_digest": self.sample_digest,
        }
        if self.skipped:
            row["skipped"] = True
            row["cause"] = self.cause
        if self.excluded:
            row["excluded"] = list(self.excluded)
        if self.state_digest:
            row["state_digest"] = self.state_digest
        row.update(self.metrics)
        return row
