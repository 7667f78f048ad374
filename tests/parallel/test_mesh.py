"""Who is there, on what device, with how many threads; and waiting for the leader."""

import os
import time
from pathlib import Path

import pytest
import torch

from surefoot.config.parallel import ParallelConfig
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import EnvironmentFault, join_world, wait_for_leader

CPU = ParallelConfig(device="cpu", threads=1)
READ_ONCE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""What strict determinism needs in the environment before anything touches a device."""


def test_without_a_launcher_there_is_one_rank_and_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = join_world(CPU)
    assert (world.rank, world.size, world.device.type, world.mesh, world.leads) == (0, 1, "cpu", None, True)


def place(rank: int, world: int) -> tuple[int, int, bool, tuple[str, ...], int]:
    here = join_world(CPU)
    assert here.mesh is not None
    assert here.mesh.mesh_dim_names is not None
    return here.rank, here.size, here.leads, here.mesh.mesh_dim_names, here.mesh.size()


def test_every_rank_has_its_place_on_one_axis_and_rank_0_leads() -> None:
    assert run_ranks(2, place) == [(0, 2, True, ("dp",), 2), (1, 2, False, ("dp",), 2)]


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
