"""Every optimiser on every placement: replicas of shards, and shards of what tensor parallelism cut by rows or columns, move as plain tensors do."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import Adam, AdamW, Lion, Muon, OptimConfig, StableAdamW
from surefoot.model.role_scaling import Role
from surefoot.optim.build import build_optimizer
from surefoot.optim.clip import local_part
from surefoot.optim.newton_schulz import product_cost
from surefoot.optim.optimizer import Optimizer, Update
from surefoot.optim.stable_adamw import StableAdamWRule
from surefoot.parallel.boxes import Box, box_of, cut_box
from surefoot.parallel.exchange import MatrixExchange, peers_of
from surefoot.parallel.fork_launch import run_ranks
from tolerances import FP64_ORDER

MODEL = ModelConfig(
    vocab_size=10,
    d_model=8,
    num_layers=1,
    attention=GroupedQueryAttention(num_heads=1, num_kv_heads=1, d_head=8),
    feed_forward=SwiGLU(d_ff=12),
)
SHAPES: dict[str, tuple[tuple[int, ...], Role]] = {
    "embedding": ((10, 8), "embedding"), "norm": ((8,), "norm"), "qkv": ((24, 8), "hidden"), "output": ((8, 12), "hidden"),
    "experts": ((3, 6, 8), "hidden"), "row": ((1, 8), "hidden"), "bias": ((12,), "bias"), "head": ((10, 8), "output"),
}  # fmt: skip
FUSED = {"qkv": (12, 4, 8)}
"""Rows of the matrices that one parameter stacks: shards cut through them."""
R, S0, S1, ROWS = Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)
PLACED: dict[str, tuple[tuple[int, ...], dict[str, tuple[Placement, ...]]]] = {
    "replicas of shards": ((2, 2), dict.fromkeys(SHAPES, (R, S0))),
    "replicas": ((4, 1), dict.fromkeys(SHAPES, (R, S0))),
    "shards of tensor parallel pieces": (
        (1, 2, 2),
        {
            "embedding": (R, ROWS, S0), "norm": (R, S0, R), "qkv": (R, ROWS, S0), "output": (R, S0, S1), "experts": (R, S0, S1),
            "row": (R, S0, S1), "bias": (R, ROWS, S0), "head": (R, ROWS, S0),
        },
    ),
    "replicas of tensor parallel pieces": (
        (2, 1, 2),
        {
            "embedding": (R, ROWS, S0), "norm": (R, S0, R), "qkv": (R, ROWS, S0), "output": (R, S0, S1),
            "experts": (R, S0, Shard(2)), "row": (R, S0, R), "bias": (R, ROWS, S0), "head": (R, ROWS, S0),
        },
    ),
}  # fmt: skip
MUON = Muon(others=AdamW(beta2=0.99))


class Case(NamedTuple):
    config: OptimConfig
    dtype: torch.dtype
    tolerance: float
    """0 is to the bit."""


KINDS: dict[str, AdamW | Adam | StableAdamW | Lion | Muon] = {
    "adamw": AdamW(),
    "adam": Adam(weight_decay=0.1),
    "stable_adamw": StableAdamW(),
    "lion": Lion(),
    "muon": MUON,
}
CASES = {kind: Case(OptimConfig(optimizer=of), torch.float64, FP64_ORDER) for kind, of in KINDS.items()}
CASES["muon in bf16"] = Case(OptimConfig(optimizer=Muon(newton_schulz="bf16", others=Lion())), torch.float32, 0.0)
for kind in ("adamw", "adam", "lion", "muon"):
    for dtype in (torch.float32, torch.bfloat16):
        CASES[f"{kind}, narrow, {dtype}"] = Case(OptimConfig(optimizer=KINDS[kind], moments="bf16"), dtype, 0.0)
CASES["adamw without a gate"] = Case(OptimConfig(gated=False), torch.float64, FP64_ORDER)


class Moved(NamedTuple):
    """What a rank holds of one tensor after some steps."""

    box: Box
    local: Tensor


def drawn(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, (shape, _) in SHAPES.items()}


def placed(whole: Tensor, mesh: DeviceMesh | None, placements: tuple[Placement, ...]) -> Tensor:
    if mesh is None:
        return whole.clone()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    box = cut_box(tuple(whole.shape), tuple(mesh.shape), placements, coordinate)
    local = whole[box.slices].clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


def three_steps(mesh: DeviceMesh | None, placements: dict[str, tuple[Placement, ...]], case: Case) -> dict[str, Moved]:
    """Weights, moments and the recomputed last update after three steps of growing gradients, the second of them refused."""
    config, dtype = case.config, case.dtype
    parameters = {n: nn.Parameter(placed(w, mesh, placements[n])) for n, w in drawn(0, dtype).items()}
    optimizer = build_optimizer(parameters, {n: role for n, (_, role) in SHAPES.items()}, config, MODEL, FUSED)
    for step in range(3):
        for name, gradient in drawn(step + 1, dtype).items():
            parameters[name].grad = placed(gradient * 3**step, mesh, placements[name])
        skip, scale = torch.tensor(step == 1), torch.tensor(2.0).double()
        optimizer.apply(Update(lr=0.05, scale=scale, skip=skip, gated=config.gated, seed=5, batch_index=step))
    assert float(optimizer.step_count()) == 2
    found: dict[str, Tensor] = {f"weights/{name}": p for name, p in parameters.items()} | optimizer.tensors()
    moved = {name: Moved(box_of(tensor), local_part(tensor)) for name, tensor in found.items()}
    for name, update in updates(optimizer).items():
        moved[f"update/{name}"] = Moved(box_of(parameters[name]), update)
    if isinstance(optimizer.rules[0], StableAdamWRule):
        lags = optimizer.rules[0]._divisors
        assert min(lags.values()) > 1, "the lag of no tensor divides its rate: the test would show nothing"
    return moved


def every_case(rank: int, world: int, layout: str) -> dict[str, dict[str, Moved]]:
    axes, placements = PLACED.get(layout, ((), dict.fromkeys(SHAPES, ())))
    mesh = init_device_mesh("cpu", axes) if axes else None
    return {name: three_steps(mesh, placements, case) for name, case in CASES.items()}


def updates(optimizer: Optimizer) -> dict[str, Tensor]:
    """Of every parameter its last update, recomputed; where it is known."""
    found = {}
    for rule in optimizer.rules:
        names = list(rule.parameters)
        found |= dict(zip(names, rule.last_updates(names, 0.05), strict=True))
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Moved]]:
    [alone] = run_ranks(1, every_case, "plain")
    return alone  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", PLACED)
def test_every_rule_moves_every_placement_as_plain_tensors(layout: str, plain: dict[str, dict[str, Moved]]) -> None:
    """Each rank's piece of weights, moments and recomputed updates; to the bit where numbers are narrow."""
    for rank, found in enumerate(run_ranks(4, every_case, layout)):
        for case, moved in found.items():
            assert moved.keys() == plain[case].keys()
            for name, (box, local) in moved.items():
                whole = plain[case][name].local
                assert tuple(whole.shape) == box.whole
                assert local.isfinite().all()
                error = (local - whole[box.slices]).abs().max() if local.numel() else torch.tensor(0.0)
                assert error <= CASES[case].tolerance * whole.abs().max(), (rank, case, name)


def in_stages(rank: int, world: int) -> tuple[int, list[Tensor]]:
    """The first of two stages has a matrix, which two replicas hold; the second has none."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "replicate", "shard"))
    stage = mesh["replicate", "shard"]
    name, whole = ("w", torch.arange(24.0).view(6, 4)) if rank < 2 else ("norm", torch.arange(4.0))
    parameter = nn.Parameter(placed(whole, stage, (R, S0)))
    parameter.grad = placed(whole + 1, stage, (R, S0))
    roles: dict[str, Role] = {name: "hidden" if rank < 2 else "norm"}
    optimizer = build_optimizer({name: parameter}, roles, OptimConfig(optimizer=MUON), MODEL)
    optimizer.apply(Update(lr=0.05, scale=torch.tensor(1.0), skip=torch.tensor(False)))
    together = torch.ones(1)
    torch.distributed.all_reduce(together)
    return int(together), [local_part(parameter)]


def test_a_stage_shares_its_matrices_among_its_own_ranks_and_others_do_not_wait() -> None:
    ranks = run_ranks(4, in_stages, timeout_s=20.0)
    assert [together for together, _ in ranks] == [4] * 4
    assert torch.equal(ranks[0][1][0], ranks[1][1][0])
    assert not torch.equal(ranks[0][1][0], torch.arange(24.0).view(6, 4))


def taken(rank: int, world: int, layout: str) -> tuple[dict[int, list[tuple[int, float]]], list[int]]:
    """Of every matrix this rank works on where it gets how large a share from; and the owners of all."""
    axes, placements = PLACED[layout]
    mesh = init_device_mesh("cpu", axes)
    names = [name for name, (shape, role) in SHAPES.items() if role == "hidden"]
    tensors = [placed(w, mesh, placements[n]) for n, w in drawn(0, torch.float32).items() if n in names]
    rows = [(12, 4, 8), (8,), (6, 6, 6), (1,)]
    exchange = MatrixExchange(tensors, rows, product_cost, peers_of(tensors))
    found: dict[int, list[tuple[int, float]]] = {}
    for source, pieces in enumerate(exchange._taken):
        for matrix, window in pieces:
            size = (matrix.stop - matrix.start) * matrix.columns
            share = window.shape[0] * window.shape[1] / size
            found.setdefault(exchange.matrices.index(matrix), []).append((source, share))
    return found, [matrix.owner for matrix in exchange.matrices]


@pytest.mark.parametrize(
    "layout", ["replicas of shards", "shards of tensor parallel pieces", "replicas of tensor parallel pieces"]
)
def test_every_piece_of_a_matrix_comes_once_and_from_the_replica_of_its_owner(layout: str) -> None:
    axes, _ = PLACED[layout]
    ranks = run_ranks(4, taken, layout)
    owners = ranks[0][1]
    assert len(set(owners)) == 4, "the work is shared out"
    for rank, (found, theirs) in enumerate(ranks):
        assert theirs == owners
        assert sorted(found) == [at for at, owner in enumerate(owners) if owner == rank]
        for pieces in found.values():
            assert sum(share for _, share in pieces) == pytest.approx(1.0)
            replica = 4 // axes[0]
            assert {source // replica for source, _ in pieces} == {rank // replica}
