"""What is set for a role reaches its weights, under every optimiser, and each follows its own equations."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from optimiser_equations import KINDS, MODEL, PEAK, gradients, parameters, rate, reference, settings, worst
from surefoot.config.model import CompleteP, MuP
from surefoot.config.optim import AdamW, Lion, OptimConfig, RolesConfig, RoleSettings
from surefoot.optim.build import build_optimizer
from surefoot.optim.narrow_adam import NarrowAdam
from surefoot.optim.optimizer import Optimizer, Update
from tolerances import OPTIMISERS, RECOMPUTED_UPDATE

NO_SKIP, NO_CLIP = torch.tensor(False), torch.tensor(1.0)
STEPS = 50
CASES = [
    (kind, decay)
    for kind in KINDS
    for decay in ("decoupled", "independent")
    if (kind, decay) != ("adam", "independent")
]


def take_steps(
    optimizer: Optimizer | NarrowAdam, named: dict[str, nn.Parameter], steps: int, scale: float = 1.0, **update: bool
) -> None:
    for step in range(1, steps + 1):
        for name, gradient in gradients(step).items():
            named[name].grad = gradient.to(named[name].dtype)
        optimizer.apply(Update(lr=rate(step), scale=torch.tensor(scale), skip=NO_SKIP, batch_index=step, **update))


@pytest.mark.parametrize(("dtype", "tolerance"), list(OPTIMISERS.items()))
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(("kind", "decay"), CASES)
def test_fifty_steps_follow_the_published_equations_with_every_role_its_own(
    kind: str, decay: str, scale: float, dtype: torch.dtype, tolerance: float
) -> None:
    config = settings(kind, decay)
    named, roles = parameters(dtype)
    optimizer = build_optimizer(named, roles, config, MODEL)
    take_steps(optimizer, named, STEPS, scale)
    weights, moments = reference(config, STEPS, scale)
    assert worst(named, weights) < tolerance
    assert worst(optimizer.tensors(), moments) < tolerance
    assert float(optimizer.step_count()) == STEPS


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize(("dtype", "tolerance"), list(OPTIMISERS.items()))
def test_the_arithmetic_of_narrow_moments_is_that_of_the_equations_where_nothing_is_narrow(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    config = settings(kind)
    named, roles = parameters(dtype)
    per_role = build_optimizer(named, roles, config, MODEL).settings
    assert config.optimizer.kind in ("adam", "adamw")
    rule = NarrowAdam(named, per_role, config.optimizer, narrow_moments=False)  # type: ignore[arg-type]
    take_steps(rule, named, STEPS)
    weights, moments = reference(config, STEPS)
    assert worst(named, weights) < tolerance
    assert worst(rule.tensors(), moments) < tolerance


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_device_and_the_host_decide_to_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    ends = []
    for gated in (True, False):
        named, roles = parameters(dtype)
        optimizer = build_optimizer(named, roles, settings(kind), MODEL)
        take_steps(optimizer, named, 5, 3.0, gated=gated)
        ends.append(dict(named) | optimizer.tensors())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize("kind", [*KINDS, "narrow"])
def test_the_last_update_is_the_change_of_the_weights(kind: str) -> None:
    named, roles = parameters(torch.float64)
    config = settings("adamw" if kind == "narrow" else kind)
    optimizer = build_optimizer(named, roles, config, MODEL)
    if kind == "narrow":
        rule = NarrowAdam(named, optimizer.settings, config.optimizer, narrow_moments=False)  # type: ignore[arg-type]
        optimizer = Optimizer(named, optimizer.settings, [rule])
    names = ["head", "gain", "embedding", "b", "w"]
    assert all(t.isnan().all() for t in optimizer.rules[0].last_updates(names, PEAK))
    take_steps(optimizer, named, 3)
    before = {name: p.detach().clone() for name, p in named.items()}
    for name, gradient in gradients(4).items():
        named[name].grad = gradient.double()
    optimizer.apply(Update(lr=rate(4), scale=torch.tensor(2.5), skip=NO_SKIP))
    found = dict(zip(names, optimizer.rules[0].last_updates(names, rate(4)), strict=True))
    assert worst(found, {name: named[name].detach() - before[name] for name in names}) < RECOMPUTED_UPDATE


@pytest.mark.parametrize("kind", ["lion", "stable_adamw"])
def test_of_a_refused_or_restored_update_nothing_is_known(kind: str) -> None:
    """A resumed run must say what an uninterrupted one says."""
    named, roles = parameters(torch.float64)
    optimizer = build_optimizer(named, roles, settings(kind), MODEL)
    take_steps(optimizer, named, 2)
    assert not any(t.isnan().any() for t in optimizer.rules[0].last_updates(list(named), PEAK))
    optimizer.apply(Update(lr=PEAK, scale=NO_CLIP, skip=torch.tensor(True)))
    assert all(t.isnan().all() for t in optimizer.rules[0].last_updates(list(named), PEAK))
    take_steps(optimizer, named, 1)
    optimizer.set_step_count(3)
    assert all(t.isnan().all() for t in optimizer.rules[0].last_updates(list(named), PEAK))


@pytest.mark.parametrize("kind", ["adamw", "adam", "stable_adamw"])
def test_second_moments_are_free_of_bias(kind: str) -> None:
    """Gradients of one size from the first step on: the root is that size."""
    for dtype, narrow in ((torch.float64, "fp32"), (torch.float32, "bf16")):
        named, roles = parameters(dtype)
        config = dataclasses.replace(settings(kind), moments=narrow)  # type: ignore[arg-type]
        if kind == "adam":
            config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, weight_decay=0.0))
        optimizer = build_optimizer(named, roles, config, MODEL)
        assert all(t.isnan().all() for t in optimizer.rules[0].second_moments(list(named)) or [torch.zeros(1)])
        for _ in range(3):
            for p in named.values():
                p.grad = torch.full_like(p, 0.5)
            optimizer.apply(Update(lr=PEAK, scale=NO_CLIP, skip=NO_SKIP))
        roots = optimizer.rules[0].second_moments(["w", "gain"])
        assert roots is not None
        for root in roots:
            assert root.dtype == dtype
            assert torch.allclose(root, torch.full_like(root, 0.5), rtol=1e-12 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("narrow", ["fp32", "bf16"])
def test_a_refused_update_leaves_every_bit(kind: str, narrow: str) -> None:
    named, roles = parameters(torch.float32)
    config = dataclasses.replace(settings(kind), moments=narrow)  # type: ignore[arg-type]
    optimizer = build_optimizer(named, roles, config, MODEL)
    take_steps(optimizer, named, 3)
    before = {name: t.clone() for name, t in (dict(named) | optimizer.tensors()).items()}
    for p in named.values():
        p.grad = torch.full_like(p, math.nan)
    optimizer.apply(Update(lr=PEAK, scale=torch.tensor(math.nan), skip=torch.tensor(True)))
    after = dict(named) | optimizer.tensors()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert float(optimizer.step_count()) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_stays_as_it_is(kind: str) -> None:
    named, roles = parameters(torch.float32)
    optimizer = build_optimizer(named, roles, settings(kind), MODEL)
    before = named["w"].detach().clone()
    for name, p in named.items():
        p.grad = None if name == "w" else torch.ones_like(p)
    moved = named["head"].detach().clone()
    optimizer.apply(Update(lr=PEAK, scale=NO_CLIP, skip=NO_SKIP))
    assert torch.equal(named["w"], before)
    assert not any(t.any() for name, t in optimizer.tensors().items() if name.endswith("/w"))
    assert not torch.equal(named["head"], moved)


def test_the_parametrization_reaches_rate_decay_and_epsilon_of_the_kernel() -> None:
    """Twice the width and four times the depth of the base; per role against the table, and as moved weights."""
    wide = dataclasses.replace(
        MODEL, num_layers=4, parametrization=CompleteP(base_d_model=2, base_num_layers=1, alpha=0.5)
    )
    config = settings("adamw")
    named, roles = parameters(torch.float64)
    named, roles = parameters(torch.float64)
    inside = "blocks.0.attention.query.weight"
    named[inside], roles[inside] = named.pop("w"), roles.pop("w")
    optimizer = build_optimizer(named, roles, config, wide)
    hidden, base = optimizer.settings[inside], config.roles.hidden
    # m_d = 2, m_L = 4: rate m_d^-1 m_L^-1/2, decay m_d, epsilon m_d^-1 m_L^-1/2 (arXiv:2505.01618 table 1)
    assert hidden.lr == pytest.approx(base.lr / 2 / 2)
    assert hidden.weight_decay == pytest.approx(0.3 * base.decay * 2)
    assert hidden.eps == pytest.approx(1e-2 * base.eps / 2 / 2)
    assert optimizer.settings["embedding"].lr == config.roles.embedding.lr
    for p in named.values():
        p.grad = torch.full_like(p, 0.02)
    before = named[inside].detach().clone()
    optimizer.apply(Update(lr=PEAK, scale=NO_CLIP, skip=NO_SKIP))
    expected = -PEAK * hidden.lr * (0.02 / (0.02 + hidden.eps) + hidden.weight_decay * before)
    assert torch.allclose(named[inside] - before, expected, rtol=1e-10)


def test_mup_divides_the_rate_of_lion_by_the_width() -> None:
    named, roles = parameters(torch.float64)
    before = {name: p.detach().clone() for name, p in named.items()}
    config = OptimConfig(optimizer=Lion(weight_decay=0.0), lr=PEAK)
    wide = dataclasses.replace(MODEL, parametrization=MuP(base_d_model=1))
    optimizer = build_optimizer(named, roles, config, wide)
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.apply(Update(lr=PEAK, scale=NO_CLIP, skip=NO_SKIP))
    for name, times in (("w", 0.25), ("embedding", 1.0), ("gain", 1.0), ("head", 1.0)):
        assert torch.allclose(before[name] - named[name], torch.full_like(before[name], PEAK * times)), name


def test_independent_decay_is_the_same_at_all_rates_and_widths() -> None:
    for lr, base in ((1e-3, 4), (1e-1, 1)):
        model = dataclasses.replace(MODEL, parametrization=MuP(base_d_model=base))
        config = OptimConfig(
            optimizer=AdamW(weight_decay=1e-2),
            lr=lr,
            decay="independent",
            roles=RolesConfig(hidden=RoleSettings(lr=3.0, decay=0.5)),
        )
        named, roles = parameters(torch.float64)
        optimizer = build_optimizer(named, roles, config, model)
        before = named["w"].detach().clone()
        for p in named.values():
            p.grad = torch.zeros_like(p)
        optimizer.apply(Update(lr=lr / 4, scale=NO_CLIP, skip=NO_SKIP))
        assert torch.allclose(named["w"], before * (1 - 1e-2 * 0.5 / 4), rtol=1e-12)


def test_the_reference_itself_knows_one_role_from_another() -> None:
    """Each role's rate, decay and epsilon changes its tensors and no others: what the comparison above can see."""
    config = settings("adamw")
    plain, _ = reference(config, 5)
    for field in dataclasses.fields(RolesConfig):
        mine = getattr(config.roles, field.name)
        _, roles = parameters(torch.float64)
        if field.name not in roles.values():
            continue
        for changed in (
            dataclasses.replace(mine, lr=mine.lr * 1.1),
            dataclasses.replace(mine, decay=mine.decay + 0.1),
            dataclasses.replace(mine, eps=mine.eps * 1.5),
        ):
            other = dataclasses.replace(config, roles=dataclasses.replace(config.roles, **{field.name: changed}))
            weights, _ = reference(other, 5)
            moved = {name for name in weights if not torch.equal(weights[name], plain[name])}
            assert moved == {name for name, role in roles.items() if role == field.name}
