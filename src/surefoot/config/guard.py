"""What the guard may do, and from where on."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """How far from normal is too far. "Sigmas" are robust: 1.4826 times the median absolute deviation of de-trended accepted values."""

    loss_sigmas: float = 8.0
    """Loss above its trend, to refuse an update; below it, to call a batch too good."""
    loss_nats: float = 0.2
    """And at least so many nats per token, whatever the spread."""
    document_sigmas: float = 10.0
    """Largest document loss above its trend."""
    document_nats: float = 1.0
    """And at least so many nats per token."""
    gradient_sigmas: float = 10.0
    """Logarithm of the gradient norm above its trend, to refuse an update."""
    gradient_ratio: float = 8.0
    """And at least so many times its trend; from 1.25 times as many on, half of the sigmas are enough."""
    clip_sigmas: float = 10.0
    """Logarithm of the gradient norm above its trend, to clip harder; and at least six times its trend."""
    update_ratio: float = 3.0
    """Measured update over learning rate, against its trend, either way; and beyond gradient_sigmas of its own."""
    update_share: float = 0.2
    """Update over weights, of matrices, beyond which the rate is too high for them; a third of it at the first update, before any warm-up."""
    slow_nats: float = 0.1
    """Smoothed loss above its best, nats per token."""
    slow_steps: int = 20
    """For so many steps."""
    logit_warning: float = 100.0
    """Largest attention logit from which its growth is followed and forecast."""
    logit_ruin: float = 1e4
    """Largest attention logit beyond which every published run diverged (arXiv:2309.14322): what the forecast is for."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The ladder: note, clip harder, skip, investigate, dip the rate, roll back, halt."""

    policy: Literal["observe", "guarded", "strict"] = "guarded"
    """observe: say everything, change nothing, not even for a NaN. guarded: act on alarms. strict: act on warnings too, and halt where
    guarded would accept what it cannot explain."""
    thresholds: Thresholds = Thresholds()
    max_consecutive_skips: int = 20
    """As many skipped steps in a row stop the run with a diagnosis (exit code 76), unless the data are shown to be at fault."""
    max_data_skips: int = 100
    """The same where every one of them is shown to be the data's fault."""
    max_rejections: int = 8
    """Finite outliers in a row after which their level is taken for the new normal, said aloud; strict halts."""
    max_rollbacks: int = 4
    """Rollbacks the guard may order in a run; the next one halts it."""
    max_exclusions: int = 100
    """Documents that may be left out of a run, where they alone are shown to have spoilt a batch; it is then read again without them. 0 skips such
    batches instead."""
    max_lr_events: int = 4
    """LR events the guard may order in a run."""
    max_investigations: int = 20
    """Batches that may be investigated in any 1,000 (at most 3 extra passes each); 0 is never."""
    cooldown: int = 100
    """Batches after a rollback or LR event in which the same trouble again escalates."""
    probe_every: int = 50
    """Steps between probes of the inside (update sizes, stale moments, attention, activations); 0 is only at findings."""
    probe_rows: int = 2
    """Held-out rows a probe reads."""
    snapshots: int = 2
    """States kept in memory as rollback targets; 0 is none."""
    snapshot_every: int = 50
    """Batches between snapshots."""
    snapshot_budget_gib: float = 4.0
    """Most memory the snapshots of one rank may take; more is refused before the run starts."""
    certify_after: int = 50
    """Batches without a skipped step after which a checkpoint counts as certified."""
