"""Muon in runs: micro-batches, ranks, skips, restarts, bf16 state; who works on which matrix makes no difference."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from surefoot.config.optim import AdamW, Muon
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.parametrization import fused_rows
from surefoot.optim.build import build_optimizer
from surefoot.optim.muon import MuonRule
from surefoot.optim.optimizer import Setting, Update
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.exchange import peers_of, share_out
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.proof.faults import with_nan_gradients
from surefoot.proof.rehearsal import Script, rehearse, rehearse_on_rank
from surefoot.train.setup import set_up
from surefoot.train.step import train_step
from tolerances import FP64_ORDER, FP64_RANKS, NARROW_DRIFT

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
SHAPES: dict[str, tuple[int, ...]] = {
    "square": (24, 24), "wide": (5, 48), "tall": (48, 16), "fused": (32, 20), "stack": (3, 12, 8), "row": (1, 6)
}  # fmt: skip
Vary = Callable[..., RunConfig]


@pytest.fixture
def muon(config: RunConfig, vary: Vary) -> RunConfig:
    return vary(config, steps=12, **{"optim.optimizer": Muon(others=AdamW(beta2=0.99)), "parallel.precision": "fp64"})


def test_muon_moves_the_hidden_matrices_and_the_others_theirs(muon: RunConfig) -> None:
    setup, state = set_up(muon, ALONE)
    moments = state.optimizer.tensors()
    hidden = {name for name, role in setup.roles.items() if role == "hidden"}
    assert {name for name in setup.roles if f"momentum/{name}" in moments} == hidden
    assert {name for name in setup.roles if f"exp_avg_sq/{name}" in moments} == set(setup.roles) - hidden
    assert hidden


def test_gradients_enter_the_momentum_once_a_step_clipped_whatever_the_micro_batches(
    muon: RunConfig, vary: Vary, loader: Loader
) -> None:
    muon = vary(muon, **{"optim.clip_norm": 0.05})
    momenta: list[dict[str, Tensor]] = []
    for rows in (0, 1):
        setup, state = set_up(vary(muon, **{"parallel.micro_batch_size": rows}), ALONE)
        expected: dict[str, Tensor] = {}
        for index in range(3):
            train_step(state, loader.batch(index), setup)
            for name, parameter in state.parameters.items():
                assert parameter.grad is not None
                expected[name] = 0.95 * expected.get(name, torch.zeros_like(parameter)) + parameter.grad
        total = math.sqrt(sum(float(p.grad.square().sum()) for p in state.parameters.values() if p.grad is not None))
        assert total == pytest.approx(0.05, rel=1e-6)
        found = {n.removeprefix("momentum/"): t for n, t in state.tensors().items() if n.startswith("momentum/")}
        for name, momentum in found.items():
            assert torch.linalg.norm(momentum - expected[name]) <= FP64_ORDER * torch.linalg.norm(momentum), name
        momenta.append(found)
    for name, momentum in momenta[0].items():
        assert torch.linalg.norm(momenta[1][name] - momentum) <= 1e-10 * torch.linalg.norm(momentum), name


@pytest.mark.parametrize("gated", [True, False])
def test_a_nan_leaves_weights_and_momentum_to_the_bit(muon: RunConfig, vary: Vary, loader: Loader, gated: bool) -> None:
    setup, state = set_up(vary(muon, **{"optim.gated": gated}), ALONE)
    setup = with_nan_gradients(setup, state, {3})
    for index in range(3):
        train_step(state, loader.batch(index), setup)
    before = digest_tensors(state.tensors())
    assert train_step(state, loader.batch(3), setup).skipped
    assert digest_tensors(state.tensors()) == before
    assert [float(rule.step_count()) for rule in state.optimizer.rules] == [3.0, 3.0]


@pytest.mark.parametrize("settings", [{}, {"parallel.precision": "fp32", "optim.moments": "bf16"}])
def test_a_resumed_and_a_rolled_back_run_end_as_the_uninterrupted_one(
    muon: RunConfig, vary: Vary, tmp_path: Path, settings: dict[str, Any]
) -> None:
    muon = vary(muon, **settings)
    whole = rehearse(muon, tmp_path / "whole")
    assert any(name.startswith("momentum/") for name in whole.digests)
    rehearse(muon, tmp_path / "run", Script(stop_after=8))
    assert rehearse(muon, tmp_path / "run").digests == whole.digests
    if settings:
        script = Script(rollback_after=10, rollback_to=6)
        assert rehearse(muon, tmp_path / "back", script).digests == whole.digests


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_move_as_one(muon: RunConfig, vary: Vary, tmp_path: Path, layout: str) -> None:
    muon = vary(muon, **{"guard.probe_every": 4})
    one = rehearse(muon, tmp_path / "one")
    two = run_ranks(2, rehearse_on_rank, vary(muon, **{"parallel.data_parallel": layout}), tmp_path / "two")[0]
    assert one.tensors.keys() == two.tensors.keys()
    for name, tensor in one.tensors.items():
        assert np.linalg.norm(tensor - two.tensors[name]) <= FP64_RANKS * np.linalg.norm(tensor), name


def steps_sharing(rank: int, world: int, config: RunConfig) -> tuple[dict[str, Any], list[int]]:
    """Six steps of replicas that share the matrices out; their tensors, and how many each works on."""
    place = join_world(config.parallel)
    setup, state = set_up(config, place)
    state.optimizer = build_optimizer(
        state.parameters, setup.roles, config.optim, config.model, fused_rows(state.model), replicas=world
    )
    loader = Loader(config.data, prepare(config.data), config.seed)
    for index in range(6):
        train_step(state, loader.batch(index, (), rank, world), setup)
    digest_tensors(state.tensors())  # raises where replicas differ
    rule = next(rule for rule in state.optimizer.rules if isinstance(rule, MuonRule))
    exchange = max(rule._exchanges.values(), key=lambda exchange: len(exchange.matrices))
    return {name: t.detach().numpy().copy() for name, t in state.tensors().items()}, [len(w) for w in exchange.work]


def test_replicas_share_the_matrices_out_and_all_hold_the_same(muon: RunConfig, vary: Vary, loader: Loader) -> None:
    setup, state = set_up(muon, ALONE)
    for index in range(6):
        train_step(state, loader.batch(index), setup)
    (tensors, work), (_, _) = run_ranks(2, steps_sharing, muon)
    assert sum(work) == sum(role == "hidden" for role in setup.roles.values())
    assert len(work) == 2
    assert min(work) >= 4
    for name, tensor in state.tensors().items():
        error = np.linalg.norm(tensors[name] - tensor.detach().numpy())
        assert error <= FP64_RANKS * np.linalg.norm(tensor.detach().numpy()), name


# Tensors by themselves: every layout to the bit


def drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items()}


def three_steps(
    rank: int, world: int, layout: str, dtype: torch.dtype, config: Muon, narrow: bool
) -> tuple[dict[str, int], list[bool]]:
    """Digests after three steps; whether what this rank holds has an update, recomputed."""
    mesh = None
    if layout == "sharded":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))

    def placed(tensor: Tensor) -> Tensor:
        return tensor.clone() if mesh is None else distribute_tensor(tensor.clone(), mesh, [Shard(0)])

    rows = {"fused": (16, 8, 8)}
    given = {n: Setting(role="hidden", lr=1.0, weight_decay=0.1, eps=0.0, rows=rows.get(n, ())) for n in SHAPES}
    parameters = {name: nn.Parameter(placed(w)) for name, w in drawn(0, dtype).items()}
    replicas = world if layout == "replicated" else 1
    rule = MuonRule(parameters, given, config, narrow_moments=narrow, replicas=replicas)
    for step in range(3):
        for name, gradient in drawn(step + 1, dtype).items():
            parameters[name].grad = placed(gradient)
        rule.apply(
            Update(lr=0.05, scale=torch.tensor(2.0).double(), skip=torch.tensor(False), seed=5, batch_index=step)
        )
    found = digest_tensors(rule.tensors() | {f"weights/{n}": p for n, p in parameters.items()})
    held = [p._local_tensor if isinstance(p, DTensor) else p for p in parameters.values()]
    updates = rule.last_updates(list(parameters), 0.05)
    return found, [u.shape == h.shape and bool(u.isfinite().all()) for u, h in zip(updates, held, strict=True)]


CASES = [
    (torch.float64, Muon(), False),
    (torch.float32, Muon(newton_schulz="bf16"), False),
    (torch.float32, Muon(newton_schulz="fp32", nesterov=False), True),
    (torch.bfloat16, Muon(), True),
]


@pytest.mark.parametrize(("dtype", "config", "narrow"), CASES)
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_every_layout_gives_the_bits_of_one_rank(
    layout: str, dtype: torch.dtype, config: Muon, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank holds no row of a matrix, or half of one, and where not all is worked on at once."""
    monkeypatch.setattr("surefoot.optim.muon.CHUNK", 500)
    monkeypatch.setattr("surefoot.optim.muon.MATRICES", 0)
    one, _ = three_steps(0, 1, "alone", dtype, config, narrow)
    for found, whole in run_ranks(3, three_steps, layout, dtype, config, narrow):
        assert found == one
        assert all(whole)


def test_no_more_is_worked_on_at_once_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.optim.muon.CHUNK", 900)
    given = {name: Setting(role="hidden", lr=1.0, weight_decay=0.1, eps=0.0) for name in SHAPES}
    parameters = {name: nn.Parameter(w) for name, w in drawn(0, torch.float32).items()}
    chunks = list(MuonRule(parameters, given, Muon(), narrow_moments=False)._chunks(list(SHAPES)))
    assert chunks == [["square", "wide"], ["tall"], ["fused"], ["stack", "row"]]


def test_work_is_shared_out_evenly_and_always_alike() -> None:
    costs = [8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0]
    owners = share_out(costs, 3)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(3)]
    assert max(loads) <= 13
    assert owners == share_out(list(costs), 3)
    assert share_out([], 2) == []
    assert share_out([1.0], 3) == [0]


def test_tensors_of_several_meshes_and_strange_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="replicas=2 is not the number of ranks"):
        peers_of([torch.zeros(2, 2)], replicas=2)
    run_ranks(2, refused_meshes)


def refused_meshes(rank: int, world: int) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    rows = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="1 of 2 tensors are on a mesh: all are, or none"):
        peers_of([rows, torch.zeros(4, 4)])
    other = torch.distributed.device_mesh.init_device_mesh("cpu", (1, world))
    with pytest.raises(ValueError, match="work is shared out over one mesh"):
        peers_of([rows, distribute_tensor(torch.zeros(4, 4), other, [Replicate(), Shard(0)])])


# bf16 state


def test_bf16_weights_move_on_average_though_each_update_is_lost_in_a_digit() -> None:
    """Rounded to the nearest they would stand still: updates are a hundredth of a digit."""
    setting = {"w": Setting(role="hidden", lr=1.0, weight_decay=0.0, eps=0.0)}
    gradient = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    moved = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(torch.ones(64, 64, dtype=dtype))
        rule = MuonRule({"w": weight}, setting, Muon(newton_schulz="fp32"), narrow_moments=False)
        assert rule.tensors()["momentum/w"].dtype == torch.float32
        for step in range(200):
            weight.grad = gradient.to(torch.bfloat16).to(dtype)
            rule.apply(Update(lr=2e-4, scale=torch.tensor(1.0), skip=torch.tensor(False), batch_index=step))
        moved.append(weight.detach().double() - 1.0)
    projected = float((moved[0] * moved[1]).sum() / moved[1].square().sum())
    assert projected == pytest.approx(1.0, rel=NARROW_DRIFT)


@pytest.mark.parametrize("of", ["name", "seed", "batch_index"])
def test_every_draw_of_the_rounding_is_seeded_by_name_seed_and_batch(of: str) -> None:
    """Twins differ by what seeds them, in weights and in momentum; else they are twins."""
    found = []
    for change in (0, 0, 1):
        name = "w" if of != "name" or not change else "v"
        setting = {name: Setting(role="hidden", lr=1.0, weight_decay=0.0, eps=0.0)}
        weight = nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))
        rule = MuonRule({name: weight}, setting, Muon(), narrow_moments=True)
        weight.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        rule.tensors()[f"momentum/{name}"].copy_(weight.grad)
        seeds = {of: change} if of != "name" else {}
        rule.apply(Update(lr=1e-2, scale=torch.tensor(1.0), skip=torch.tensor(False), **seeds))
        found.append((weight.detach(), rule.tensors()[f"momentum/{name}"]))
    first, again, other = found
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_bf16_moments_of_fp64_weights_are_refused() -> None:
    setting = Setting(role="hidden", lr=1.0, weight_decay=0.0, eps=0.0)
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="w is fp64"):
        MuonRule({"w": weight}, {"w": setting}, Muon(), narrow_moments=True)
