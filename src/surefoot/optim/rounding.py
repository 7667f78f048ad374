"""Stochastic rounding to bf16: right on average, so that what is too small for one step still adds up over many.

A number between two neighbours in bf16 becomes the upper one as often as it lies towards it: 16 random bits are added to the 16 that
bf16 drops, and what carries over counts (arXiv:1502.02551 section 3). The random bits of an element are a hash of (seed, batch_index,
purpose, name) and of its place in the whole tensor: no generator is read or moved, and no layout changes them.
"""

import hashlib

import torch
from torch import Tensor

from surefoot.parallel.boxes import Box
from surefoot.parallel.digest import GOLDEN, finalise, signed

_LANES = 4
"""Draws of 16 bits in one hash of 64."""
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements rounded at once: what is in flight stays in a core's second-level cache, or fills a GPU; 10 bytes each."""
_INFINITY, _NAN, _SIGN = 0x7F800000, 0x7FC00000, -0x80000000
"""Bits of fp32. What is finite lies below infinity, what is NaN above it; as integers magnitudes keep their order."""


def round_stochastically(
    values: Tensor,
    into: Tensor,
    *,
    seed: int,
    batch_index: int,
    purpose: str,
    name: str,
    box: Box | None = None,
    start: int = 0,
) -> None:
    """Write fp32 ``values`` into bf16 ``into``, of the same shape, each rounded up or down at random and unbiased.

    ``box``: what is held here of the tensor, None where that is all. ``start``: place in it of the first of the values. What bf16 can
    say, zeros, infinities and NaN come out as they are; a finite number beyond the largest of bf16 becomes that one, not infinity.
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
    for at in range(0, bits.numel(), chunk):
        mine = bits[at : at + chunk]
        draws = _draws_in(box, key, start + at, mine.numel(), bits.device)
        magnitude = mine & 0x7FFFFFFF
        # A NaN may have its payload in the bits that go, and would then read as infinity: all become one NaN.
        quiet = magnitude.sub(_INFINITY).neg_().bitwise_right_shift_(31).bitwise_and_(_NAN - _INFINITY)
        magnitude.bitwise_or_(quiet).clamp_max_(_NAN)
        rounded = torch.minimum(draws.add_(magnitude), magnitude.clamp_min_(_INFINITY - 1))
        rounded.bitwise_or_(mine & _SIGN).bitwise_right_shift_(16)
        target[at : at + chunk] = rounded.to(torch.int16)


def _key(seed: int, batch_index: int, purpose: str, name: str) -> int:
    """64 bits of what sets one stream of draws apart from all others."""
    text = f"{seed}/{batch_index}/{purpose}/{name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _draws_in(box: Box | None, key: int, first: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each of ``count`` elements of a box from its element ``first`` on, int32 (count,)."""
    if box is None or box.run == box.numel:
        return _draws(key, first + (box.first if box else 0), count, device)
    # A hash is drawn once for all its elements where the box breaks none apart.
    lanes = _LANES if all(place % _LANES == 0 for place in (box.run, box.whole[-1], box.first)) else 1
    low, high = first // lanes, -(-(first + count) // lanes)
    places = box.places(torch.arange(low * lanes, high * lanes, lanes, dtype=torch.int64, device=device))
    drawn = _hashed(places // _LANES, key).view(torch.int16).view(-1, _LANES)
    if lanes == 1:
        drawn = drawn.gather(1, (places % _LANES)[:, None])
    return drawn.reshape(-1)[first - low * lanes :][:count].to(torch.int32).bitwise_and_(0xFFFF)


def _draws(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """The same of elements from ``first`` on in the whole tensor: element i has lane i mod 4 of hash i div 4."""
    low, high = first // _LANES, -(-(first + count) // _LANES)
    hashes = _hashed(torch.arange(low, high, dtype=torch.int64, device=device), key)
    lanes = hashes.view(torch.int16)[first - low * _LANES :][:count]
    return lanes.to(torch.int32).bitwise_and_(0xFFFF)


def _hashed(numbers: Tensor, key: int) -> Tensor:
    """Hashes of these numbers, in their place in memory."""
    return finalise(numbers.add_(1).mul_(signed(GOLDEN)).add_(signed(key)), torch.empty_like(numbers))
