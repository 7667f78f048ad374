"""Checkpoints of several ranks: any sharding is saved once, and loads on any other number of ranks."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from surefoot.parallel.digest import combine, digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.train import checkpoint_io
from surefoot.train.checkpoint import load, newest_valid, own_group, save, verify
from surefoot.train.manifest import CheckpointError, read_manifest, whole
from surefoot.train.staging import Staging

NAME = "step-000003-attempt-0001"
ROWS = 5  # odd, so that two ranks hold unequal shares


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, ROWS), nn.LayerNorm(ROWS), nn.Linear(ROWS, 1))


def trained(model: nn.Module, steps: int) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """Weights and moments by name after a few steps; every rank sees the same batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = (model(torch.full((2, 4), 1.0 + step)) ** 2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"weights/{name}"] = parameter
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment]
    tensors["step"] = torch.tensor(steps)
    return tensors, optimizer


def fsdp(seed: int) -> nn.Module:
    model = network(seed)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def digest(tensors: Mapping[str, Tensor]) -> str:
    return combine(digest_tensors(tensors))


def save_sharded(rank: int, world: int, folder: Path, asynchronous: bool) -> tuple[str, int]:
    tensors, _ = trained(fsdp(seed=0), 2)
    group, staging = own_group(), Staging()
    pending = save(folder, tensors, {"world": world}, asynchronous=asynchronous, group=group, staging=staging)
    before = digest(tensors)
    for tensor in tensors.values():  # training goes on, on the default group, while the save runs on its own
        dist.all_reduce(torch.zeros(8))
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().zero_()
    manifest = pending.wait()
    return before, manifest.world_size


def load_sharded(rank: int, world: int, folder: Path) -> tuple[str, Any]:
    tensors, _ = trained(fsdp(seed=9), 1)
    record = load(folder, tensors)
    return digest(tensors), record


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_sharded_over_two_ranks_loads_on_one_three_and_two(tmp_path: Path, asynchronous: bool) -> None:
    results = run_ranks(2, save_sharded, tmp_path / NAME, asynchronous)
    assert results[0] == results[1]
    saved, world_size = results[0]
    assert world_size == 2
    assert {"__0_0.distcp", "__1_0.distcp"} <= read_manifest(tmp_path / NAME).files.keys()
    assert verify(tmp_path / NAME) == []
    alone, _ = trained(network(seed=9), 1)
    assert load(tmp_path / NAME, alone) == {"world": 2}
    assert digest(alone) == saved
    for world in (2, 3) if asynchronous else (2,):
        assert run_ranks(world, load_sharded, tmp_path / NAME) == [(saved, {"world": 2})] * world


def test_a_state_saved_on_one_rank_loads_sharded_over_two(tmp_path: Path) -> None:
    tensors, _ = trained(network(seed=0), 2)
    save(tmp_path / NAME, tensors, {"world": 1}).wait()
    assert run_ranks(2, load_sharded, tmp_path / NAME) == [(digest(tensors), {"world": 1})] * 2


LAYOUTS: list[tuple[Placement, ...]] = [
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (Shard(1), Replicate()),
    (Shard(0), Shard(0)),
    (Replicate(), Replicate()),
]


def save_layouts(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole_one = torch.arange(35.0).reshape(7, 5)
    tensors = {f"w{number}": distribute_tensor(whole_one, mesh, layout) for number, layout in enumerate(LAYOUTS)}
    save(folder, tensors, {}, group=own_group()).wait()
    found = {name: distribute_tensor(torch.zeros(7, 5), mesh, LAYOUTS[-number]) for number, name in enumerate(tensors)}
    load(folder, found)
    assert digest(found) == digest(tensors)


def test_every_layout_of_four_ranks_is_saved_once_and_loads_into_other_layouts_and_plain_tensors(
    tmp_path: Path,
) -> None:
    run_ranks(4, save_layouts, tmp_path / NAME)
    found = {f"w{number}": torch.zeros(7, 5) for number in range(len(LAYOUTS))}
    load(tmp_path / NAME, found)
    assert all(torch.equal(tensor, torch.arange(35.0).reshape(7, 5)) for tensor in found.values())
    elements = sum(path.stat().st_size for path in (tmp_path / NAME).glob("*.distcp"))
    assert elements < 60_000  # what PyTorch adds to 14 chunks of 35 floats; replicas would double it


def replicated(rank: int, world: int, folder: Path) -> list[str]:
    tensors = {f"w{part}": torch.full((1000,), float(part)) for part in range(6)}
    save(folder, tensors, {}, group=own_group()).wait()
    return sorted(path.name for path in folder.glob("*.distcp") if path.stat().st_size > 10_000)


def test_ranks_that_hold_replicas_share_the_writing(tmp_path: Path) -> None:
    (first, _) = run_ranks(2, replicated, tmp_path / NAME)
    assert first == ["__0_0.distcp", "__1_0.distcp"]
    found = {f"w{part}": torch.zeros(1000) for part in range(6)}
    load(tmp_path / NAME, found)
    assert all(torch.equal(tensor, torch.full((1000,), float(name[1:]))) for name, tensor in found.items())


def damaged_fallback(rank: int, world: int, folders: list[Path]) -> tuple[str, list[str]]:
    found, refused = newest_valid(folders)
    assert found is not None
    with pytest.raises(CheckpointError, match="sha256"):
        load(folders[0], {})
    return found.name, [why for _, why in refused]


def test_all_ranks_refuse_what_one_rank_finds_damaged(tmp_path: Path) -> None:
    for name in ("old", "new"):
        run_ranks(2, save_sharded, tmp_path / name, True)
    path = tmp_path / "new" / "__1_0.distcp"
    path.write_bytes(path.read_bytes().replace(b"archive", b"Archive", 1))
    first, second = run_ranks(2, damaged_fallback, [tmp_path / "new", tmp_path / "old"])
    assert first == second
    assert first[0] == "old"
    assert "__1_0.distcp (written by rank 1): sha256 is" in first[1][0]


class FullDisk:
    """The os module of a rank whose disk takes nothing."""

    def __getattr__(self, name: str) -> Any:
        return self._write if name == "write" else getattr(os, name)

    def _write(self, *args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def one_rank_fails(rank: int, world: int, folder: Path) -> str:
    group = own_group()
    tensors = {f"w{part}": torch.ones(1000) for part in range(4)}
    if rank == 1:
        checkpoint_io.os = FullDisk()  # type: ignore[assignment, attr-defined]
    pending = save(folder, tensors, {}, group=group)
    with pytest.raises(CheckpointError) as caught:
        pending.wait()
    dist.barrier()  # the run is alive on both
    return str(caught.value)


def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all_and_the_run_lives(tmp_path: Path) -> None:
    first, second = run_ranks(2, one_rank_fails, tmp_path / NAME)
    assert first == second
    assert first.startswith("rank 1: ")
    assert "no room (No space left on device)" in first
    assert not whole(tmp_path / NAME)
    assert not (tmp_path / NAME).exists()


def without_group(rank: int, world: int, folder: Path) -> None:
    save(folder, {}, {})


def partial(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    save(folder, {"g": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, {}, group=own_group())


def test_what_would_deadlock_or_lose_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"an asynchronous save on several ranks needs group=own_group\(\)"):
        run_ranks(2, without_group, tmp_path / NAME)
    with pytest.raises(CheckpointError, match=r"g has placements .*reduce a partial sum before it is saved"):
        run_ranks(2, partial, tmp_path / NAME)


def held_by_one(rank: int, world: int, folder: Path) -> str:
    mesh = DeviceMesh("cpu", [1])

    def on_rank_one(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor if rank == 1 else torch.empty(0), mesh, [Shard(0)], shape=(3,), stride=(1,))

    saved = {"stage": on_rank_one(torch.arange(3.0)), "all": torch.ones(2)}
    save(folder, saved, {}, group=own_group()).wait()
    found = {"stage": on_rank_one(torch.zeros(3)), "all": torch.zeros(2)}
    load(folder, found)
    assert digest(found) == digest(saved)
    return digest(saved)


def test_a_tensor_that_lives_on_some_of_the_ranks_only_is_saved_by_them(tmp_path: Path) -> None:
    found = {"stage": torch.zeros(3), "all": torch.zeros(2)}
    results = run_ranks(2, held_by_one, tmp_path / NAME)
    load(tmp_path / NAME, found)
    assert torch.equal(found["stage"], torch.arange(3.0))
    assert results == [digest(found)] * 2
