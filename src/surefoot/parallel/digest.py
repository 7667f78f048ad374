"""The state digest: 64 bits per tensor that say whether two states are the same, bit for bit, whatever their sharding.

The digest of a tensor is the sum modulo 2^64, over its elements, of

    finalise(bits + GOLDEN * (index + 1) + key(name))

where ``index`` is the element's place in the whole tensor (row-major), ``bits`` its bit pattern as a signed integer of the
element's width, ``key`` the first eight bytes (little-endian) of sha256 of the name, and ``finalise`` the output
permutation of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195, with Stafford's "Mix13" constants).
The permutation is one-to-one, so a change inside one element always changes the digest; a sum needs no order, so shards add.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.parallel.boxes import box_of

_CHUNK = 1 << 16
"""Elements hashed at once: two int64 buffers of this length stay in a core's second-level cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value %= _MODULUS
    return value - _MODULUS if value >= _MODULUS // 2 else value


GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = signed(0xBF58476D1CE4E5B9)
_MIX_2 = signed(0x94D049BB133111EB)
_LOW = {shift: (1 << (64 - shift)) - 1 for shift in (30, 27, 31)}


@dataclass(frozen=True)
class Split:
    """A piece of a tensor of which ranks that should hold the same bits hold different ones."""

    name: str
    offsets: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    """The ranks that hold the same bits, the largest group first, then the one with the lowest rank."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside of the majority; all of them where there is none."""
        first, second = self.groups[:2]
        outside = self.groups if len(first) == len(second) else self.groups[1:]
        return tuple(sorted(rank for group in outside for rank in group))

    def sentence(self) -> str:
        """The piece, and who is alone with his bits, as far as that can be told."""
        others = [rank for rank in self.groups[0] if rank not in self.suspects]
        where = f"{self.name} at {list(self.offsets)}"
        if not others:
            return f"{where} on ranks {_listed(self.suspects)}"
        verb = "differs from" if len(self.suspects) == 1 else "differ from"
        return f"{where}: {_ranks(self.suspects)} {verb} {_ranks(others)}"


class ReplicasDiffer(RuntimeError):
    """Ranks that should hold the same piece of a tensor hold different bits."""

    splits: tuple[Split, ...] = ()
    """The pieces, in the order of their names in the state."""

    @classmethod
    def of(cls, splits: Sequence[Split]) -> "ReplicasDiffer":
        """The error with all that is known of it in words."""
        told = "; ".join(split.sentence() for split in splits[:3])
        error = cls(
            f"{len(splits)} replicated pieces differ between ranks, first: {told}. Replicas must hold the same "
            "bits: hardware or a missing reduction; go back to a checkpoint from before"
        )
        error.splits = tuple(splits)
        return error

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks that hold other bits than most, of any piece; where two of two differ, both."""
        return tuple(sorted({rank for split in self.splits for rank in split.suspects}))


@dataclass(frozen=True)
class _Piece:
    """The part of a tensor that this rank holds: a box in the whole, and the sum of its elements' hashes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total: int


def digest_tensors(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """The digest of every tensor by name, the same on every rank and for every sharding.

    Collective over ``group`` (default: all ranks) where torch.distributed is initialised. A plain tensor is taken to be
    replicated, a DTensor to be what its placements say; what several ranks hold counts once. Raises ReplicasDiffer, with
    names and ranks, when it is not the same bits on all of them: the sum alone would hide that.
    """
    local = {name: _local_piece(name, tensor) for name, tensor in tensors.items()}
    if not dist.is_initialized():
        return {name: piece.total for name, piece in local.items() if piece is not None}
    everyone: list[dict[str, _Piece | None]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, local, group=group)
    return _merge(everyone)


def combine(digests: Mapping[str, int]) -> str:
    """One digest for the whole state, 16 hex digits: the sum of its tensors' digests, which already know their names."""
    return f"{sum(digests.values()) % _MODULUS:016x}"


def _merge(everyone: list[dict[str, _Piece | None]]) -> dict[str, int]:
    """Add the pieces of all ranks, each box once, after checking that its holders agree."""
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, list[int]]]] = {}
    for rank, pieces in enumerate(everyone):
        for name, piece in pieces.items():
            seen = boxes.setdefault(name, {})
            if piece is not None:
                seen.setdefault((piece.offsets, piece.sizes), {}).setdefault(piece.total, []).append(rank)
    splits = [
        Split(name, offsets, tuple(sorted(map(tuple, held.values()), key=lambda ranks: (-len(ranks), ranks))))
        for name, seen in boxes.items()
        for (offsets, _), held in seen.items()
        if len(held) > 1
    ]
    if splits:
        raise ReplicasDiffer.of(splits)
    return {name: sum(total for held in seen.values() for total in held) % _MODULUS for name, seen in boxes.items()}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    most = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return f"{', '.join(most)} and {len(ranks) - 8} more"
    return " and ".join(part for part in (", ".join(most[:-1]), most[-1]) if part)


def _local_piece(name: str, tensor: Tensor) -> _Piece | None:
    """This rank's piece; None when the tensor's mesh leaves this rank out."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        offsets = (0,) * len(shape)
        return _Piece(offsets, shape, _hash_box(name, tensor, shape, offsets))
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"{name} has placements {tensor.placements}: a partial sum has no bits of its own yet; reduce it first"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    box = box_of(tensor)
    return _Piece(box.offsets, box.sizes, _hash_box(name, tensor.to_local(), shape, box.offsets))


def _hash_box(name: str, local: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Sum of the hashes of a box ``local`` that starts at ``offsets`` in a tensor of ``shape``.

    The box is taken as rows, stretches that are contiguous in the whole tensor too, and hashed a chunk of rows (or of one
    long row) at a time.
    """
    if local.layout is not torch.strided or local.is_meta:
        raise ValueError(
            f"{name} is {local.layout} on {local.device}: a digest reads the bits of dense tensors in memory"
        )
    if local.numel() == 0:
        return 0
    if local.is_complex():
        local, shape, offsets = torch.view_as_real(local), (*shape, 2), (*offsets, 0)
    sizes = tuple(local.shape)
    cut = next((dim for dim in reversed(range(len(shape))) if sizes[dim] != shape[dim]), 0)
    bits = local.contiguous().view(_BITS[local.itemsize]).reshape(math.prod(sizes[:cut]), -1)
    rows, length = bits.shape
    width, height = min(_CHUNK, length), max(1, _CHUNK // length)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    ramp = torch.arange(1, width + 1, dtype=torch.int64, device=bits.device).mul_(signed(GOLDEN))
    mixed, spare = (torch.empty(min(height, rows) * width, dtype=torch.int64, device=bits.device) for _ in range(2))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for top in range(0, rows, height):
        starts = _row_starts(top, min(top + height, rows), cut, sizes, shape, offsets, bits.device)
        for left in range(0, length, width):
            block = bits[top : top + height, left : left + width]
            first = starts.add(left).mul_(signed(GOLDEN)).add_(signed(key)).unsqueeze(1)
            x, y = (buffer[: block.numel()].view(block.shape) for buffer in (mixed, spare))
            torch.add(first, ramp[: block.shape[1]], out=x)
            total += finalise(x.add_(block), y).sum()
    return int(total.item()) % _MODULUS


def _row_starts(
    top: int,
    bottom: int,
    cut: int,
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Index in the whole tensor of the first element of rows ``top`` to ``bottom`` of a box; rows count its dims before ``cut``."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    rest = torch.arange(top, bottom, dtype=torch.int64, device=device)
    starts = torch.full_like(rest, sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)))
    for dim in reversed(range(cut)):
        starts += (rest % sizes[dim]) * strides[dim]
        rest = rest // sizes[dim]
    return starts


def finalise(x: Tensor, spare: Tensor) -> Tensor:
    """SplitMix64's permutation, in place. int64 shifts copy the sign, so each is masked into a logical one."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        torch.bitwise_right_shift(x, shift, out=spare).bitwise_and_(_LOW[shift])
        x.bitwise_xor_(spare)
        if factor != 1:
            x.mul_(factor)
    return x
