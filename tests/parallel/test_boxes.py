"""Boxes: what a rank holds is where the arithmetic says, under FSDP2 over tensor parallel pieces too, and element by element."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from surefoot.optim.clip import local_part
from surefoot.parallel.boxes import Box, box_of, boxes_over, cut_box
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.exchange import peers_of
from surefoot.parallel.fork_launch import run_ranks

SHAPES: tuple[tuple[int, ...], ...] = ((16, 6), (7, 5), (9, 3), (3, 4), (1, 4), (7,), (6, 5, 3))
"""Also what does not divide, and what leaves ranks with nothing."""


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Elements are their places."""
    return torch.arange(math.prod(shape)).view(shape)


def sharded(shape: tuple[int, ...], dim: int | None, axes: tuple[int, int, int]) -> DTensor:
    """A parameter as FSDP2 leaves it, whose axis ``tp`` cut it along a dim before, or replicates it."""
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard", "tp"))
    module = nn.Module()
    placement = Replicate() if dim is None else Shard(dim)
    module.w = nn.Parameter(distribute_tensor(numbered(shape).double(), mesh["tp"], [placement]))
    fully_shard(module, mesh=mesh["replicate", "shard"])
    assert isinstance(module.w, DTensor)
    return module.w


def boxes_of_rank(rank: int, world: int, axes: tuple[int, int, int]) -> list[tuple[Box, list[Box], list[float], str]]:
    """Of every shape and cut this rank's box, all boxes, what lies in memory, and the placements."""
    found = []
    assert peers_of([sharded((4, 4), dim, axes) for dim in (None, 0, 1)]).axes == axes, "FSDP2 puts all on one mesh"
    for shape in SHAPES:
        for dim in (None, 0, 1):
            if dim is not None and dim >= len(shape):
                continue
            tensor = sharded(shape, dim, axes)
            local = local_part(tensor)
            assert local.numel() == 0 or tuple(local.shape) == box_of(tensor).sizes
            found.append((box_of(tensor), boxes_over(tensor), local.flatten().tolist(), str(tensor.placements)))
            whole = {"w": numbered(shape).double()}
            assert digest_tensors({"w": tensor}) == digest_tensors(whole)
    return found


@pytest.mark.parametrize("axes", [(2, 2, 2), (1, 4, 2)])
def test_what_lies_in_memory_is_what_the_box_says(axes: tuple[int, int, int]) -> None:
    ranks = run_ranks(8, boxes_of_rank, axes)
    assert any("StridedShard" in placements for *_, placements in ranks[0])
    for rank, found in enumerate(ranks):
        for case, (box, everyone, memory, _) in enumerate(found):
            assert memory == numbered(box.whole)[box.slices].flatten().tolist()
            assert everyone == [other[case][0] for other in ranks]
            assert everyone[rank] == box


BOXES = [
    Box((5, 8), (1, 0), (3, 8)),
    Box((5, 8), (1, 2), (3, 5)),
    Box((5, 8), (2, 4), (1, 4)),
    Box((4, 6, 5), (1, 3, 0), (2, 3, 5)),
    Box((4, 6, 5), (0, 2, 1), (4, 2, 3)),
    Box((7,), (3,), (4,)),
    Box((5, 8), (5, 0), (0, 8)),
    Box((5, 8), (0, 4), (5, 0)),
    Box((), (), ()),
]


@pytest.mark.parametrize("box", BOXES)
def test_places_in_the_box_and_in_the_whole_turn_into_each_other(box: Box) -> None:
    inside = numbered(box.whole)[box.slices].flatten()
    mine = torch.arange(box.numel)
    assert torch.equal(box.places(mine), inside)
    assert torch.equal(box.held(inside), mine)
    every_third = torch.arange(1, math.prod(box.whole), 3)
    expected = [int(torch.nonzero(inside == place)) for place in every_third if place in inside]
    assert box.held(every_third).tolist() == expected
    if box.numel:
        gaps = inside.diff() != 1
        assert box.first == inside[0]
        assert box.run == (int(gaps.nonzero()[0]) + 1 if gaps.any() else box.numel)


def test_a_plain_tensor_is_whole() -> None:
    assert box_of(torch.zeros(3, 2)) == Box((3, 2), (0, 0), (3, 2))
    assert box_of(torch.zeros(())) == Box((), (), ())


def test_what_is_no_box_is_refused() -> None:
    with pytest.raises(ValueError, match="is a partial sum, of which no rank holds a part"):
        cut_box((4, 4), (2,), [Partial()], [0])
    strided: list[list[Placement]] = [
        [_StridedShard(0, split_factor=2), Replicate()],
        [_StridedShard(0, split_factor=4), Shard(0)],
        [Shard(0), _StridedShard(0, split_factor=2)],
        [_StridedShard(0, split_factor=2), Shard(1)],
    ]
    for placements in strided:
        with pytest.raises(ValueError, match=r"what a rank holds is no box, since _S\(0, [24]\)"):
            cut_box((8, 8), (2, 2), placements, [0, 0])


def outside(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
    whole = torch.zeros(4)
    tensor = distribute_tensor(whole, mesh["shard"], [Shard(0)])
    return str(box_of(tensor).sizes)


def test_a_stage_knows_the_boxes_of_its_own_mesh() -> None:
    assert run_ranks(2, outside) == ["(4,)", "(4,)"]
