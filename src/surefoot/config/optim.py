"""How parameters move: optimiser, schedule, clipping, and what differs by role."""

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
class OneMinusSqrt:
    """Warm-up, then down with 1 - sqrt(progress) to ``min_ratio``: fast at first (arXiv:2405.18392 section 3)."""

    kind: Literal["one_minus_sqrt"] = "one_minus_sqrt"
    min_ratio: float = 0.0
    """Final rate over peak rate."""


@dataclass(frozen=True, kw_only=True)
class InverseSqrt:
    """Warm-up, then with the inverse root of the step, sqrt(warmup_steps / step) (arXiv:1706.03762 eq. 3): needs no end."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"


@dataclass(frozen=True, kw_only=True)
class Power:
    """Warm-up, the peak rate, and from ``peak_steps`` on the step to a negative power, (peak_steps / step)^exponent: needs no end.

    With a batch that stays the same this is the power law of arXiv:2408.13359, min(lr, a x batch size x tokens^-0.51), whose amplitude
    ``a`` is here said by the step at which it meets ``optim.lr``; the decay that ends their runs is not part of it.
    """

    kind: Literal["power"] = "power"
    exponent: float = 0.51
    """Of the step; larger falls faster."""
    peak_steps: int = 0
    """Step at which the law meets the peak rate and begins to fall; 0 is the end of the warm-up."""


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warm-up, stable, then a decay over the last ``decay_fraction`` of the steps (arXiv:2404.06395).

    A decay branch from any checkpoint is a fork: ``surefoot fork RUN --at 4000 --set steps=5000 --set optim.schedule.decay_steps=1000``.
    """

    kind: Literal["wsd"] = "wsd"
    decay_fraction: float = 0.2
    """Share of all steps spent decaying."""
    decay_steps: int = 0
    """The same as a number of steps, which then wins; 0 leaves it to ``decay_fraction``."""
    shape: Literal["linear", "one_minus_sqrt", "cosine"] = "linear"
    """Of the decay (arXiv:2405.18392 finds 1 - sqrt a little better than a line)."""
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
    """Of the roles that decay (``optim.roles``): hidden matrices and an untied output unless changed."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam as published (arXiv:1412.6980 algorithm 1); ``weight_decay`` is an L2 penalty, a part of the gradient."""

    kind: Literal["adam"] = "adam"
    beta1: float = 0.9
    """Decay of the running mean of gradients, per step."""
    beta2: float = 0.95
    """Decay of the running mean of squared gradients, per step."""
    eps: float = 1e-8
    """Added to the root of the second moment; should stay far below the size of gradients."""
    weight_decay: float = 0.0
    """Times the weight, added to its gradient before the moments."""


@dataclass(frozen=True, kw_only=True)
class StableAdamW:
    """AdamW whose rate is divided, tensor by tensor, by how far the second moment lags behind, max(1, RMS_t) (arXiv:2304.13013 algorithm 2)."""

    kind: Literal["stable_adamw"] = "stable_adamw"
    beta1: float = 0.9
    """Decay of the running mean of gradients, per step."""
    beta2: float = 0.99
    """Decay of the running mean of squared gradients, per step."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Of the roles that decay (``optim.roles``)."""


@dataclass(frozen=True, kw_only=True)
class Lion:
    """The sign of an interpolated momentum (arXiv:2302.06675 algorithm 2); wants about a third to a tenth of AdamW's rate, and as much more decay."""

    kind: Literal["lion"] = "lion"
    beta1: float = 0.9
    """Share of the momentum in what the sign is taken of."""
    beta2: float = 0.99
    """Decay of the momentum, per step."""
    weight_decay: float = 1.0
    """Of the roles that decay (``optim.roles``)."""


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Orthogonalised momentum for hidden matrices, experts and latent projections (Jordan et al. 2024), with ``others`` for all other roles.

    The update of an (out, in) matrix is scaled by 0.2 sqrt(max(out, in)), which gives it the RMS of AdamW's, so that rate and decay carry
    over (Moonlight, arXiv:2502.16982 eq. 4).
    """

    kind: Literal["muon"] = "muon"
    momentum: float = 0.95
    """Decay of the running sum of gradients, per step."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    newton_schulz: Literal["bf16", "fp32"] = "bf16"
    """Precision of the orthogonalisation; bf16 as published."""
    newton_schulz_steps: int = 5
    """Iterations of the quintic polynomial."""
    weight_decay: float = 0.1
    """Of the roles that decay (``optim.roles``)."""
    others: AdamW | StableAdamW | Lion = AdamW()
    """For embeddings, the output, norms, biases and routers; with the same ``optim.lr``."""


MUON_ROLES = frozenset({"hidden", "expert", "latent"})
"""Roles that Muon moves: matrices of the inside. The router picks among few columns, embeddings and output are used row by row (Jordan et al. 2024)."""


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
class RoleSettings:
    """What one role changes; the multipliers of the parametrization come on top."""

    lr: float = 1.0
    """Times ``optim.lr``."""
    decay: float = 1.0
    """Times the optimiser's ``weight_decay``; 0 is none."""
    eps: float = 1.0
    """Times the optimiser's ``eps``."""


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    """Rate, decay and epsilon by role of parameter."""

    embedding: RoleSettings = RoleSettings(decay=0.0)
    """Decay drives embeddings small, which makes gradients large (OLMo 2, arXiv:2501.00656 section 3.3); a tied output follows."""
    hidden: RoleSettings = RoleSettings()
    """Matrices of attention and feed-forward."""
    output: RoleSettings = RoleSettings()
    """An untied output projection."""
    norm: RoleSettings = RoleSettings(decay=0.0)
    """Gains: decay would pull them to 0, not to 1."""
    bias: RoleSettings = RoleSettings(decay=0.0)
    """Biases do not decay (arXiv:1812.01187 section 3.1)."""
    router: RoleSettings = RoleSettings()
    """Which expert a token goes to."""
    expert: RoleSettings = RoleSettings()
    """Matrices of experts, stacked."""
    latent: RoleSettings = RoleSettings()
    """Compressions of latent attention."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How parameters move: an update rule for every role, its learning rate a closed form of ``step``."""

    optimizer: AdamW | Adam | StableAdamW | Lion | Muon = AdamW()
    """The update rule."""
    lr: float = 3e-3
    """Peak learning rate."""
    roles: RolesConfig = RolesConfig()
    decay: Literal["decoupled", "independent"] = "decoupled"
    """decoupled: a step shrinks weights by lr times weight_decay. independent: by weight_decay times the rate over its peak, so that
    tuning lr leaves the decay alone (arXiv:2309.14322 section 3.2.2); weight_decay is then small, 1e-4."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """What optimisers remember; bf16 halves it, rounded stochastically with draws seeded by (seed, batch, name)."""
    qk_clip: float = 0.0
    """Heads whose largest attention logit is above this have their query and key matrices scaled back after the update (Kimi K2,
    arXiv:2507.20534 section 2.1, takes 100); 0 is off."""
    schedule: Constant | Cosine | Linear | OneMinusSqrt | InverseSqrt | Power | WSD = WSD()
    """What the rate does after the warm-up."""
    warmup_steps: int = 100
    """Steps of linear warm-up; the first step already moves (lr times 1/warmup_steps)."""
    ramp_lr: Literal["none", "sqrt", "linear"] = "none"
    """How the rate follows a ramp of the batch size, relative to ``data.batch_size``: the root for Adam's kind (arXiv:2205.10287), linear for SGD's."""
    clip_norm: float = 1.0
    """Largest global gradient norm an update sees, whatever ``clipping`` leaves of it; 0 is off."""
    clipping: GlobalNorm | ZClip | AdaGC = GlobalNorm()
    """What bends to the run's own norms below that hard cap."""
    gated: bool = True
    """The optimiser decides on the device whether a step is skipped, where its kernel can (same bits as deciding on the host, which unset it does)."""
