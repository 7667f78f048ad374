"""The state digest: a change anywhere shows, a change of layout does not."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from surefoot.parallel.digest import ReplicasDiffer, combine, digest_tensors
from surefoot.parallel.fork_launch import run_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
CHUNK = 1 << 16


def digest_of(tensor: Tensor, name: str = "w") -> int:
    return digest_tensors({name: tensor})[name]


def by_the_definition(name: str, patterns: list[int]) -> int:
    """The module's formula with Python integers, one element after another."""
    modulus, total = 1 << 64, 0
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    for index, bits in enumerate(patterns):
        x = (bits + 0x9E3779B97F4A7C15 * (index + 1) + key) % modulus
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 % modulus
        x ^= x >> 27
        x = x * 0x94D049BB133111EB % modulus
        total += x ^ (x >> 31)
    return total % modulus


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_digest_is_the_formula_that_the_module_states() -> None:
    tensor = some(7, 11)
    patterns = tensor.view(torch.int32).flatten().tolist()
    assert digest_of(tensor, "blocks.0.weight") == by_the_definition("blocks.0.weight", patterns)
    assert digest_of(tensor.double()) == by_the_definition("w", tensor.double().view(torch.int64).flatten().tolist())


def test_chunks_join_as_if_there_were_none() -> None:
    tensor = (torch.arange(2 * CHUNK + 3, dtype=torch.int32) * 7919).to(torch.int32)
    assert digest_of(tensor) == by_the_definition("w", tensor.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_anywhere_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = (some(5, 9) * 100).to(dtype)
    raw = tensor.view(torch.uint8)
    seen = {digest_of(tensor)}
    places = range(raw.numel()) if dtype is not torch.bool else []
    for place in places:
        for bit in (0, 7):
            raw.view(-1)[place] ^= 1 << bit
            seen.add(digest_of(tensor))
            raw.view(-1)[place] ^= 1 << bit
    for place in range(tensor.numel() if dtype is torch.bool else 0):
        tensor.view(-1)[place] ^= True
        seen.add(digest_of(tensor))
        tensor.view(-1)[place] ^= True
    flips = tensor.numel() if dtype is torch.bool else 2 * raw.numel()
    assert len(seen) == flips + 1


def test_swapping_two_elements_changes_the_digest_and_so_does_the_name_of_the_tensor() -> None:
    tensor = some(64)
    swapped = tensor.clone()
    swapped[[3, 40]] = tensor[[40, 3]]
    assert digest_of(tensor) != digest_of(swapped)
    assert digest_of(tensor, "a") != digest_of(tensor, "b")


def test_the_bits_of_a_nan_and_the_sign_of_a_zero_count() -> None:
    quiet, other = (
        torch.tensor([pattern], dtype=torch.int32).view(torch.float32) for pattern in (0x7FC00000, 0x7FC00001)
    )
    assert digest_of(quiet) == digest_of(quiet.clone()) != digest_of(other)
    assert digest_of(torch.tensor([0.0])) != digest_of(torch.tensor([-0.0]))


def test_memory_layout_does_not_count_and_empty_and_scalar_tensors_work() -> None:
    tensor = some(6, 8)
    assert digest_of(tensor.t().contiguous().t()) == digest_of(tensor)
    assert digest_of(torch.empty(0, 4)) == 0
    assert digest_of(torch.tensor(3.0)) == digest_of(torch.tensor([3.0])) != 0
    assert digest_of(torch.tensor([1 + 2j])) == digest_of(torch.tensor([1.0, 2.0]))
    assert digest_tensors({}) == {}


def test_the_state_digest_is_sixteen_hex_digits_in_any_order() -> None:
    digests = digest_tensors({"a": some(3), "b": some(4)})
    assert combine(digests) == combine(dict(reversed(digests.items())))
    assert combine(digests) != combine({"a": digests["a"]})
    assert len(combine(digests)) == 16
    assert combine({}) == "0" * 16


def test_a_tensor_without_bits_in_memory_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"head is torch\.strided on meta: a digest reads the bits of dense tensors"):
        digest_of(torch.empty(3, device="meta"), "head")


LAYOUTS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (6, 5), (Shard(0),)),
    ((2,), (6, 5), (Shard(1),)),
    ((2,), (1, 3), (Shard(0),)),
    ((2,), (6, 5), (Replicate(),)),
    ((2,), (3, 4, 5), (Shard(1),)),
    ((2,), (3, 2, 40_001), (Shard(2),)),
    ((2, 1), (8, 6), (Shard(0), Shard(1))),
    ((1, 2), (8, 6), (Replicate(), Shard(1))),
]


def sharded_digests(rank: int, world: int, dtype: torch.dtype) -> list[dict[str, int]]:
    found = []
    for mesh_shape, shape, placements in LAYOUTS:
        mesh = init_device_mesh("cpu", mesh_shape)
        whole = some(*shape).to(dtype)
        found.append(digest_tensors({"w": distribute_tensor(whole, mesh, placements), "plain": whole}))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_sharding_on_two_ranks_has_the_digest_of_the_whole_tensor(dtype: torch.dtype) -> None:
    first, second = run_ranks(2, sharded_digests, dtype)
    assert first == second
    for (_, shape, _), found in zip(LAYOUTS, first, strict=True):
        whole = some(*shape).to(dtype)
        assert found == digest_tensors({"w": whole, "plain": whole}), shape


def four_ranks(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2))
    layouts: list[Any] = [(Replicate(), Shard(0)), (Shard(0), Shard(0)), (Shard(1), Shard(0)), (Shard(0), Replicate())]
    return [digest_tensors({"w": distribute_tensor(some(7, 6), mesh, layout)})["w"] for layout in layouts]


def test_hybrid_and_doubly_sharded_layouts_on_four_ranks_count_each_element_once() -> None:
    assert run_ranks(4, four_ranks) == [[digest_of(some(7, 6))] * 4] * 4


def diverged(rank: int, world: int) -> None:
    tensor = some(4)
    tensor[2] += rank
    digest_tensors({"fine": some(3), "norm.weight": tensor})


def test_replicas_that_differ_are_an_error_with_name_and_ranks() -> None:
    with pytest.raises(ReplicasDiffer, match=r"1 replicated pieces differ.*norm\.weight at \[0\] on ranks 0 and 1"):
        run_ranks(2, diverged)


def partial_sum(rank: int, world: int) -> None:
    digest_tensors({"g": DTensor.from_local(some(4), init_device_mesh("cpu", (2,)), [Partial()])})


def test_a_partial_sum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"g has placements .*reduce it first"):
        run_ranks(2, partial_sum)
