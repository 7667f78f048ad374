"""ZClip and AdaGC against their equations in plain Python, and what they must not forget, learn or touch."""

import math
import random

import pytest
import torch
from torch import Tensor, nn

from surefoot.config.optim import AdaGC, GlobalNorm, OptimConfig, ZClip
from surefoot.optim.adaptive_clip import Clipping, build_clipping
from surefoot.optim.clip import clip_scale
from tolerances import CLIPPING

NO, YES = torch.tensor(False), torch.tensor(True)


def parameters_with_norms(*norms: float) -> dict[str, nn.Parameter]:
    made = {}
    for at, norm in enumerate(norms):
        parameter = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        direction = torch.arange(1.0, 5.0, dtype=torch.float64)
        parameter.grad = norm * direction / direction.norm()
        made[f"p{at}"] = parameter
    return made


def take(clipping: Clipping, parameters: dict[str, nn.Parameter], *, clip_norm: float, skip: Tensor = NO) -> float:
    """One step as the training step calls it, on one rank; returns the divisor."""
    summed = clipping.shares(first_replica=True)
    norm = torch.sqrt(
        sum((p.grad.square().sum() for p in parameters.values() if p.grad is not None), torch.tensor(0.0))
    )
    return float(clipping.divisor(norm.double(), summed, clip_norm, skip))


def series(seed: int, length: int = 50) -> list[float]:
    draw = random.Random(seed)
    return [draw.lognormvariate(0.0, 0.2) * (30.0 if at in (27, 36, 45) else 1.0) for at in range(length)]


@pytest.mark.parametrize("clip_norm", [0.0, 1.1])
@pytest.mark.parametrize("seed", range(3))
def test_zclip_follows_its_equations(seed: int, clip_norm: float) -> None:
    config = ZClip(warmup_steps=20)
    parameters = parameters_with_norms(1.0)
    clipping = build_clipping(OptimConfig(clipping=config), parameters)
    first: list[float] = []
    mean = variance = 0.0
    clipped = 0
    for norm in series(seed):
        parameters["p0"].grad = parameters_with_norms(norm)["p0"].grad
        divisor = take(clipping, parameters, clip_norm=clip_norm)
        held = norm
        if len(first) < 20:
            first.append(norm)
            mean = sum(first) / len(first)
            variance = sum((x - mean) ** 2 for x in first) / len(first)
        else:
            z = (norm - mean) / (math.sqrt(variance) + 1e-6)
            if z > 2.5:
                held, clipped = mean + 2.5**2 * math.sqrt(variance) / z, clipped + 1
            mean = 0.97 * mean + 0.03 * held
            variance = 0.97 * variance + 0.03 * (held - mean) ** 2
        seen = min(held, clip_norm) if clip_norm else held
        assert norm / divisor == pytest.approx(seen, rel=CLIPPING)
        state = clipping.tensors()
        assert float(state["clip/mean"]) == pytest.approx(mean, rel=CLIPPING)
        assert float(state["clip/variance"]) == pytest.approx(variance, rel=CLIPPING, abs=CLIPPING)
    assert clipped >= 2
    assert float(clipping.tensors()["clip/steps"]) == 50


@pytest.mark.parametrize("clip_norm", [0.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_adagc_follows_its_equations_tensor_by_tensor(seed: int, clip_norm: float) -> None:
    columns = [series(3 * seed + at) for at in range(3)]
    parameters = parameters_with_norms(1.0, 1.0, 1.0)
    clipping = build_clipping(OptimConfig(clipping=AdaGC(warmup_steps=20)), parameters)
    running = [math.inf] * 3
    clipped = 0
    for step, norms in enumerate(zip(*columns, strict=True)):
        for parameter, fresh in zip(parameters.values(), parameters_with_norms(*norms).values(), strict=True):
            parameter.grad = fresh.grad
        divisor = take(clipping, parameters, clip_norm=clip_norm)
        factors = [1.0 if step < 20 else min(1.0, 1.05 * m / g) for m, g in zip(running, norms, strict=True)]
        left = math.sqrt(sum((h * g) ** 2 for h, g in zip(factors, norms, strict=True)))
        cap = max(1.0, left / clip_norm) if clip_norm else 1.0
        seen = [h * g / cap for h, g in zip(factors, norms, strict=True)]
        running = [min(m, c) if step < 20 else 0.98 * m + 0.02 * c for m, c in zip(running, seen, strict=True)]
        clipped += sum(h < 1 for h in factors)
        for at, parameter in enumerate(parameters.values()):
            assert parameter.grad is not None
            assert float(parameter.grad.norm()) / divisor == pytest.approx(seen[at], rel=CLIPPING)
            assert float(clipping.tensors()[f"clip/norm/p{at}"]) == pytest.approx(running[at], rel=CLIPPING)
    assert clipped > 10


@pytest.mark.parametrize("config", [ZClip(warmup_steps=3), AdaGC(warmup_steps=3)])
@pytest.mark.parametrize("steps", [0, 2, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 40.0])
def test_a_skipped_step_leaves_what_is_remembered_and_the_gradients_to_the_bit(
    config: ZClip | AdaGC, steps: int, bad: float
) -> None:
    parameters = parameters_with_norms(1.0, 2.0)
    clipping = build_clipping(OptimConfig(clipping=config), parameters)
    for _ in range(steps):
        take(clipping, parameters, clip_norm=1.0)
    before = {name: tensor.clone() for name, tensor in clipping.tensors().items()}
    gradient = torch.full((4,), bad, dtype=torch.float64)
    parameters["p1"].grad = gradient.clone()
    take(clipping, parameters, clip_norm=1.0, skip=YES)
    for name, tensor in clipping.tensors().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(parameters["p1"].grad.view(torch.int64), gradient.view(torch.int64))


def test_its_tensors_are_all_of_its_state() -> None:
    """Copied into a fresh clipping they go on with the same bits."""
    for config in (ZClip(warmup_steps=3), AdaGC(warmup_steps=3)):
        parameters = parameters_with_norms(1.0, 2.0)
        old, fresh = (build_clipping(OptimConfig(clipping=config), parameters) for _ in range(2))
        for norm in (1.0, 1.2, 0.9, 1.1, 1.0):
            parameters["p0"].grad = parameters_with_norms(norm)["p0"].grad
            take(old, parameters, clip_norm=1.0)
        for name, tensor in fresh.tensors().items():
            tensor.copy_(old.tensors()[name])
        results = []
        for clipping in (old, fresh):
            parameters["p0"].grad = parameters_with_norms(7.0)["p0"].grad
            results.append(take(clipping, parameters, clip_norm=1.0))
        assert results[0] == results[1]
        assert all(torch.equal(t, fresh.tensors()[name]) for name, t in old.tensors().items())


@pytest.mark.parametrize("silence", [(True, False, True, False), (True, True, True, False)])
def test_a_tensor_without_a_gradient_for_a_while_is_not_clipped_to_nothing(silence: tuple[bool, ...]) -> None:
    parameters = parameters_with_norms(1.0, 1.0)
    clipping = build_clipping(OptimConfig(clipping=AdaGC(warmup_steps=2)), parameters)
    for quiet in silence:
        zero = torch.zeros(4, dtype=torch.float64)
        parameters["p1"].grad = zero if quiet else parameters_with_norms(1.0)["p0"].grad
        take(clipping, parameters, clip_norm=0.0)
    parameters["p0"].grad = None
    take(clipping, parameters, clip_norm=0.0)
    assert float(clipping.tensors()["clip/norm/p1"]) == pytest.approx(1.0)
    assert float(clipping.tensors()["clip/norm/p0"]) == pytest.approx(1.0)


@pytest.mark.parametrize(("norm", "clip"), [(0.3, 1.0), (10.0 / 3.0, 1.0), (math.nan, 1.0), (5.0, 0.0)])
def test_without_it_clipping_is_the_hard_cap_to_the_bit(norm: float, clip: float) -> None:
    clipping = build_clipping(OptimConfig(clipping=GlobalNorm()), parameters_with_norms(1.0))
    value = torch.tensor(norm, dtype=torch.float64)
    got = clipping.divisor(value, torch.zeros(0), clip, NO)
    assert torch.equal(got, clip_scale(value, clip)) or math.isnan(norm)
    assert clipping.tensors() == {}


def test_a_constant_norm_is_never_clipped() -> None:
    for config in (ZClip(warmup_steps=3), AdaGC(warmup_steps=3)):
        parameters = parameters_with_norms(3.0)
        clipping = build_clipping(OptimConfig(clipping=config), parameters)
        assert {take(clipping, parameters, clip_norm=0.0) for _ in range(20)} == {1.0}
        assert parameters["p0"].grad is not None
        assert float(parameters["p0"].grad.norm()) == pytest.approx(3.0, rel=CLIPPING)
