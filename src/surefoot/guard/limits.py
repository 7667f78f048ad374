"""What an update may not exceed: computed from what is known before the step, applied on the device."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Beyond any of these the update is refused (``clip_norm``: scaled down); infinity is no limit."""

    loss: float = math.inf
    """Nats per token."""
    document_loss: float = math.inf
    """Largest loss of a document piece, nats per token."""
    gradient_norm: float = math.inf
    clip_norm: float = math.inf
    """The guard's own clipping, on top of the configured one."""
    refuse_nonfinite: bool = True
    """False only where the guard merely observes: then even a NaN is applied, as it would be without a guard."""
