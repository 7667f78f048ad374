"""Muon against its equations in fp64 and against torch's own, matrix by matrix, under every layout, through skips and restarts."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.config.optim import Muon
from surefoot.config.run import RunConfig
from surefoot.optim.muon import MuonRule
from surefoot.optim.newton_schulz import COEFFICIENTS
from surefoot.optim.optimizer import Setting, Update
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.mesh import World
from tolerances import MUON, NEWTON_SCHULZ, ORTHOGONAL_RMS, TORCH_MUON, UPDATE_RECOMPUTED

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
KEEP, NO_CLIP = torch.tensor(False), torch.tensor(1.0, dtype=torch.float64)
SHAPES: dict[str, tuple[int, ...]] = {
    "square": (24, 24),
    "wide": (16, 48),
    "tall": (48, 16),
    "fused": (32, 20),
    "stack": (3, 12, 8),
}
FUSED = {"fused": (16, 8, 8)}
Vary = Callable[..., RunConfig]


def drawn(
    seed: int, dtype: torch.dtype = torch.float64, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def settings(lr: float = 0.5, decay: float = 0.1, fused: Mapping[str, tuple[int, ...]] = FUSED) -> dict[str, Setting]:
    return {
        name: Setting(role="hidden", lr=lr, weight_decay=decay, eps=0.0, rows=fused.get(name, ())) for name in SHAPES
    }


def rule_over(
    weights: Mapping[str, Tensor], config: Muon, given: Mapping[str, Setting], *, narrow: bool = False
) -> MuonRule:
    return MuonRule(
        {name: nn.Parameter(w.clone()) for name, w in weights.items()}, given, config, narrow_moments=narrow
    )


def feed(
    rule: MuonRule, gradients: Mapping[str, Tensor], *, lr: float = 0.1, scale: Tensor = NO_CLIP, index: int = 0
) -> None:
    for name, parameter in rule.parameters.items():
        parameter.grad = gradients[name].to(parameter.dtype).clone()
    rule.apply(Update(lr=lr, scale=scale, skip=KEEP, batch_index=index))


def by_the_equations(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz as published, one matrix, fp64."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def reference(config: Muon, steps: int, lr: float, scale: float) -> dict[str, Tensor]:
    """The equations in fp64, the tensors taken apart by hand."""
    weights, momentum = drawn(0), {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(steps):
        for name, gradient in drawn(step + 1).items():
            g = gradient / scale
            momentum[name] = config.momentum * momentum[name] + g
            ahead = g + config.momentum * momentum[name] if config.nesterov else momentum[name]
            matrices = list(ahead) if ahead.ndim == 3 else list(ahead.split(FUSED.get(name, (len(ahead),))))
            done = [0.2 * math.sqrt(max(m.shape)) * by_the_equations(m, config.newton_schulz_steps) for m in matrices]
            direction = torch.stack(done) if ahead.ndim == 3 else torch.cat(done)
            weights[name] = (1 - lr * 0.5 * 0.1) * weights[name] - lr * 0.5 * direction
    return weights


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", list(MUON))
@pytest.mark.parametrize(("scale", "steps"), [(1.0, 5), (3.0, 4)])
def test_fifty_steps_follow_the_equations(dtype: torch.dtype, nesterov: bool, scale: float, steps: int) -> None:
    config = Muon(newton_schulz="fp32", nesterov=nesterov, newton_schulz_steps=steps)
    rule = rule_over(drawn(0, dtype), config, settings())
    for step in range(50):
        feed(rule, drawn(step + 1, dtype), scale=torch.tensor(scale, dtype=torch.float64))
    for name, target in reference(config, 50, 0.1, scale).items():
        error = torch.linalg.norm(rule.parameters[name].detach().double() - target) / torch.linalg.norm(target)
        assert error < MUON[dtype], name
    assert float(rule.step_count()) == 50


@pytest.mark.parametrize("name", ["square", "wide", "tall"])
def test_the_size_of_a_bf16_update_is_a_fifth_of_the_rate(name: str) -> None:
    """0.2 lr times the root mean square of the singular values, which Newton-Schulz leaves at 0.85 to 0.95 (1 would be exact)."""
    shapes = {name: SHAPES[name]}
    weights, gradients = drawn(0, torch.float32, shapes), drawn(1, torch.float32, shapes)
    rule = rule_over(weights, Muon(), settings(lr=1.0, decay=0.0))
    feed(rule, gradients, lr=1e-2)
    size = float((rule.parameters[name].detach() - weights[name]).double().square().mean().sqrt())
    values = torch.linalg.svdvals(by_the_equations(gradients[name], 5))
    assert size == pytest.approx(0.2 * 1e-2 * float(values.square().mean().sqrt()), rel=ORTHOGONAL_RMS)
    assert 0.84 < float(values.square().mean().sqrt()) < 0.96


def test_newton_schulz_is_in_the_precision_asked_for() -> None:
    moved = []
    for precision in ("bf16", "fp32"):
        rule = rule_over(drawn(0, torch.float32), Muon(newton_schulz=precision), settings())  # type: ignore[arg-type]
        feed(rule, drawn(1, torch.float32))
        moved.append(torch.cat([u.flatten() for u in rule.last_updates(list(SHAPES), 0.1)]))
    apart = float(torch.linalg.norm(moved[0] - moved[1]) / torch.linalg.norm(moved[1]))
    assert NEWTON_SCHULZ[torch.float32] < apart < NEWTON_SCHULZ[torch.bfloat16]


@pytest.mark.parametrize("nesterov", [True, False])
def test_it_agrees_with_torchs_own(nesterov: bool) -> None:
    """Which keeps a running mean for the sum, takes the norm in bf16, and knows matrices alone."""
    names = ("square", "wide", "tall")
    rule = rule_over({n: drawn(0, torch.float32)[n] for n in names}, Muon(nesterov=nesterov), settings())
    peers = {name: nn.Parameter(drawn(0, torch.float32)[name]) for name in names}
    peer = torch.optim.Muon(
        peers.values(), lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(20):
        gradients = drawn(step + 1, torch.float32)
        feed(rule, gradients)
        for name, parameter in peers.items():
            parameter.grad = gradients[name].clone()
        peer.step()
    start = drawn(0, torch.float32)
    for name in names:
        moved, theirs = (p[name].detach() - start[name] for p in (rule.parameters, peers))
        assert torch.linalg.norm(moved - theirs) / torch.linalg.norm(theirs) < TORCH_MUON, name


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_fused_and_stacked_matrices_move_as_separate_ones_to_the_bit(precision: Any) -> None:
    config = Muon(newton_schulz=precision)
    rule = rule_over(drawn(0, torch.float32), config, settings())
    cut = {"fused": lambda t: t.split(FUSED["fused"]), "stack": lambda t: t.unbind()}

    def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{name}{n}": piece for name, by in cut.items() for n, piece in enumerate(by(tensors[name]))}

    weights = apart(drawn(0, torch.float32))
    separate = rule_over(weights, config, dict.fromkeys(weights, settings()["square"]))
    for step in range(3):
        feed(rule, drawn(step + 1, torch.float32))
        feed(separate, apart(drawn(step + 1, torch.float32)))
    together = apart({name: p.detach() for name, p in rule.parameters.items()})
    for name, parameter in separate.parameters.items():
        assert torch.equal(together[name], parameter), name
    whole = rule_over(drawn(0, torch.float32), config, settings(fused={}))
    feed(whole, drawn(1, torch.float32))
    assert not torch.equal(whole.parameters["fused"][:16], rule.parameters["fused"][:16])


@pytest.mark.parametrize(("shape", "rows", "told"), [((5,), (), "has the role hidden"), ((2, 3, 4, 5), (), r"\(out, in\)"), ((2, 3, 4), (1, 1), "does not stack"), ((6, 4), (3, 2), r"matrices of \(3, 2\) rows")])  # fmt: skip
def test_what_is_no_matrix_is_an_error_that_names_it(shape: tuple[int, ...], rows: tuple[int, ...], told: str) -> None:
    setting = Setting(role="hidden", lr=1.0, weight_decay=0.0, eps=0.0, rows=rows)
    with pytest.raises(ValueError, match=rf"blocks.0.odd of shape \({', '.join(map(str, shape))}.*{told}"):
        rule_over({"blocks.0.odd": torch.zeros(shape)}, Muon(), {"blocks.0.odd": setting})


def test_a_refused_update_leaves_all_bits_and_the_next_is_as_if_it_had_not_been() -> None:
    rules = [rule_over(drawn(0, torch.float32), Muon(), settings()) for _ in range(2)]
    feed(rules[0], drawn(1, torch.float32))
    before = digest_tensors(rules[0].tensors() | {f"w/{n}": p for n, p in rules[0].parameters.items()})
    for parameter in rules[0].parameters.values():
        parameter.grad = torch.full_like(parameter, math.nan)
    for gated in (True, False):
        rules[0].apply(Update(lr=0.1, scale=torch.tensor(math.nan), skip=torch.tensor(True), gated=gated))
    assert digest_tensors(rules[0].tensors() | {f"w/{n}": p for n, p in rules[0].parameters.items()}) == before
    assert float(rules[0].step_count()) == 1
    feed(rules[1], drawn(1, torch.float32))
    for rule in rules:
        feed(rule, drawn(2, torch.float32))
    assert digest_tensors(rules[0].tensors()) == digest_tensors(rules[1].tensors())


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    weights = drawn(0, torch.float32)
    rule = rule_over(weights, Muon(), settings())
    feed(rule, drawn(1, torch.float32))
    held = {
        name: (p.detach().clone(), rule.tensors()[f"momentum/{name}"].clone()) for name, p in rule.parameters.items()
    }
    for name, parameter in rule.parameters.items():
        parameter.grad = None if name == "wide" else drawn(2, torch.float32)[name]
    rule.apply(Update(lr=0.1, scale=NO_CLIP, skip=KEEP))
    assert torch.equal(rule.parameters["wide"], held["wide"][0])
    assert torch.equal(rule.tensors()["momentum/wide"], held["wide"][1])
    assert not torch.equal(rule.parameters["tall"], held["tall"][0])
    wide, tall = rule.last_updates(["wide", "tall"], 0.1)
    assert not wide.any()
    assert torch.allclose(tall, rule.parameters["tall"].detach() - held["tall"][0], atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_update_recomputed_is_the_one_that_was_made(nesterov: bool) -> None:
    rule = rule_over(drawn(0), Muon(nesterov=nesterov), settings())
    names = list(SHAPES)
    assert all(bool(u.isnan().all()) for u in rule.last_updates(names, 0.1))
    for step in range(3):
        before = {name: p.detach().clone() for name, p in rule.parameters.items()}
        feed(rule, drawn(step + 1), scale=torch.tensor(7.0, dtype=torch.float64))
    kept = digest_tensors(rule.tensors() | {f"w/{n}": p for n, p in rule.parameters.items()})
    for name, update in zip(names, rule.last_updates(names, 0.1), strict=True):
        made = rule.parameters[name].detach() - before[name]
        assert torch.linalg.norm(update - made) / torch.linalg.norm(made) < UPDATE_RECOMPUTED, name
    assert digest_tensors(rule.tensors() | {f"w/{n}": p for n, p in rule.parameters.items()}) == kept
    assert rule.second_moments(names) is None
    assert math.isnan(rule.beta2)
    rule.apply(Update(lr=0.1, scale=NO_CLIP, skip=torch.tensor(True)))
    refused = rule.last_updates(names, 0.1)
    for parameter in rule.parameters.values():
        parameter.grad = None
    gone = rule.last_updates(names, 0.1)
    feed(rule, drawn(4))
    rule.parameters["tall"].grad = None
    dropped = rule.last_updates(names, 0.1)
    assert all(bool(u.isnan().all()) == nesterov for u in (*refused, *gone, *dropped))
