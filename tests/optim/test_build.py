"""AdamW against its equations, groups by role, one step or none."""

import math

import pytest
import torch
from torch import nn

from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import AdamW, OptimConfig
from surefoot.model.role_scaling import Role
from surefoot.optim.adam import FusedAdam
from surefoot.optim.build import build_optimizer
from surefoot.optim.optimizer import Update
from tolerances import ADAMW

SETTINGS = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
MODEL = ModelConfig(
    vocab_size=7,
    d_model=4,
    num_layers=1,
    attention=GroupedQueryAttention(num_heads=1, num_kv_heads=1, d_head=4),
    feed_forward=SwiGLU(d_ff=4),
)
NO_SKIP, NO_CLIP = torch.tensor(False), torch.tensor(1.0)


def parameters(dtype: torch.dtype) -> tuple[dict[str, nn.Parameter], dict[str, Role]]:
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[tuple[int, ...], Role]] = {
        "embedding": ((7, 4), "embedding"), "w": ((4, 4), "hidden"), "head": ((7, 4), "output"),
        "gain": ((4,), "norm"), "b": ((4,), "bias"),
    }  # fmt: skip
    named = {name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, (shape, _) in shapes.items()}
    return named, {name: role for name, (_, role) in shapes.items()}


def gradients(step: int, named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(p.shape, generator=draw) for name, p in named.items()}


def reference(steps: int, lr: float, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """arXiv:1711.05101 algorithm 2 in fp64, decay by role."""
    named, roles = parameters(torch.float64)
    weights = {name: p.detach().clone() for name, p in named.items()}
    m = {name: torch.zeros_like(w) for name, w in weights.items()}
    v = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(1, steps + 1):
        for name, g in gradients(step, named).items():
            g = g.double() / scale
            decay = SETTINGS.weight_decay if roles[name] in ("hidden", "output") else 0.0
            m[name] = SETTINGS.beta1 * m[name] + (1 - SETTINGS.beta1) * g
            v[name] = SETTINGS.beta2 * v[name] + (1 - SETTINGS.beta2) * g * g
            m_hat = m[name] / (1 - SETTINGS.beta1**step)
            v_hat = v[name] / (1 - SETTINGS.beta2**step)
            weights[name] -= lr * (decay * weights[name] + m_hat / (v_hat.sqrt() + SETTINGS.eps))
    return weights


@pytest.mark.parametrize(("dtype", "tolerance"), list(ADAMW.items()))
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_fifty_steps_follow_the_equations(dtype: torch.dtype, tolerance: float, gated: bool, scale: float) -> None:
    named, roles = parameters(dtype)
    optimizer = build_optimizer(named, roles, OptimConfig(optimizer=SETTINGS), MODEL)
    for step in range(1, 51):
        for name, g in gradients(step, named).items():
            named[name].grad = g.to(dtype)
        optimizer.apply(Update(lr=1e-2, scale=torch.tensor(scale), skip=NO_SKIP, gated=gated))
    for name, expected in reference(50, 1e-2, scale).items():
        error = torch.linalg.norm(named[name].detach().double() - expected) / torch.linalg.norm(expected)
        assert error < tolerance, name


def test_norms_biases_and_embeddings_do_not_decay() -> None:
    named, roles = parameters(torch.float32)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = build_optimizer(named, roles, OptimConfig(optimizer=SETTINGS), MODEL)
    for p in named.values():
        p.grad = torch.zeros_like(p)
    optimizer.apply(Update(lr=0.5, scale=NO_CLIP, skip=NO_SKIP, gated=True))
    for name in ("embedding", "gain", "b"):
        assert torch.equal(named[name], before[name])
    for name in ("w", "head"):
        assert torch.allclose(named[name], before[name] * (1 - 0.5 * SETTINGS.weight_decay))


def test_moments_exist_by_name_before_the_first_step_and_stay_zero_when_it_is_skipped() -> None:
    named, roles = parameters(torch.float32)
    optimizer = build_optimizer(named, roles, OptimConfig(), MODEL)
    for p in named.values():
        p.grad = torch.full_like(p, math.nan)
    optimizer.apply(Update(lr=1e-2, scale=torch.tensor(math.nan), skip=torch.tensor(True), gated=True))
    moments = optimizer.tensors()
    assert moments.keys() == {f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq") for name in named}
    assert all(not tensor.any() for tensor in moments.values())
    assert float(optimizer.step_count()) == 0


def test_a_parameter_without_a_gradient_counts_its_steps_like_the_others() -> None:
    """One count for all is what a checkpoint brings back."""
    named, roles = parameters(torch.float32)
    optimizer = build_optimizer(named, roles, OptimConfig(), MODEL)
    for skip in (False, True, False):
        for name, p in named.items():
            p.grad = None if name == "w" else torch.ones_like(p)
        before = named["w"].detach().clone()
        optimizer.apply(Update(lr=1e-2, scale=NO_CLIP, skip=torch.tensor(skip)))
        assert torch.equal(named["w"], before)
    (rule,) = optimizer.rules
    assert isinstance(rule, FusedAdam)
    assert {float(state["step"]) for state in rule.kernel.state.values()} == {2.0}


def test_a_parameter_without_a_role_is_an_error_that_names_it() -> None:
    named, roles = parameters(torch.float32)
    del roles["gain"]
    with pytest.raises(ValueError, match="no role for parameter 'gain'"):
        build_optimizer(named, roles, OptimConfig(), MODEL)
