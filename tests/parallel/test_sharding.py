"""ZeRO-1, -2, -3, HSDP and offload: what each keeps between micro-batches, what crosses ranks, and the same numbers under all."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.config.layout import Layout
from surefoot.config.optim import Muon, ZClip
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.optim.clip import local_part
from surefoot.parallel.apply import apply_layout
from surefoot.parallel.boxes import Box, box_of
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.train.setup import Setup, set_up
from surefoot.train.state import TrainState
from surefoot.train.step import split, train_step
from tolerances import FP64_RANKS

Vary = Callable[..., RunConfig]
MICRO_BATCHES = 3


@pytest.fixture
def sharded(config: RunConfig, vary: Vary) -> RunConfig:
    return vary(config, **{"parallel.precision": "fp64", "data.batch_size": 12, "parallel.micro_batch_size": 1})


def over(config: RunConfig, vary: Vary, kind: str, ranks: int, shard_size: int = 0) -> RunConfig:
    """Three micro-batches on each of so many ranks."""
    settings = {"data_parallel": kind, "shard_size": shard_size, "micro_batch_size": 12 // ranks // MICRO_BATCHES}
    return vary(config, **{f"parallel.{key}": value for key, value in settings.items()})


# What is kept


class Kept(NamedTuple):
    """On one rank, as shares of the elements of the model."""

    gathered: float
    """Weights that are whole."""
    gradients: float


class Course(NamedTuple):
    """Forward and backward of one batch, seen from outside."""

    before: list[Kept]
    """Of every micro-batch, as it begins."""
    between: list[Kept]
    """Between its forward and its backward."""
    gathers: int
    reduce_scatters: int
    all_reduces: int
    """Over replicas, also where there is one."""


def kept(model: nn.Module) -> Kept:
    gathered = gradients = 0
    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    for group in groups:
        assert group is not None
        for held in group.fsdp_params:
            gathered += held._orig_size.numel() if group.is_unsharded else 0
            gradients += 0 if held.sharded_param.grad is None else local_part(held.sharded_param.grad).numel()
            gradients += 0 if held.unsharded_accumulated_grad is None else held.unsharded_accumulated_grad.numel()
            if group.is_unsharded and held.unsharded_param.grad is not None:
                gradients += held.unsharded_param.grad.numel()
        gradients += 0 if group._partial_reduce_output is None else group._partial_reduce_output.numel()
    whole = sum(parameter.numel() for parameter in model.parameters())
    return Kept(gathered / whole, gradients / whole)


class Collectives(TorchDispatchMode):
    """Counts them by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def course(rank: int, world: int, config: RunConfig) -> Course:
    """The second batch: the first one also sets FSDP2 up."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    loader = Loader(config.data, prepare(config.data), config.seed)
    batches = [loader.batch(index, (), here.data_rank, here.data_size) for index in range(2)]
    setup.forward_backward(split(batches[0], setup), batches[0].num_targets)
    state.optimizer.zero_grad()
    before: list[Kept] = []
    between: list[Kept] = []
    model = state.model
    model.register_forward_pre_hook(lambda module, _: before.append(kept(module)), prepend=True)
    model.register_forward_hook(lambda module, *_: between.append(kept(module)))
    with Collectives() as seen:
        setup.forward_backward(split(batches[1], setup), batches[1].num_targets)
    assert kept(model).gathered == 0
    assert len(before) == len(between) == MICRO_BATCHES
    kinds = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
    assert set(seen.counts) <= set(kinds)
    gathers, reduce_scatters, all_reduces = (seen.counts[kind] for kind in kinds)
    return Course(before, between, gathers, reduce_scatters, all_reduces)


GROUPS = 3
"""What FSDP2 gathers and reduces at once: two blocks, and the rest."""
NOTHING, WHOLE, SHARDS = Kept(0, 0), Kept(1, 1), Kept(0, 0.5)


def courses(config: RunConfig, ranks: int) -> tuple[list[Kept], list[float], tuple[int, int, int]]:
    """What ranks hold on average before each micro-batch, weights gathered between its forward and backward, and collectives in all."""
    found = run_ranks(ranks, course, config)
    assert len({of[2:] for of in found}) == 1
    # shares are padded to one length
    before = [
        Kept(*(round(sum(share) / ranks, 2) for share in zip(*moment, strict=True)))
        for moment in zip(*(of.before for of in found), strict=True)
    ]
    between = [sum(of.gathered for of in moment) / ranks for moment in zip(*(of.between for of in found), strict=True)]
    return before, between, found[0][2:]


def test_zero1_gathers_weights_once_and_keeps_whole_gradients_until_the_last_micro_batch(
    sharded: RunConfig, vary: Vary
) -> None:
    before, between, collectives = courses(over(sharded, vary, "zero1", 2), 2)
    assert before == [NOTHING, WHOLE, WHOLE]
    assert between == [1, 1, 1]
    assert collectives == (GROUPS, GROUPS, GROUPS)


def test_zero2_keeps_shards_of_gradients_and_gathers_weights_once_a_micro_batch(sharded: RunConfig, vary: Vary) -> None:
    before, between, collectives = courses(over(sharded, vary, "zero2", 2), 2)
    assert before == [NOTHING, SHARDS, SHARDS]
    assert between == [1, 1, 1]
    assert collectives == (GROUPS * MICRO_BATCHES, GROUPS * MICRO_BATCHES, GROUPS)


def test_fsdp_lets_go_of_weights_after_the_forward_too(sharded: RunConfig, vary: Vary) -> None:
    before, between, collectives = courses(over(sharded, vary, "fsdp", 2), 2)
    assert before == [NOTHING, SHARDS, SHARDS]
    assert between == [0, 0, 0]
    assert collectives == (2 * GROUPS * MICRO_BATCHES, GROUPS * MICRO_BATCHES, GROUPS)


def test_replicas_of_shards_meet_once_a_step(sharded: RunConfig, vary: Vary) -> None:
    before, _, collectives = courses(over(sharded, vary, "fsdp", 4, shard_size=2), 4)
    assert before == [NOTHING, SHARDS, SHARDS]
    assert collectives == (2 * GROUPS * MICRO_BATCHES, GROUPS * MICRO_BATCHES, GROUPS)


# The same numbers


class Piece(NamedTuple):
    box: Box
    local: Tensor


def two_steps(rank: int, world: int, config: RunConfig) -> tuple[dict[str, Piece], list[float]]:
    """Gradients of the second step, as the update left them, and what it left of weights and moments; losses and norms."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    if config.parallel.data_parallel != "ddp":
        groups = [m._get_fsdp_state()._fsdp_param_group for m in state.model.modules() if isinstance(m, FSDPModule)]
        held = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
        assert {parameter.offload_to_cpu for parameter in held} == {config.parallel.offload}
    return steps_of(setup, state, config)


def steps_of(setup: Setup, state: TrainState, config: RunConfig) -> tuple[dict[str, Piece], list[float]]:
    loader = Loader(config.data, prepare(config.data), config.seed)
    numbers = []
    for index in range(2):
        batch = loader.batch(index, (), setup.world.data_rank, setup.world.data_size)
        signals = train_step(state, batch, setup).signals
        numbers += [signals.loss, signals.gradient_norm, signals.update_size]
    found = {f"gradient/{name}": p.grad for name, p in state.parameters.items() if p.grad is not None}
    assert len(found) == len(state.parameters)
    return {n: Piece(box_of(t), local_part(t).clone()) for n, t in (found | state.tensors()).items()}, numbers


def assert_same(alone: dict[str, Piece], ranks: list[dict[str, Piece]], tolerance: float) -> None:
    """Every element is there, and every piece is that of the whole."""
    for name, (_, whole) in alone.items():
        seen = torch.zeros(whole.shape)
        for pieces in ranks:
            box, local = pieces[name]
            assert torch.linalg.norm(local - whole[box.slices]) <= tolerance * torch.linalg.norm(whole), name
            seen[box.slices] = 1
        assert seen.all(), name


LAYOUTS = [("ddp", 2, 0), ("zero1", 2, 0), ("zero2", 2, 0), ("fsdp", 2, 0), ("zero1", 4, 2), ("fsdp", 4, 2)]


@pytest.fixture
def alone(sharded: RunConfig) -> tuple[dict[str, Piece], list[float]]:
    [found] = run_ranks(1, two_steps, sharded)
    return found  # type: ignore[no-any-return]


def test_every_way_to_share_out_gives_the_numbers_of_one_process(
    sharded: RunConfig, vary: Vary, alone: tuple[dict[str, Piece], list[float]]
) -> None:
    pieces, numbers = alone
    for kind, ranks, shard_size in LAYOUTS:
        found = run_ranks(ranks, two_steps, over(sharded, vary, kind, ranks, shard_size))
        assert_same(pieces, [of for of, _ in found], FP64_RANKS)
        for _, theirs in found:
            assert theirs == pytest.approx(numbers, rel=FP64_RANKS), (kind, ranks)


def replicas_by_fsdp(rank: int, world: int, config: RunConfig) -> tuple[dict[str, Piece], list[float]]:
    """Replicas as they are in products with tensor parallelism or stages: FSDP2 over shards of one rank."""
    here = join_world(config.parallel)
    assert here.mesh is not None
    assert here.layout == Layout(data=world, shard=1)
    with pytest.MonkeyPatch.context() as patch:
        # a layout is plain where it is ddp, and these are the same ranks by another name
        patch.setattr("surefoot.train.setup.apply_layout", _applied_as_shards)
        setup, state = set_up(config, here)
    return steps_of(setup, state, config)


def _applied_as_shards(model: nn.Module, parallel: object, world: World, **given: object) -> object:
    assert dataclasses.is_dataclass(parallel)
    return apply_layout(model, dataclasses.replace(parallel, data_parallel="zero1"), world, **given)  # type: ignore


def test_replicas_in_products_are_shards_of_one_rank(
    sharded: RunConfig, vary: Vary, alone: tuple[dict[str, Piece], list[float]]
) -> None:
    found = run_ranks(2, replicas_by_fsdp, over(sharded, vary, "ddp", 2))
    assert_same(alone[0], [of for of, _ in found], FP64_RANKS)


# Offload


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_offload_changes_no_bit(sharded: RunConfig, vary: Vary, optimizer: str) -> None:
    config = over(sharded, vary, "fsdp", 2)
    if optimizer == "muon":
        config = vary(config, **{"optim.optimizer": Muon(), "optim.clipping": ZClip()})
    here = run_ranks(2, two_steps, config)
    there = run_ranks(2, two_steps, vary(config, **{"parallel.offload": True}))
    for (pieces, numbers), (others, theirs) in zip(here, there, strict=True):
        assert numbers == theirs
        for name, (box, local) in pieces.items():
            assert others[name].box == box
            assert torch.equal(others[name].local, local), name
