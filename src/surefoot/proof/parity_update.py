"""The first update of every optimiser, from moments that are zero, as its paper has it."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.config.model import ModelConfig
from surefoot.config.optim import Adam, AdamW, Lion, Muon, OptimConfig, StableAdamW
from surefoot.model.role_scaling import Role
from surefoot.optim.build import optimizer_of, setting_of
from surefoot.optim.optimizer import Setting

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Muon's polynomial (Jordan et al. 2024)."""


def first_update(
    weights: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
    norm: float,
    lr: float,
    config: OptimConfig,
    model: ModelConfig,
    roles: Mapping[str, Role],
    rows: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    """Weights and moments after it, by the names of a state, in the dtype of the weights; computed in fp64.

    ``norm`` is the gradient's, ``lr`` the schedule's. Weights are left out where QK-clip changes some of them afterwards; the moments of
    optimisers that keep them in bf16 are left out.
    """
    divisor = max(1.0, norm / config.clip_norm) if config.clip_norm else 1.0
    after: dict[str, Tensor] = {}
    for name, weight in weights.items():
        setting = setting_of(name, roles[name], config, model, rows.get(name, ()))
        moved, moments = _one(
            optimizer_of(roles[name], config),
            setting,
            weight.double(),
            gradient[name].double() / divisor,
            lr * setting.lr,
        )
        if not config.qk_clip:
            after[f"weights/{name}"] = moved.to(weight.dtype)
        if config.moments == "fp32":
            after |= {f"{key}/{name}": moment.to(weight.dtype) for key, moment in moments.items()}
    return after


def _one(
    kind: AdamW | Adam | StableAdamW | Lion | Muon, setting: Setting, w: Tensor, g: Tensor, lr: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """One tensor: the weight and the moments that it leaves."""
    decayed = w * (1 - lr * setting.weight_decay)
    match kind:
        case Adam():
            g = g + setting.weight_decay * w
            moved = w - lr * g / (g.abs() + setting.eps)
        case AdamW():
            moved = decayed - lr * g / (g.abs() + setting.eps)
        case StableAdamW():
            lag = max(1.0, float((g * g / torch.clamp(g * g, min=setting.eps**2)).mean().sqrt()))
            moved = w + (decayed - w - lr * g / (g.abs() + setting.eps)) / lag
            return moved, {"exp_avg": g, "exp_avg_sq": g * g}
        case Lion():
            return decayed - lr * torch.sign(g), {"exp_avg": (1 - kind.beta2) * g}
        case Muon():
            u = g * (1 + kind.momentum) if kind.nesterov else g
            matrices = torch.split_with_sizes(u, list(setting.rows or [len(u)]))
            directions = [_orthogonal(m, kind.newton_schulz_steps) * 0.2 * math.sqrt(max(m.shape)) for m in matrices]
            return decayed - lr * torch.cat(directions), {"momentum": g}
    return moved, {"exp_avg": (1 - kind.beta1) * g, "exp_avg_sq": (1 - kind.beta2) * g * g}


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz by the singular values, which are all that the polynomial changes."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / torch.linalg.norm(s)
    a, b, c = QUINTIC
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    product: Tensor = (u * s) @ vt
    return product
