"""The reduced numbers of one step that the guard judges: the same on every rank."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepSignals:
    """What one batch showed, before and independent of what was done about it."""

    batch_index: int
    """The batch consumed."""
    step: int
    """Applied updates, this batch's included if it was applied."""
    loss: float
    """Cross-entropy, nats per target token over the global batch; NaN is a verdict, not a value."""
    gradient_norm: float
    """Global 2-norm before any scaling; infinite or NaN when a gradient is."""
    num_targets: int
    """Predicted tokens in the global batch; 0 consumes the batch without an update."""

    @property
    def finite(self) -> bool:
        """Loss and gradient norm are numbers an update may be made of."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)
