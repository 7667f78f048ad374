"""What an update may not exceed: computed from what is known before the step, applied on the device."""

import math
from dataclasses import dataclass

from surefoot.guard.signals import BatchFacts

MISALIGNED = 0.001
"""Share of targets that are not the next token; a sound loader has none."""
LEAKED = 0.5
"""Share of targets that stand in the input, from which the answer leaks whatever the loss says; runs of blanks in code reach 0.3."""
DUPLICATED = 0.25
"""Share of rows read lately under another number; documents are read once in an epoch, so sound data have next to none."""


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
    loss_floor: float = -math.inf
    """Nats per token: below it, a batch with odd tokens is too good to be learned from."""
    copied: float = math.inf
    """Share of targets equal to their own input token, beyond which the tokens are odd."""
    repeated: float = math.inf
    """Share of tokens in an n-gram flood, likewise."""
    duplicated: float = math.inf
    """Share of rows read lately under another number, beyond which the tokens are wrong."""
    refuse_nonfinite: bool = True
    """False only where the guard merely observes: then even a NaN is applied, as it would be without a guard."""

    def odd(self, facts: BatchFacts) -> bool:
        """The tokens are unlike those before: reason enough to refuse a loss that is too good."""
        return facts.copied > self.copied or facts.repeated > self.repeated

    def wrong(self, facts: BatchFacts) -> bool:
        """The tokens are wrong whatever the loss says: targets out of place, or in the input, or rows that were learned before."""
        return self.refuse_nonfinite and (
            facts.misaligned > MISALIGNED
            or (facts.copied > LEAKED and facts.copied > self.copied)
            or (facts.duplicated > DUPLICATED and facts.duplicated > self.duplicated)
        )
