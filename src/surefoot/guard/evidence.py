"""What an investigation brings back: extra passes over a refused batch, and the documents at hand."""

import math
from dataclasses import dataclass, field
from typing import Literal

from surefoot.guard.finding import Finding
from surefoot.guard.signals import MISSING, ProbeSignals, StepSignals

PassKind = Literal["same_batch", "healthy_batch", "without_suspects", "first_half", "second_half", "full_precision"]
"""same_batch: once more. healthy_batch: the last batch whose update was applied. without_suspects: the same with the suspects blanked.
first_half, second_half: of each rank's rows. full_precision: the same batch computed in fp32 (only where precision is lower)."""


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """One extra pass; nothing but gradients, which are dropped, was touched."""

    kind: PassKind
    loss: float
    gradient_norm: float
    same_bits: bool = False
    """Loss and gradient norm have the bits of the refused step (only ``same_batch`` may)."""
    excess: float = 0.0
    """Loss above what is normal for this batch: for ``healthy_batch`` its loss when it was applied, else the refused step's expected loss."""
    gradient_before: float = MISSING
    """Of ``healthy_batch``: its gradient norm when it was applied."""

    @property
    def finite(self) -> bool:
        """Loss and gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A document piece of the batch that may have done it."""

    document: str
    """16 hex digits."""
    domain: str
    row: int
    """Row of the global batch."""
    loss: float
    """Nats per token; NaN where it is not finite."""
    num_targets: int
    tokens: tuple[int, ...]
    """Its first 512 token ids in this row, for text features."""
    text: str
    """Decoded, at most 400 characters."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A candidate, ranked."""

    document: str
    domain: str
    row: int
    loss: float
    z: float
    """Two-sided, against the documents of its domain; infinite where the loss is not finite."""
    repetition: float
    """Share of its tokens inside a repeated n-gram run, 0 to 1."""
    entropy: float
    """Of its token frequencies, bits per token."""
    compression: float
    """Compressed over plain length of its token ids (zlib): low is repetitive, near or above 1 is noise."""
    reasons: tuple[str, ...]
    """Short phrases: why it stands out."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known when the guard concludes."""

    signals: StepSignals
    findings: tuple[Finding, ...]
    expected_loss: float = MISSING
    """What the batch's loss would have been in health."""
    skips: int = 1
    """Skipped steps in a row, this one included."""
    noise: float = 0.0
    """Relative spread of repeated passes of the same batch, the floor against which "differs" is judged; 0 under strict determinism."""
    low_precision: bool = False
    """The run computes below fp32, so that full_precision is a pass worth taking."""
    results: tuple[PassResult, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    """Most suspect first; those that ``without_suspects`` blanks."""
    probe: ProbeSignals | None = None
    probes_before: tuple[ProbeSignals, ...] = field(default=())
    """The last cadence probe, if any."""

    def result(self, kind: PassKind) -> PassResult | None:
        """The pass of a kind, if it was taken."""
        return next((r for r in self.results if r.kind == kind), None)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The likely cause, with what speaks for it."""

    cause: Literal["data", "optimiser", "numerics", "hardware", "unknown"]
    text: str
    """A sentence without a full stop."""
    suspects: tuple[Suspect, ...] = ()
    """Those that did it, when the data did."""
    cured_without: bool = False
    """Without its suspects the batch is healthy: they alone did it."""
    state_is_broken: bool = False
    """Healthy batches are bad at these weights too: only going back helps."""
    certain: bool = False
    """Shown by a pass, the batch's own tokens or the weights; else it is what such findings usually come from."""
