"""Checkpoints between any two layouts: what was saved under one comes back bit for bit under every other."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from surefoot.parallel.boxes import cut_box
from surefoot.parallel.fork_launch import RankFailed, run_ranks
from surefoot.train import checkpoint_io
from surefoot.train.checkpoint import load, newest_valid, own_group, save
from surefoot.train.manifest import MANIFEST, CheckpointError, read_manifest

NAMES = ("weights/first", "exp_avg/first", "weights/last", "scalar", "narrow")
SHAPES = {"weights/first": (7, 6), "exp_avg/first": (7, 6), "weights/last": (6, 10), "scalar": (), "narrow": (3,)}
DTYPES = {"exp_avg/first": torch.float64, "weights/last": torch.bfloat16}


def whole(name: str) -> Tensor:
    """Different numbers in every element, and other ones for every name."""
    draw = torch.Generator().manual_seed(NAMES.index(name))
    return torch.randn(SHAPES[name], generator=draw, dtype=torch.float64).to(DTYPES.get(name, torch.float32))


def placed(name: str, mesh: DeviceMesh, placements: tuple[Placement, ...], *, empty: bool) -> DTensor:
    full = whole(name)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = full[cut_box(tuple(full.shape), tuple(mesh.shape), placements, coordinate).slices].clone()
    return DTensor.from_local(
        torch.full_like(local, -1) if empty else local, mesh, placements, shape=full.shape, stride=full.stride()
    )


def one(rank: int, world: int, empty: bool) -> dict[str, Tensor]:
    return {name: torch.full_like(whole(name), -1) if empty else whole(name) for name in NAMES}


def sharded(rank: int, world: int, empty: bool) -> dict[str, Tensor]:
    """Over all ranks along dim 0: uneven pieces, and empty ones of the tensor of three elements."""
    mesh = init_device_mesh("cpu", (world,))
    return {n: placed(n, mesh, (Shard(0) if SHAPES[n] else Replicate(),), empty=empty) for n in NAMES}


def hybrid(rank: int, world: int, empty: bool) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2))
    return {n: placed(n, mesh, (Replicate(), Shard(0) if SHAPES[n] else Replicate()), empty=empty) for n in NAMES}


def tensor_parallel(rank: int, world: int, empty: bool) -> dict[str, Tensor]:
    """Sharding over tensor parallelism: one weight cut by rows twice, one by rows and columns."""
    mesh = init_device_mesh("cpu", (2, 2))
    twice, boxes, shard = (_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Replicate())
    cut: dict[str, tuple[Placement, ...]] = {
        "weights/first": twice,
        "exp_avg/first": twice,
        "weights/last": boxes,
        "scalar": (Replicate(), Replicate()),
        "narrow": shard,
    }
    return {name: placed(name, mesh, cut[name], empty=empty) for name in NAMES}


def stages(rank: int, world: int, empty: bool) -> dict[str, Tensor]:
    """Two stages of two ranks, each with its own names, on its own slice of the mesh; one plain tensor is everywhere."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))["shard"]
    mine = NAMES[:2] if rank < 2 else NAMES[2:3]
    held: dict[str, Tensor] = {
        name: placed(name, mesh, (Shard(int(name == "weights/last")),), empty=empty) for name in mine
    }
    return held | {name: tensor for name, tensor in one(rank, world, empty).items() if name in ("scalar", "narrow")}


LAYOUTS: dict[str, tuple[int, Callable[[int, int, bool], dict[str, Tensor]]]] = {
    "one": (1, one),
    "shard 2": (2, sharded),
    "shard 4": (4, sharded),
    "replicate 2 x shard 2": (4, hybrid),
    "shard 2 x tp 2": (4, tensor_parallel),
    "two stages of 2": (4, stages),
}


def save_each(rank: int, world: int, root: Path, names: list[str]) -> None:
    group = own_group()
    for name in names:
        save(root / name, LAYOUTS[name][1](rank, world, False), {"layout": name}, group=group).wait()


def load_each(rank: int, world: int, root: Path, names: list[str]) -> list[str]:
    """What is wrong under these layouts with anything that was saved under any."""
    wrong = []
    for source in LAYOUTS:
        for name in names:
            right, found = (LAYOUTS[name][1](rank, world, empty) for empty in (False, True))
            assert load(root / source, found) == {"layout": source}
            wrong += [f"{source} -> {name}: {key}" for key in found if not same(found[key], right[key])]
    return wrong


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (one, other)))


def test_a_state_saved_under_any_layout_loads_under_every_other(tmp_path: Path) -> None:
    by_world = {world: [name for name, (size, _) in LAYOUTS.items() if size == world] for world in (1, 2, 4)}
    for world, names in by_world.items():
        run_ranks(world, save_each, tmp_path, names)
    for world, names in by_world.items():
        assert run_ranks(world, load_each, tmp_path, names) == [[]] * world
    # every element is there once: replicas are written by one of their holders, and pieces of nothing by none
    for name in LAYOUTS:
        tensors = sum(path.stat().st_size for path in (tmp_path / name).glob("*.distcp"))
        assert tensors < 45_000, name


def refused(rank: int, world: int, folder: Path) -> list[str]:
    """What is said of tensors that some ranks lack, of one nobody has, and of one whose shape is another on one rank."""
    held = stages(rank, world, True)
    load(folder, held)
    before = {name: tensor.clone() for name, tensor in held.items()}
    lacking = {name: tensor for name, tensor in held.items() if name != "weights/last"}
    said = []
    odd = torch.zeros(3, 3) if rank == 3 else torch.zeros(3)
    for state in (lacking, held | {"new": torch.zeros(1)} if rank == 1 else held, held | {"narrow": odd}):
        with pytest.raises(CheckpointError) as caught:
            load(folder, state)
        said.append(str(caught.value).split("\n  ", 1)[1])
    assert all(same(held[name], before[name]) for name in held if name != "narrow")
    return said


def test_a_name_is_missing_only_if_no_rank_has_it_and_all_ranks_say_the_same(tmp_path: Path) -> None:
    save(tmp_path / "c", one(0, 1, False), {}).wait()
    first, *others = run_ranks(4, refused, tmp_path / "c")
    assert first == [
        "weights/last: in the checkpoint, but not in this state",
        "new: not in the checkpoint",
        "narrow: shape [3] in the checkpoint, [3, 3] here",
    ]
    assert others == [first] * 3


def contradict(rank: int, world: int, folder: Path) -> list[str]:
    group, said = own_group(), []
    mesh = init_device_mesh("cpu", (2,))
    pieces = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Replicate()])
    states: list[Mapping[str, Tensor]] = [
        {"expert": torch.full((2,), float(rank))},
        {"expert": torch.zeros(2 + rank)},
        {"expert": torch.zeros(2, dtype=torch.float32 if rank else torch.float64)},
        {"replica": pieces},
    ]
    for number, state in enumerate(states):
        pending = save(folder / str(number), state, {}, group=group)
        with pytest.raises(CheckpointError) as caught:
            pending.wait()
        dist.barrier()  # rank 0 removes what it began
        assert not (folder / str(number)).exists()
        said.append(str(caught.value))
    return said


def test_two_ranks_with_other_contents_under_one_name_are_an_error_not_a_choice(tmp_path: Path) -> None:
    first, second = run_ranks(2, contradict, tmp_path)
    assert first == second
    assert "expert is not the same on ranks 0 and 1, and only one would be written" in first[0]
    assert "expert is torch.float32 [2] on rank 0, but torch.float32 [3] on rank 1: one name is one tensor" in first[1]
    assert "expert is torch.float64 [2] on rank 0, but torch.float32 [2] on rank 1" in first[2]
    assert "replica is not the same on ranks 0 and 1" in first[3]


def keep(rank: int, world: int, root: Path) -> None:
    for name in ("old", "new"):
        save(root / name, sharded(rank, world, False), {}, group=own_group()).wait()


def fall_back(rank: int, world: int, root: Path) -> list[tuple[str, str]]:
    found = []
    for damaged in sorted(path for path in root.iterdir() if path.name.startswith("new-")):
        good, why = newest_valid([damaged, root / "old"])
        assert good is not None
        with pytest.raises(CheckpointError) as caught:
            load(damaged, sharded(rank, world, True))
        assert str(caught.value) == why[0][1]
        state = sharded(rank, world, True)
        load(good, state)
        assert all(same(tensor, sharded(rank, world, False)[name]) for name, tensor in state.items())
        found.append((good.name, why[0][1]))
    return found


def test_damage_to_one_of_four_ranks_files_is_refused_by_all_with_file_and_rank(tmp_path: Path) -> None:
    run_ranks(4, keep, tmp_path)
    for kind in ("cut", "flipped", "missing"):
        (tmp_path / f"new-{kind}").mkdir()
        for path in (tmp_path / "new").iterdir():
            (tmp_path / f"new-{kind}" / path.name).write_bytes(path.read_bytes())
        path = tmp_path / f"new-{kind}" / "__2_0.distcp"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-1] if kind == "cut" else content)
        if kind == "missing":
            path.unlink()
    assert "__2_0.distcp" in read_manifest(tmp_path / "old").files
    first, *others = run_ranks(4, fall_back, tmp_path)
    assert others == [first] * 3
    assert [name for name, _ in first] == ["old"] * 3
    for kind, (_, why) in zip(("cut", "flipped", "missing"), first, strict=True):
        said = {"cut": "it ends at offset", "flipped": "its content changed", "missing": "missing, but"}[kind]
        assert f"new-{kind}/__2_0.distcp (written by rank 2): " in why
        assert said in why


def one_dies(rank: int, world: int, root: Path, victim: int) -> None:
    """A save in which one rank is killed while it writes its file."""
    if rank == victim:
        checkpoint_io._HashedFile.finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign, return-value]
    save(root / "new", tensor_parallel(rank, world, False), {}, group=own_group()).wait()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_is_killed_in_the_middle_of_a_save_leaves_the_old_checkpoint_and_no_new_one(
    tmp_path: Path, victim: int
) -> None:
    run_ranks(4, keep_boxes, tmp_path)
    with pytest.raises((RankFailed, CheckpointError)):
        run_ranks(4, one_dies, tmp_path, victim)
    assert not (tmp_path / "new" / MANIFEST).exists()
    found, ((refused, why),) = newest_valid([tmp_path / "new", tmp_path / "old"])
    assert (found, refused) == (tmp_path / "old", tmp_path / "new")
    assert "missing, so this save was cut short" in why
    state = one(0, 1, True)
    load(tmp_path / "old", state)
    assert all(same(state[name], whole(name)) for name in NAMES)


def keep_boxes(rank: int, world: int, root: Path) -> None:
    save(root / "old", tensor_parallel(rank, world, False), {}, group=own_group()).wait()
