"""Permutations of range(n) that are computed, never stored: a keyed Feistel network with cycle walking."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from surefoot.data.hashing import derive_key, mix64, mix64_array

_ROUNDS = 6  # four make a pseudorandom permutation of large domains (Luby and Rackoff 1988); small ones want more


@dataclass(frozen=True)
class Permutation:
    """A bijection of range(``size``) chosen by ``key``; O(1) memory, both directions.

    The network permutes the smallest 4^k >= size; a value that lands outside walks on along its cycle, at most 4 times on
    average (Black and Rogaway 2002).
    """

    key: int
    size: int

    @cached_property
    def _half(self) -> int:
        return max(1, ((self.size - 1).bit_length() + 1) // 2)

    @cached_property
    def _keys(self) -> list[int]:
        return [derive_key(self.key, turn) for turn in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Where ``index`` goes."""
        value = self._forward(index)
        while value >= self.size:
            value = self._forward(value)
        return value

    def inverse(self, value: int) -> int:
        """What goes to ``value``."""
        index = self._backward(value)
        while index >= self.size:
            index = self._backward(index)
        return index

    def of(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each of ``indices`` goes, all at once."""
        values = self._forward_array(indices.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= np.uint64(self.size))):
            values[outside] = self._forward_array(values[outside])
        return values.astype(np.int64)

    def _forward(self, value: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        left, right = value >> half, value & mask
        for key in self._keys:
            left, right = right, left ^ (mix64(right ^ key) & mask)
        return (left << half) | right

    def _backward(self, value: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        left, right = value >> half, value & mask
        for key in reversed(self._keys):
            left, right = right ^ (mix64(left ^ key) & mask), left
        return (left << half) | right

    def _forward_array(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in self._keys:
            left, right = right, left ^ (mix64_array(right ^ np.uint64(key)) & mask)
        return (left << half) | right


@lru_cache(maxsize=256)
def permutation(size: int, *path: int | str) -> Permutation:
    """The permutation of range(``size``) that belongs to a path of names and numbers."""
    return Permutation(derive_key(*path), size)
