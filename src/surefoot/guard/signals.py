"""The reduced numbers that the guard judges: the same bits on every rank, but for ``PaceSignals``, which are rank 0's clock."""

import math
from dataclasses import dataclass

MISSING = math.nan
"""A number that was not measured. Missing values are normal: detectors pass over them."""


@dataclass(frozen=True, kw_only=True)
class DomainStats:
    """Losses of one domain's documents in one batch; a document here is the piece of it that one row holds."""

    name: str
    num_documents: int
    """Pieces with at least ``MIN_TARGETS`` (train/documents.py) predicted tokens."""
    mean: float
    """Of their losses, nats per token each."""
    mean_square: float
    """Of their squared losses: the variance is mean_square - mean^2."""


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """What the tokens of the whole batch say without the model; shares are between 0 and 1, of predicted tokens unless said otherwise."""

    misaligned: float = 0.0
    """Targets that are not the next token of their own row (the last token of a row cannot be checked)."""
    copied: float = 0.0
    """Targets equal to their own input token: a few per cent in text, nearly all when the target leaks."""
    repeated: float = 0.0
    """Tokens inside a run of at least 32 repetitions of a period of 1 to 13 tokens (the published rule, OLMo 2 arXiv:2501.00656)."""
    duplicated: float = 0.0
    """Share of the rows whose tokens were also read in this batch or the last 64 under another (source, row). An epoch that reads a row again
    under its own number does not count, nor does a row mostly blank or of one token."""


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
    applied: bool = True
    """The device applied the update: nothing was beyond a limit."""
    overflowed: bool = False
    """The gradient is not finite because the loss was scaled too far (fp16): the update was skipped and the scale lowered, and that is no fault."""
    clipped_harder: bool = False
    """The gradient was scaled down to the guard's own limit, below the configured one."""
    lr: float = MISSING
    """Learning rate of the update, LR events included."""
    regime: int = 0
    """Number of the scheduled data regime: grows at every configured change of mixture or batch size."""
    document_loss_max: float = MISSING
    """Largest loss of a document piece, nats per token."""
    document_loss_p999: float = MISSING
    """99.9th percentile of the same; the largest where the batch has fewer than 1,000 pieces."""
    domains: tuple[DomainStats, ...] = ()
    """In the order of the sources."""
    role_gradient_norms: tuple[tuple[str, float], ...] = ()
    """(role, 2-norm) before any scaling."""
    nonfinite: int = 0
    """Elements of gradients that are not finite; counted only when the norm is not."""
    first_nonfinite: str = ""
    """First parameter, in the model's order, whose gradient is not finite."""
    logsumexp_mean: float = MISSING
    logsumexp_max: float = MISSING
    tokens_excluded: int = 0
    update_size: float = MISSING
    """Root mean square of what the update changed in a fixed sample of weights (embeddings left out), measured before and after; 0 when skipped."""
    optimizer_steps: int = -1
    """Updates that the optimiser itself has counted; -1 is not known. Must equal ``step``."""
    facts: BatchFacts = BatchFacts()
    gradient_known: bool = True
    """False only for a row of a log that has no gradient norm: NaN there is missing, and no verdict."""

    @property
    def finite(self) -> bool:
        """Loss and gradient norm are numbers an update may be made of."""
        return math.isfinite(self.loss) and (math.isfinite(self.gradient_norm) or not self.gradient_known)


@dataclass(frozen=True, kw_only=True)
class RoleProbe:
    """One role's parameters, by the moments; embeddings too unless said otherwise."""

    role: str
    weight_norm: float
    update_norm: float
    """2-norm of the update that the moments, the learning rate and the decay give."""
    largest_weight: float
    """Largest magnitude of an element, over the root mean square of its own tensor; the largest over the role's tensors."""
    lr: float = MISSING
    """Learning rate of these parameters at the step."""
    weight_decay: float = MISSING
    """Share of a weight that decay took off at the step; missing where decay is a part of the gradient."""
    rms_t: float = MISSING
    """sqrt(mean(g^2 / v_t)) with v_t corrected for bias (arXiv:2304.13013); missing for embeddings, whose rare rows have v near 0."""

    @property
    def update_ratio(self) -> float:
        """Update size over weight size."""
        return self.update_norm / self.weight_norm if self.weight_norm > 0 else MISSING


@dataclass(frozen=True, kw_only=True)
class LayerProbe:
    """One layer on a few fixed held-out rows."""

    layer: int
    attention_logit_max: float = MISSING
    """Largest q.k / sqrt(H) that a query may see."""
    attention_entropy: float = MISSING
    """Mean entropy of the attention weights of queries that see at least 16 keys, over the entropy of the uniform distribution: 0 to 1."""
    activation_rms: float = MISSING
    """Root mean square of the residual stream after the layer."""
    activation_max: float = MISSING


@dataclass(frozen=True, kw_only=True)
class ProbeSignals:
    """Figures of the inside, taken on a cadence and at findings."""

    step: int
    roles: tuple[RoleProbe, ...] = ()
    layers: tuple[LayerProbe, ...] = ()
    weights_finite: bool = True
    beta2: float = MISSING
    """Decay of the second moment: RMS_t cannot exceed 1/sqrt(1 - beta2)."""


@dataclass(frozen=True, kw_only=True)
class EvalSignals:
    """Held-out losses of one evaluation."""

    step: int
    losses: tuple[tuple[str, float], ...]
    """(domain, nats per token)."""


@dataclass(frozen=True, kw_only=True)
class PaceSignals:
    """Rank 0's clock for one batch. Judged apart, never saved, never a reason for more than a note."""

    batch_index: int
    seconds: float
    """Wall time of the batch, its wait for data included; evaluations, checkpoints and investigations left out."""
    data_wait: float
    tokens: int
