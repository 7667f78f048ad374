"""Moments and weights held in bf16: they follow the wide ones, they do not stall, and no layout changes a bit."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optimiser_equations import KINDS, MODEL, error, gradients, parameters, rate, settings
from surefoot.config.optim import AdamW, Lion, OptimConfig, RolesConfig
from surefoot.optim.build import build_optimizer
from surefoot.optim.narrow_adam import NarrowAdam
from surefoot.optim.optimizer import Optimizer, Update
from surefoot.parallel.fork_launch import run_ranks
from tolerances import NARROW_MOMENTS, NARROW_WEIGHTS, NOISE_SIGMAS, ROUNDED_MEAN

NO_SKIP, NO_CLIP = torch.tensor(False), torch.tensor(1.0)


def narrow(kind: str) -> OptimConfig:
    return dataclasses.replace(settings(kind), moments="bf16")


def lone(config: OptimConfig, parameter: nn.Parameter) -> Optimizer:
    return build_optimizer({"w": parameter}, {"w": "hidden"}, config, MODEL)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_bf16_weights_are_not_and_bf16_weights_have_wide_moments_unless_told(kind: str) -> None:
    keys = {"exp_avg"} if kind == "lion" else {"exp_avg", "exp_avg_sq"}
    for weights, moments, expected in (
        (torch.float32, "bf16", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.bfloat16, "bf16", torch.bfloat16),
    ):
        named, roles = parameters(weights)
        optimizer = build_optimizer(named, roles, dataclasses.replace(settings(kind), moments=moments), MODEL)  # type: ignore[arg-type]
        tensors = optimizer.tensors()
        assert tensors.keys() == {f"{key}/{name}" for key in keys for name in named}
        assert {t.dtype for t in tensors.values()} == {expected}
        assert all(t.shape == named[name.split("/")[1]].shape for name, t in tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_steps_with_narrow_moments_follow_the_wide_ones(kind: str) -> None:
    ends = []
    for config in (narrow(kind), settings(kind)):
        named, roles = parameters(torch.float32)
        optimizer = build_optimizer(named, roles, config, MODEL)
        for step in range(1, 201):
            for name, gradient in gradients(step).items():
                named[name].grad = gradient
            optimizer.apply(Update(lr=rate(step), scale=NO_CLIP, skip=NO_SKIP, seed=1, batch_index=step))
        ends.append((dict(named), optimizer.tensors()))
    (weights, moments), (wide_weights, wide_moments) = ends
    for name, tensor in moments.items():
        assert error(tensor, wide_moments[name].double()) < NARROW_MOMENTS, name
    for name, weight in weights.items():
        assert error(weight, wide_weights[name].detach().double()) < NARROW_WEIGHTS[kind], name


def test_a_second_moment_of_beta2_999_does_not_stall_where_rounding_to_nearest_does() -> None:
    config = narrow("adamw")
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, beta2=0.999))
    parameter = nn.Parameter(torch.zeros(512))
    optimizer = lone(config, parameter)
    nearest, steps = torch.tensor(0.0, dtype=torch.bfloat16), 1500
    for step in range(1, steps + 1):
        parameter.grad = torch.ones(512)
        optimizer.apply(Update(lr=0.0, scale=NO_CLIP, skip=NO_SKIP, batch_index=step))
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    square = optimizer.tensors()["exp_avg_sq/w"].double()
    expected = 1 - 0.999**steps
    assert nearest == 0.25 < 0.7 < expected
    assert float(square.mean()) == pytest.approx(expected, rel=ROUNDED_MEAN)


@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.0), Lion(weight_decay=0.0)])
def test_bf16_weights_move_by_steps_far_below_their_own_resolution(optimizer: AdamW | Lion) -> None:
    """A step of 1e-4 from 1, whose neighbour below is 4e-3 away: to the nearest nothing would ever move."""
    parameter = nn.Parameter(torch.ones(2048, dtype=torch.bfloat16))
    rule = lone(OptimConfig(optimizer=optimizer, lr=1e-4), parameter)
    assert (torch.ones((), dtype=torch.bfloat16) - 1e-4) == 1
    for step in range(200):
        parameter.grad = torch.ones(2048, dtype=torch.bfloat16)
        rule.apply(Update(lr=1e-4, scale=NO_CLIP, skip=NO_SKIP, batch_index=step))
    moved = 1 - float(parameter.detach().double().mean())
    assert moved == pytest.approx(200 * 1e-4, rel=ROUNDED_MEAN)


def test_the_update_of_a_step_is_made_of_its_moments_before_they_are_rounded() -> None:
    """After one step of Adam every weight has moved by the rate, to fp32: moments rounded first would make that 2^-8 of it."""
    parameter = nn.Parameter(torch.zeros(1000))
    config = OptimConfig(optimizer=AdamW(weight_decay=0.0, eps=1e-20), moments="bf16")
    rule = lone(config, parameter)
    parameter.grad = torch.linspace(0.1, 3.0, 1000)
    rule.apply(Update(lr=1e-2, scale=NO_CLIP, skip=NO_SKIP))
    assert torch.allclose(parameter, torch.full((1000,), -1e-2), rtol=1e-5)


def test_draws_follow_seed_and_batch_and_not_the_number_of_the_step() -> None:
    def moments(seed: int, batch_index: int) -> Tensor:
        parameter = nn.Parameter(torch.zeros(4096))
        rule = lone(narrow("adamw"), parameter)
        parameter.grad = torch.randn(4096, generator=torch.Generator().manual_seed(0))
        rule.apply(Update(lr=0.1, scale=NO_CLIP, skip=NO_SKIP, seed=seed, batch_index=batch_index))
        return rule.tensors()["exp_avg/w"]

    assert torch.equal(moments(1, 5), moments(1, 5))
    assert not torch.equal(moments(1, 5), moments(2, 5))
    assert not torch.equal(moments(1, 5), moments(1, 6))


def test_weights_and_both_moments_are_rounded_by_draws_of_their_own() -> None:
    """Weights and second moments halfway between neighbours, of one name: which go up says nothing of the others."""
    config = narrow("adamw")
    config = dataclasses.replace(config, optimizer=AdamW(beta1=0.0, beta2=0.0, eps=1e-20, weight_decay=0.0), lr=2**-8)
    parameter = nn.Parameter(torch.full((4096,), 1.0 + 2**-6, dtype=torch.bfloat16))
    rule = build_optimizer({"w": parameter}, {"w": "norm"}, dataclasses.replace(config, roles=RolesConfig()), MODEL)
    parameter.grad = torch.full((4096,), 1.0625, dtype=torch.bfloat16)
    rule.apply(Update(lr=2**-8, scale=NO_CLIP, skip=NO_SKIP))
    noise = NOISE_SIGMAS / math.sqrt(4096)
    signs = []
    for tensor, middle in ((parameter, 1.0 + 2**-6 - 2**-8), (rule.tensors()["exp_avg_sq/w"], 1.0625**2)):
        signs.append((tensor.detach().double() - middle).sign())
        assert abs(float(signs[-1].mean())) < noise
    assert abs(float((signs[0] * signs[1]).mean())) < noise


def after_steps(sharded: bool, kind: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Weights and moments of two parameters, of which the ranks hold unlike numbers of rows, after equal gradients."""
    shapes = {"w": (7, 37), "gain": (5,)}
    draw = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    mesh = init_device_mesh("cpu", (2,)) if sharded else None

    def placed(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor.clone()

    named = {name: nn.Parameter(placed(tensor)) for name, tensor in whole.items()}
    optimizer = build_optimizer(named, {"w": "hidden", "gain": "norm"}, narrow(kind), MODEL)
    for step in range(1, 6):
        for name, p in named.items():
            p.grad = placed(torch.randn(shapes[name], generator=draw).to(dtype))
        optimizer.apply(Update(lr=rate(step), scale=torch.tensor(1.7), skip=NO_SKIP, batch_index=step))
    tensors: dict[str, Tensor] = dict(named) | optimizer.tensors()
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().double().numpy()
        for name, t in tensors.items()
    }


def sharded_rank(rank: int, world: int, kind: str, dtype: torch.dtype) -> dict[str, np.ndarray]:
    return after_steps(True, kind, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_round_as_the_whole_does(kind: str, dtype: torch.dtype) -> None:
    """Equal gradients give equal bits; the sum behind RMS_t has another order, which a rate in fp32 may show."""
    one = after_steps(False, kind, dtype)
    for two in run_ranks(2, sharded_rank, kind, dtype):
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            if kind == "stable_adamw" and "/" not in name:
                assert np.allclose(tensor, two[name], rtol=2**-7 if dtype == torch.bfloat16 else 1e-6), name
            else:
                assert np.array_equal(tensor, two[name]), name


def test_a_tensor_longer_than_a_chunk_is_moved_all_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for length in (1 << 17, 1000):
        monkeypatch.setattr("surefoot.optim.elementwise._CHUNK", {"cpu": length})
        parameter = nn.Parameter(torch.zeros(70, 61))
        rule = lone(narrow("adamw"), parameter)
        parameter.grad = torch.randn(70, 61, generator=torch.Generator().manual_seed(0))
        rule.apply(Update(lr=0.1, scale=NO_CLIP, skip=NO_SKIP))
        ends.append((parameter, *rule.tensors().values()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert (ends[0][0] != 0).all()


def test_fp64_weights_with_bf16_moments_are_refused() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="w is fp64, and its moments should be bf16"):
        lone(narrow("adamw"), parameter)


def test_the_last_update_of_narrow_moments_is_right_to_a_digit_of_bf16() -> None:
    named, roles = parameters(torch.float32)
    optimizer = build_optimizer(named, roles, narrow("adamw"), MODEL)
    rule = optimizer.rules[0]
    assert isinstance(rule, NarrowAdam)
    for step in range(1, 4):
        before = {name: p.detach().clone() for name, p in named.items()}
        for name, gradient in gradients(step).items():
            named[name].grad = gradient
        optimizer.apply(Update(lr=rate(step), scale=NO_CLIP, skip=NO_SKIP, batch_index=step))
    for name, update in zip(named, rule.last_updates(list(named), rate(3)), strict=True):
        assert error(update, (named[name].detach() - before[name]).double()) < 2**-7, name
        assert not math.isnan(float(update.sum()))
