"""Numbers over ranks: sums, maxima, and rank 0's word."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from surefoot.config.parallel import ParallelConfig
from surefoot.parallel.boxes import cut_box
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.parallel.reduce import (
    from_every_rank,
    from_rank_zero,
    gather_over_ranks,
    max_over_ranks,
    sum_over_ranks,
    sum_over_shards,
)

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
WORD = {"rows": [{"name": "step-000005", "loss": 0.1}, None], "text": "größer – 大", "empty": {}}


def reduced(rank: int, world: int) -> tuple[list[float], list[float], str]:
    here = join_world(ParallelConfig(device="cpu", threads=1))
    values = [torch.tensor(rank + 1, dtype=torch.int32), 0.1 * (rank + 1), torch.tensor(-float(rank))]
    total, top = sum_over_ranks(values, here), max_over_ranks(values, here)
    return total.tolist(), top.tolist(), str(total.dtype)


def test_every_value_is_summed_over_the_ranks_in_fp64() -> None:
    for total, _, dtype in run_ranks(2, reduced):
        assert total == [3.0, 0.1 + 0.2, -1.0]
        assert dtype == "torch.float64"


def test_every_value_is_the_largest_over_the_ranks() -> None:
    assert [top for _, top, _ in run_ranks(2, reduced)] == [[2.0, 0.2, 0.0]] * 2


def with_a_nan_on_one_rank(rank: int, world: int) -> list[float]:
    here = join_world(ParallelConfig(device="cpu", threads=1))
    return sum_over_ranks([math.nan if rank == 1 else 1.0, 2.0], here).tolist()


def test_a_nan_of_one_rank_reaches_every_rank_in_its_own_sum_and_in_no_other() -> None:
    for first, second in run_ranks(2, with_a_nan_on_one_rank):
        assert math.isnan(first)
        assert second == 4.0


def told(rank: int, world: int) -> object:
    here = join_world(ParallelConfig(device="cpu", threads=1))
    mine = WORD if rank == 0 else object()
    return [from_rank_zero(mine, here), from_rank_zero([] if rank == 0 else [rank], here)]


def test_rank_zeros_value_is_everyones_and_what_the_others_pass_is_ignored() -> None:
    assert run_ranks(3, told) == [[WORD, []]] * 3


def test_one_rank_alone_needs_no_group() -> None:
    assert sum_over_ranks([1.5, torch.tensor(2)], ALONE).tolist() == [1.5, 2.0]
    assert max_over_ranks([1.5, torch.tensor(2)], ALONE).tolist() == [1.5, 2.0]
    assert from_rank_zero(WORD, ALONE) is WORD
    assert gather_over_ranks([1.5, torch.tensor([2, 3])], ALONE).tolist() == [[1.5, 2.0, 3.0]]


def packed_together(rank: int, world: int) -> tuple[list[float], list[list[float]]]:
    here = join_world(ParallelConfig(device="cpu", threads=1))
    values = [
        1.0 + rank,
        2,
        torch.tensor([[3.0, 4.0], [5.0, 6.0]], dtype=torch.float32),
        torch.tensor(rank),
        math.nan if rank else 0.5,
    ]
    return sum_over_ranks(values, here).tolist(), gather_over_ranks(values, here).tolist()


def test_numbers_and_tensors_are_packed_in_their_order_and_gathered_with_their_nans() -> None:
    for total, everyone in run_ranks(2, packed_together):
        assert total == pytest.approx([3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 1.0, math.nan], nan_ok=True)
        assert everyone[0] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.5]
        assert everyone[1] == pytest.approx([2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, math.nan], nan_ok=True)


def test_packing_leaves_what_was_passed_alone() -> None:
    value = torch.ones(3, dtype=torch.float64)
    sum_over_ranks([value], ALONE).zero_()
    assert value.eq(1).all()


def each_ranks_own(rank: int, world: int) -> object:
    return from_every_rank({"rank": rank}, join_world(ParallelConfig(device="cpu", threads=1)))


def test_every_rank_hears_every_rank() -> None:
    assert run_ranks(2, each_ranks_own) == [[{"rank": 0}, {"rank": 1}]] * 2


def shard_sums(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).view(3, 2)
    tensors = [distribute_tensor(whole, mesh, [Shard(0)]), whole, distribute_tensor(whole, mesh, [Replicate()])]
    shares = [t.to_local().sum() if isinstance(t, DTensor) else t.sum() for t in tensors]
    return sum_over_shards(torch.stack(shares).double(), tensors).tolist()


def strided_sums(rank: int, world: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(30.0).view(5, 6)
    tensors, shares = [], []
    for placements in STRIDED:
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        local = whole[cut_box((5, 6), (2, 2), placements, coordinate).slices]
        tensors.append(DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride()))
        shares.append(local.double().sum())
    return sum_over_shards(torch.stack(shares), tensors).tolist()


STRIDED: list[list[Placement]] = [
    [_StridedShard(0, split_factor=2), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(1), Replicate()],
    [Shard(0), Shard(1)],
    [Replicate(), Replicate()],
]


def test_a_sum_over_shards_knows_strided_shards_and_replicas() -> None:
    assert run_ranks(4, strided_sums) == [[435.0] * len(STRIDED)] * 4


def test_a_sum_over_shards_counts_every_element_once_however_the_tensor_lies() -> None:
    assert run_ranks(2, shard_sums) == [[15.0, 15.0, 15.0]] * 2
