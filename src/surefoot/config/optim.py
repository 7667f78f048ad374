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
    """Largest global gradient norm an update sees; 0 is off."""
    gated: bool = True
    """The optimiser decides on the device whether a step is skipped (same bits as deciding on the host, which unset it does)."""
