"""What a detector saw."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal[
    "nonfinite",
    "loss_spike",
    "document_spike",
    "gradient_spike",
    "slow_spike",
    "update_size",
    "update_ratio",
    "optimizer_steps",
    "stale_second_moment",
    "embedding_gradient",
    "gradient_creep",
    "attention_growth",
    "entropy_collapse",
    "activation_explosion",
    "logit_drift",
    "too_good",
    "frozen_gradient",
    "validation",
    "mixture",
    "misaligned",
    "level_shift",
    "throughput",
    "data_wait",
]
Severity = Literal["note", "warning", "alarm"]
"""note: said, never acted on. warning: said, and what ``strict`` may act on. alarm: ``guarded`` acts too."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as it was."""

    kind: Kind
    severity: Severity
    text: str
    """A sentence without a full stop: what, and how far from normal."""
    batch_index: int
    """Where it was seen."""
    onset: int
    """First batch it can be traced back to; at most ``batch_index``."""
    value: float
    normal: float = 0.0
    """What the value would be in health; 0 where there is no such figure."""
    z: float = 0.0
    """Robust standard deviations from normal, signed; 0 where it is not a matter of spread."""
    where: str = ""
    """Role, layer, domain or parameter."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the ledger."""
        return asdict(self)
