"""Stochastic rounding to bf16: right on average, so that what is too small for one step still adds up over many.

A number between two neighbours in bf16 becomes the upper one as often as it lies towards it: 16 random bits are added to the 16 that
bf16 drops, and what carries over counts (arXiv:1502.02551 section 3). The random bits of an element are a hash of (seed, batch_index,
purpose, name) and of its place in the whole tensor: no generator is read or moved, and no layout changes them.
"""

import hashlib

import torch
from torch import Tensor

from surefoot.parallel.digest import GOLDEN, finalise, signed

_LANES = 4
"""Draws of 16 bits in one hash of 64."""
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements rounded at once: what is in flight stays in a core's second-level cache, or fills a GPU; 10 bytes each."""
_INFINITY, _NAN, _SIGN = 0x7F800000, 0x7FC00000, -0x80000000
"""Bits of fp32. What is finite lies below infinity, what is NaN above it; as integers magnitudes keep their order."""


def round_stochastically(
    values: Tensor, into: Tensor, *, seed: int, batch_index: int, purpose: str, name: str, first: int = 0
) -> None:
    """Write fp32 ``values`` into bf16 ``into``, of the same shape, each rounded up or down at random and unbiased.

    ``first``: index in the whole tensor of the first element held here (``parallel.shard.elements_before``). What bf16 can say, zeros,
    infinities and NaN come out as they are; a finite number beyond the largest of bf16 becomes that one, not infinity.
    Raises ValueError for other dtypes, and where ``into`` is not contiguous.
    """
    if values.dtype != torch.float32 or into.dtype != torch.bfloat16 or values.shape != into.shape:
        raise ValueError(
            f"stochastic rounding takes fp32 to bf16 of the same shape, not {values.dtype} {tuple(values.shape)} to "
            f"{into.dtype} {tuple(into.shape)}"
        )
    bits, target = values.detach().contiguous().view(torch.int32).view(-1), into.detach().view(torch.int16).view(-1)
    key = _key(seed, batch_index, purpose, name)
    chunk = _CHUNK.get(bits.device.type, _CHUNK["cpu"])
    for start in range(0, bits.numel(), chunk):
        mine = bits[start : start + chunk]
        draws = _draws(key, first + start, mine.numel(), bits.device)
        magnitude = mine & 0x7FFFFFFF
        # A NaN may have its payload in the bits that go, and would then read as infinity: all become one NaN.
        quiet = magnitude.sub(_INFINITY).neg_().bitwise_right_shift_(31).bitwise_and_(_NAN - _INFINITY)
        magnitude.bitwise_or_(quiet).clamp_max_(_NAN)
        rounded = torch.minimum(draws.add_(magnitude), magnitude.clamp_min_(_INFINITY - 1))
        rounded.bitwise_or_(mine & _SIGN).bitwise_right_shift_(16)
        target[start : start + chunk] = rounded.to(torch.int16)


def _key(seed: int, batch_index: int, purpose: str, name: str) -> int:
    """64 bits of what sets one stream of draws apart from all others."""
    text = f"{seed}/{batch_index}/{purpose}/{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _draws(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each of ``count`` elements from ``first`` on, int32 (count,): element i has lane i mod 4 of hash i div 4."""
    low, high = first // _LANES, -(-(first + count) // _LANES)
    hashes = torch.arange(low + 1, high + 1, dtype=torch.int64, device=device)
    finalise(hashes.mul_(signed(GOLDEN)).add_(signed(key)), torch.empty_like(hashes))
    lanes = hashes.view(torch.int16)[first - low * _LANES :][:count]
    return lanes.to(torch.int32).bitwise_and_(0xFFFF)
