"""The published update rules in plain fp64, tensor by tensor, and a few parameters of every kind to try them on."""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import Adam, AdamW, Lion, OptimConfig, RolesConfig, RoleSettings, StableAdamW
from surefoot.model.role_scaling import Role

PEAK = 2e-2
KINDS: dict[str, AdamW | Adam | StableAdamW | Lion] = {
    "adamw": AdamW(beta1=0.8, beta2=0.95, eps=1e-2, weight_decay=0.3),
    "adam": Adam(beta1=0.8, beta2=0.95, eps=1e-2, weight_decay=0.3),
    "stable_adamw": StableAdamW(beta1=0.8, beta2=0.97, eps=1e-2, weight_decay=0.3),
    "lion": Lion(beta1=0.9, beta2=0.96, weight_decay=0.3),
}
"""Numbers of which each shows: no epsilon that is lost beside a root, no two betas alike."""
ROLES = RolesConfig(
    embedding=RoleSettings(lr=0.5, decay=0.25, eps=3.0),
    hidden=RoleSettings(lr=1.5, decay=1.0, eps=1.0),
    output=RoleSettings(lr=0.7, decay=2.0, eps=0.3),
    norm=RoleSettings(lr=2.0, decay=0.0, eps=5.0),
    bias=RoleSettings(lr=1.2, decay=0.5, eps=0.1),
)
"""Every role its own."""
MODEL = ModelConfig(
    vocab_size=7,
    d_model=4,
    num_layers=1,
    attention=GroupedQueryAttention(num_heads=1, num_kv_heads=1, d_head=4),
    feed_forward=SwiGLU(d_ff=4),
)
SHAPES: dict[str, tuple[tuple[int, ...], Role]] = {
    "embedding": ((7, 4), "embedding"), "w": ((4, 4), "hidden"), "head": ((7, 4), "output"),
    "gain": ((4,), "norm"), "b": ((4,), "bias"),
}  # fmt: skip


def settings(kind: str, decay: str = "decoupled", **others: object) -> OptimConfig:
    """A config of one kind of optimiser, every role its own; epsilons only where there is one."""
    roles = ROLES
    if kind == "lion":
        one = {f.name: dataclasses.replace(getattr(ROLES, f.name), eps=1.0) for f in dataclasses.fields(ROLES)}
        roles = RolesConfig(**one)
    optimizer = KINDS[kind]
    if decay == "independent":
        optimizer = dataclasses.replace(optimizer, weight_decay=0.01)
    return OptimConfig(optimizer=optimizer, lr=PEAK, roles=roles, decay=decay, **others)  # type: ignore[arg-type]


def parameters(dtype: torch.dtype) -> tuple[dict[str, nn.Parameter], dict[str, Role]]:
    draw = torch.Generator().manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, (shape, _) in SHAPES.items()}
    return named, {name: role for name, (_, role) in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    """fp32, of a size that changes from step to step, so that second moments lag behind."""
    draw = torch.Generator().manual_seed(100 + step)
    size = 1.0 + 2.0 * math.sin(step) ** 2
    return {name: size * torch.randn(shape, generator=draw) for name, (shape, _) in SHAPES.items()}


def rate(step: int) -> float:
    """A schedule that is not constant: of update ``step``, from 1."""
    return PEAK * min(1.0, step / 10) * (1.0 if step < 30 else 0.5)


def reference(config: OptimConfig, steps: int, scale: float = 1.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights by name and moments by key after ``steps`` updates, gradients divided by ``scale``."""
    named, roles = parameters(torch.float64)
    weights = {name: p.detach().clone() for name, p in named.items()}
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(1, steps + 1):
        for name, g in gradients(step).items():
            one(config, roles[name], step, weights[name], g.double() / scale, m[name], v[name])
    moments = {f"exp_avg/{name}": t for name, t in m.items()}
    if not isinstance(config.optimizer, Lion):
        moments |= {f"exp_avg_sq/{name}": t for name, t in v.items()}
    return weights, moments


def one(config: OptimConfig, role: Role, step: int, w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """One update of one tensor, in place, as the papers have it."""
    kind, mine = config.optimizer, getattr(config.roles, role)
    lr = rate(step) * mine.lr
    decay = lr * kind.weight_decay * mine.decay  # type: ignore[union-attr]
    if config.decay == "independent":
        decay = rate(step) / config.lr * kind.weight_decay * mine.decay  # type: ignore[union-attr]
    match kind:
        case Lion(beta1=b1, beta2=b2):
            sign = torch.sign(b1 * m + (1 - b1) * g)
            m.copy_(b2 * m + (1 - b2) * g)
            w.copy_(w - lr * sign - decay * w)
        case StableAdamW(beta1=b1, beta2=b2):
            eps = kind.eps * mine.eps
            b1, b2 = ((b**step - b) / (b**step - 1) for b in (b1, b2))
            m.copy_(b1 * m + (1 - b1) * g)
            v.copy_(b2 * v + (1 - b2) * g * g)
            lag = max(1.0, float((g * g / torch.clamp(v, min=eps**2)).mean().sqrt()))
            w.copy_(w - (decay * w + lr * m / (v.sqrt() + eps)) / lag)
        case Adam(beta1=b1, beta2=b2) | AdamW(beta1=b1, beta2=b2):
            if isinstance(kind, Adam):
                g, decay = g + kind.weight_decay * mine.decay * w, 0.0
            m.copy_(b1 * m + (1 - b1) * g)
            v.copy_(b2 * v + (1 - b2) * g * g)
            w.copy_(w - lr * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + kind.eps * mine.eps) - decay * w)


def error(found: Tensor, expected: Tensor) -> float:
    """||a - b|| / ||b||."""
    return float(torch.linalg.norm(found.detach().double() - expected) / torch.linalg.norm(expected))


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest error of all tensors, which must have the same names."""
    assert found.keys() == expected.keys()
    return max(error(found[name], expected[name]) for name in expected)
