"""Who is there, on what device, with how many threads; and waiting for the leader."""

import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from surefoot.config.errors import ConfigError
from surefoot.config.parallel import NcclAxis, NcclConfig, ParallelConfig
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import EnvironmentFault, axis_options, join_world, wait_for_leader

CPU = ParallelConfig(device="cpu", threads=1)
READ_ONCE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""What strict determinism needs in the environment before anything touches a device."""


def test_without_a_launcher_there_is_one_rank_and_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = join_world(CPU)
    assert (world.rank, world.size, world.device.type, world.mesh, world.leads) == (0, 1, "cpu", None, True)


def place(rank: int, world: int, config: ParallelConfig) -> tuple[tuple[int, ...], dict[str, list[int]], str]:
    """Coordinates, the ranks of this one's group along every axis, and how long the first waits."""
    here = join_world(config)
    assert here.mesh is not None
    assert here.tokens is not None
    groups = {}
    for mesh in (here.mesh, here.tokens):
        for name in mesh.mesh_dim_names or ():
            groups[name] = dist.get_process_group_ranks(mesh[name].get_group())
    group = here.mesh["shard"].get_group()
    waits = group._get_backend(torch.device("cpu")).options._timeout
    assert here.leads == here.counts_plain == (rank == 0)
    return (*here.place, here.data_rank, here.data_size, here.counts_rows), groups, str(waits)


def test_every_rank_has_its_place_on_every_axis_and_its_peers() -> None:
    config = ParallelConfig(device="cpu", threads=1, pp=2, cp=2, data_parallel="fsdp", shard_size=1, timeout_s=25.0)
    found = run_ranks(8, place, config)
    assert [coordinates for coordinates, _, _ in found] == [
        (0, 0, 0, 0, 0, 2, True),
        (0, 0, 1, 0, 0, 2, False),
        (0, 1, 0, 0, 1, 2, True),
        (0, 1, 1, 0, 1, 2, False),
        (1, 0, 0, 0, 0, 2, False),
        (1, 0, 1, 0, 0, 2, False),
        (1, 1, 0, 0, 1, 2, False),
        (1, 1, 1, 0, 1, 2, False),
    ]
    # a copy of the weights lies on the context ranks of shard_size data-parallel ones
    assert found[5][1] == {
        "pp": [1, 5],
        "replicate": [5, 7],
        "shard": [4, 5],
        "tp": [5],
        "data": [5, 7],
        "cp": [4, 5],
    }
    assert {waits for _, _, waits in found} == {"0:00:25"}


def joined_apart(rank: int, world: int) -> str:
    with pytest.raises(ConfigError) as caught:
        join_world(ParallelConfig(device="cpu", threads=1 + rank, tp=1 + (rank == 1)))
    assert join_world(CPU).size == world
    return str(caught.value)


def test_a_rank_with_another_layout_is_an_error_on_all_ranks() -> None:
    text = "rank 1 was started with parallel.tp=2 (rank 0: 1): all ranks need the same settings"
    assert run_ranks(3, joined_apart) == [text] * 3


def joined_in_vain(rank: int, world: int) -> None:
    join_world(ParallelConfig(device="cpu", threads=1, tp=2))


def test_ranks_that_do_not_fill_the_axes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks do not divide over pp=1 x cp=1 x tp=2"):
        run_ranks(3, joined_in_vain)


class NcclOptions:
    """Stands for ProcessGroupNCCL.Options, which torch for CPUs does not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout: timedelta | None = None


def test_nccl_is_told_per_axis_what_it_may_take_and_other_backends_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    nccl = NcclConfig(data=NcclAxis(max_ctas=8), tp=NcclAxis(max_ctas=16, high_priority=True))
    config = ParallelConfig(nccl=nccl, timeout_s=30.0)
    found = axis_options(("pp", "replicate", "shard", "cp", "tp"), config, "nccl")
    assert {
        axis: (backend, options.config.max_ctas, options.is_high_priority_stream, options._timeout.seconds)
        for axis, (backend, options) in found.items()
    } == {
        "pp": ("nccl", None, False, 30),
        "replicate": ("nccl", 8, False, 30),
        "shard": ("nccl", 8, False, 30),
        "cp": ("nccl", None, False, 30),
        "tp": ("nccl", 16, True, 30),
    }
    assert all(type(options) is Backend.Options for _, options in axis_options(("tp",), config, "gloo").values())
    assert axis_options(("tp",), config, "fake") == {}


def test_a_gpu_that_is_asked_for_and_absent_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        EnvironmentFault, match=r"parallel.device=cuda, but torch sees no GPU; use --parallel.device cpu"
    ):
        join_world(ParallelConfig(device="cuda", threads=1))
    assert join_world(ParallelConfig(device="auto", threads=1)).device.type == "cpu"


def test_strict_fixes_what_libraries_read_once_and_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in READ_ONCE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    join_world(CPU, strict=False)
    assert not READ_ONCE.keys() & os.environ.keys()
    join_world(CPU)
    assert {name: os.environ[name] for name in READ_ONCE} == READ_ONCE
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    join_world(CPU)
    assert os.environ["NCCL_ALGO"] == "Tree"


def threads_of(rank: int, world: int, asked: int, environment: dict[str, str]) -> int:
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    os.sched_getaffinity = lambda _: set(range(8))
    join_world(ParallelConfig(device="cpu", threads=asked))
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("asked", "environment", "threads"),
    [
        (3, {"OMP_NUM_THREADS": "5"}, 3),
        (0, {"OMP_NUM_THREADS": "5"}, 5),
        (0, {}, 8),
        (0, {"LOCAL_WORLD_SIZE": "4"}, 2),
        (0, {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, 2),
        (0, {"LOCAL_WORLD_SIZE": "16"}, 1),
    ],
)
def test_threads_are_those_asked_for_or_the_cores_over_the_ranks_of_this_machine(
    asked: int, environment: dict[str, str], threads: int
) -> None:
    assert run_ranks(1, threads_of, asked, environment) == [threads]


def waited_for(rank: int, world: int, path: Path) -> bool:
    here = join_world(CPU)
    if here.leads:
        time.sleep(0.3)  # long enough that a rank which does not wait looks too early
        path.write_text("prepared")
    wait_for_leader(here, "data")
    return path.exists()


def test_the_others_wait_until_the_leader_has_prepared_what_they_need(tmp_path: Path) -> None:
    assert run_ranks(3, waited_for, tmp_path / "data") == [True, True, True]
