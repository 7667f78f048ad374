"""The fixed sample of weights: spread over all tensors, the same under every layout, read where the weights are."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.role_scaling import Role
from surefoot.parallel.boxes import cut_box
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.train.setup import set_up
from surefoot.train.step import train_step
from surefoot.train.update_size import SAMPLE, WeightSample


def numbered(**sizes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    """Tensors whose elements are their places in all of them laid end to end."""
    parameters, at = {}, 0
    for name, shape in sizes.items():
        count = int(torch.tensor(shape).prod())
        parameters[name] = nn.Parameter(torch.arange(at, at + count, dtype=torch.float64).view(shape))
        at += count
    return parameters


def roles_of(parameters: dict[str, nn.Parameter]) -> dict[str, Role]:
    return {name: "embedding" if name.startswith("embedding") else "hidden" for name in parameters}


def test_the_sample_is_every_nth_weight_and_n_shares_no_factor_with_the_width() -> None:
    parameters = numbered(a=(320, 320), b=(7,), c=(64, 320), d=(1000, 3))
    sample = WeightSample(parameters, roles_of(parameters), first_replica=True)
    total = sum(p.numel() for p in parameters.values())
    assert sample.read().tolist() == [float(i) for i in range(0, total, sample.stride)]
    assert len(sample.read()) == sample.count
    assert 0.9 * SAMPLE < sample.count <= SAMPLE + 1
    assert all(sample.stride % divisor for divisor in range(2, sample.stride))
    columns = {int(value) % 320 for value in sample.read() if value < 320 * 320}
    assert len(columns) > 300


def test_embeddings_are_left_out_and_small_models_are_read_whole() -> None:
    parameters = numbered(embedding=(100, 10), a=(5, 4), b=(3,))
    sample = WeightSample(parameters, roles_of(parameters), first_replica=True)
    assert sample.read().tolist() == [float(i) for i in range(1000, 1023)]
    assert sample.count == 23


def test_a_replica_that_is_not_the_first_reads_nothing() -> None:
    parameters = numbered(a=(5, 4))
    assert len(WeightSample(parameters, roles_of(parameters), first_replica=False).read()) == 0


def test_the_sample_follows_values_in_place_and_tensors_that_move() -> None:
    parameters = numbered(a=(5, 4))
    sample = WeightSample(parameters, roles_of(parameters), first_replica=True)
    before = sample.read()
    with torch.no_grad():
        parameters["a"].add_(1)
    assert torch.equal(sample.read() - before, torch.ones(20))
    parameters["a"].data = torch.zeros(5, 4, dtype=torch.float64)
    assert sample.read().eq(0).all()


def read_after_a_step(rank: int, world: int, config: RunConfig) -> tuple[list[float], list[float], int]:
    """This rank's part of the sample before and after the first step."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    before = setup.sample.read().tolist()
    loader = Loader(config.data, prepare(config.data), config.seed)
    train_step(state, loader.batch(0, (), rank, world), setup)
    return before, setup.sample.read().tolist(), setup.sample.count


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_the_parts_of_two_ranks_are_the_sample_of_one(
    config: RunConfig, vary: Callable[..., RunConfig], layout: str
) -> None:
    config = vary(config, **{"parallel.precision": "fp64", "model.d_model": 96})
    [(before, after, count)] = run_ranks(1, read_after_a_step, config)
    assert len(before) == count
    parts = run_ranks(2, read_after_a_step, vary(config, **{"parallel.data_parallel": layout}))
    assert sorted(parts[0][0] + parts[1][0]) == sorted(before)
    assert sorted(parts[0][1] + parts[1][1]) == pytest.approx(sorted(after), rel=1e-9, abs=1e-12)
    assert before != after
    assert (len(parts[1][0]) > 0) == (layout == "fsdp")


def read_in_pieces(rank: int, world: int) -> list[float]:
    """Rows and columns of two tensors over four ranks, rows of rows of a third, and a replicated one."""
    mesh = init_device_mesh("cpu", (2, 2))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    placed: list[tuple[Placement, ...]] = [
        (Shard(0), Shard(1)),
        (Replicate(), Shard(1)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Replicate(), Replicate()),
    ]
    parameters = {}
    for (name, whole), placements in zip(numbered(**PIECES).items(), placed, strict=True):
        local = whole.detach()[cut_box(tuple(whole.shape), (2, 2), placements, coordinate).slices].contiguous()
        parameters[name] = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
    sample = WeightSample(parameters, dict.fromkeys(parameters, "hidden"), first_replica=rank == 0)
    return sample.read().tolist()


PIECES = {"a": (90, 70), "b": (41, 33), "c": (30, 20), "d": (7, 3)}


def test_columns_and_strided_rows_of_four_ranks_are_together_the_sample_of_the_whole() -> None:
    parameters = numbered(**PIECES)
    whole = WeightSample(parameters, roles_of(parameters), first_replica=True)
    assert whole.stride > 1
    parts = run_ranks(4, read_in_pieces)
    assert all(parts[:3])
    assert sorted(value for part in parts for value in part) == whole.read().tolist()
