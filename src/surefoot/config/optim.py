"""How parameters move: optimiser, schedule, clipping."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Warm-up, then the peak rate."""

    kind: Literal["constant"] = "constant"


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Warm-up, then half a cosine down to ``min_ratio`` (arXiv:1608.03983 eq. 5, one cycle)."""

    kind: Literal["cosine"] = "cosine"
    min_ratio: float = 0.1
    """Final rate over peak rate."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Warm-up, then a straight line down to ``min_ratio``."""

    kind: Literal["linear"] = "linear"
    min_ratio: float = 0.0
    """Final rate over peak rate."""


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm-up, stable, then a straight decay over the last ``decay_fraction`` of the steps (arXiv:2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay_fraction: float = 0.2
    """Share of all steps spent decaying."""
    min_ratio: float = 0.0
    """Final rate over peak rate."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101 algorithm 2): decay per step is lr times ``weight_decay``."""

    kind: Literal["adamw"] = "adamw"
    beta1: float = 0.9
    """Decay of the running mean of gradients, per step."""
    beta2: float = 0.95
    """Decay of the running mean of squared gradients, per step."""
    eps: float = 1e-8
    """Added to the root of the second moment; should stay far below the size of gradients."""
    weight_decay: float = 0.1
    """For hidden matrices and an untied output; norms, biases and embeddings have none."""


@dataclass(frozen=True, kw_only=True)
class GlobalNorm:
    """No more than ``clip_norm`` itself: one scale for the whole gradient (arXiv:1211.5063 algorithm 1)."""

    kind: Literal["global"] = "global"


@dataclass(frozen=True, kw_only=True)
class ZClip:
    """A norm that stands out from its own running mean is pulled back towards it, the further out the closer (arXiv:2504.02507)."""

    kind: Literal["zclip"] = "zclip"
    alpha: float = 0.97
    """Weight of the past in the running mean and variance of the norm."""
    z_threshold: float = 2.5
    """Standard deviations above the mean from which the norm is clipped."""
    warmup_steps: int = 25
    """Applied steps whose norms make the first mean and variance; until then only ``clip_norm`` holds."""


@dataclass(frozen=True, kw_only=True)
class AdaGC:
    """Each tensor's gradient is held to the running mean of its own norm (arXiv:2502.11034 algorithm 1)."""

    kind: Literal["adagc"] = "adagc"
    ratio: float = 1.05
    """Largest norm of a tensor's gradient over its running mean."""
    beta: float = 0.98
    """Weight of the past in that mean."""
    warmup_steps: int = 100
    """Applied steps with ``clip_norm`` alone, over which the smallest norm of each tensor is taken for its first mean."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """One optimiser for all roles, its learning rate a closed form of ``step``."""

    optimizer: AdamW = AdamW()
    lr: float = 3e-3
    """Peak learning rate."""
    schedule: Constant | Cosine | Linear | WSD = WSD()
    """What the rate does after the warm-up."""
    warmup_steps: int = 100
    """Steps of linear warm-up; the first step already moves (lr times 1/warmup_steps)."""
    clip_norm: float = 1.0
    """Largest global gradient norm an update sees, whatever ``clipping`` leaves of it; 0 is off."""
    clipping: GlobalNorm | ZClip | AdaGC = GlobalNorm()
    """What bends to the run's own norms below that hard cap."""
    gated: bool = True
    """The optimiser decides on the device whether a step is skipped (same bits as deciding on the host, which unset it does)."""
