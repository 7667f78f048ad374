"""States kept in memory."""

import pytest
import torch

from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import EnvironmentFault, World, join_world
from surefoot.train.setup import set_up
from surefoot.train.snapshot import SnapshotRing, check_budget
from surefoot.train.step import train_step

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


def test_a_snapshot_gives_back_every_bit_and_the_counters(config: RunConfig, loader: Loader) -> None:
    setup, state = set_up(config, ALONE)
    ring = SnapshotRing(2)
    seen = {}
    for index in range(6):
        if index in (1, 3, 4):
            ring.take(state)
            seen[index] = (digest_tensors(state.tensors()), state.counters())
        train_step(state, loader.batch(index), setup)
    assert [snapshot.batch_index for snapshot in ring.kept] == [3, 4]
    found = ring.newest_common(3, ALONE)
    assert found is not None
    ring.restore(found, state)
    assert (digest_tensors(state.tensors()), state.counters()) == seen[3]
    assert [float(rule.step_count()) for rule in state.optimizer.rules] == [3.0]
    assert [snapshot.batch_index for snapshot in ring.kept] == [3]
    assert ring.newest_common(2, ALONE) is None


def test_no_capacity_keeps_nothing(config: RunConfig) -> None:
    _, state = set_up(config, ALONE)
    ring = SnapshotRing(0)
    ring.take(state)
    assert ring.kept == []


def test_more_than_the_budget_is_refused_with_what_fits(config: RunConfig) -> None:
    _, state = set_up(config, ALONE)
    size = check_budget(state.tensors(), 1, 1.0, ALONE)
    assert size == pytest.approx(3 * 4 * sum(p.numel() for p in state.parameters.values()) / 2**30)
    with pytest.raises(EnvironmentFault, match=r"guard.snapshots=5 take .* GiB, over .*; 2 fit"):
        check_budget(state.tensors(), 5, 2.5 * size, ALONE)


def common_snapshot(rank: int, world: int, config: RunConfig, batches: tuple[tuple[int, ...], ...]) -> int:
    here = join_world(config.parallel)
    _setup, state = set_up(config, here)
    ring = SnapshotRing(4)
    for index in batches[rank]:
        state.batch_index = index
        ring.take(state)
    found = ring.newest_common(100, here)
    return -1 if found is None else found.batch_index


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (((2, 4, 6), (2, 4, 6)), 6),
        (((2, 4, 6), (2, 4)), 4),
        (((2, 5), (2, 4)), 2),
        (((6,), (4,)), -1),
        (((), (4,)), -1),
    ],
)
def test_ranks_agree_on_the_newest_snapshot_that_all_have(
    config: RunConfig, batches: tuple[tuple[int, ...], ...], expected: int
) -> None:
    assert run_ranks(2, common_snapshot, config, batches) == [expected, expected]


def over_budget_on_one(rank: int, world: int) -> str:
    here = join_world(ParallelConfig(device="cpu"))
    held = {"weights/stage": torch.zeros(2**18 if rank else 2**10)}
    with pytest.raises(EnvironmentFault) as caught:
        check_budget(held, 2, 2**-10, here)
    return str(caught.value)


def test_a_budget_that_one_rank_exceeds_is_refused_by_all() -> None:
    first, second = run_ranks(2, over_budget_on_one)
    assert first == second
    assert first.startswith("guard.snapshots=2 take 0.00 GiB on the rank that holds most")
    assert "; 1 fit" in first
