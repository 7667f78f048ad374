"""Which rows were read lately, by what they hold: a shard written twice comes under new sample ids, and is known by its tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from surefoot.config.data import Exclusion
from surefoot.data.hashing import derive_key, mix64_array
from surefoot.data.loader import Batch, Loader
from surefoot.data.pack import BLANK
from surefoot.parallel.mesh import World
from surefoot.parallel.reduce import gather_over_ranks

LOOK_BACK = 64
"""Batches before this one whose rows are remembered,"""
MOST_ROWS = 16_384
"""or as many as hold so many rows: a resume reads them again once, within 10 s on one rank (half a millisecond for 1,024 tokens); of larger batches the one before always counts."""
ROW_BITS = 40
"""Of a sample's number, for its row; the source stands above them."""

Words = npt.NDArray[np.uint64]


@dataclass
class RowMemory:
    """Hashes and samples of the rows of the batches before this one. A pure function of (loader, exclusions, batch_index).

    What is missing (after a resume, a jump or a change of exclusions) is read again through the loader.
    """

    read: dict[int, tuple[Words, Words]] = field(default_factory=dict)
    """(hashes, samples) of whole batches, all ranks; rows that do not count are left out."""
    exclusions: tuple[Exclusion, ...] = ()
    """Those under which they were read."""

    def duplicated(self, batch: Batch, loader: Loader, exclusions: Sequence[Exclusion], world: World) -> float:
        """Share of the batch's rows whose tokens also stand in another row of it or of the batches before, an epoch's repeat aside.

        The same number on every rank. Remembers the batch. Collective.
        """
        if changed := set(self.exclusions) ^ set(exclusions):
            since = min(exclusion.from_batch for exclusion in changed)
            self.read = {index: entry for index, entry in self.read.items() if index < since}
            self.exclusions = tuple(exclusions)
        now = batch.batch_index
        before = range(oldest(now, loader), now)
        self.read = {
            index: self.read.get(index)
            or entries(loader.batch(index, exclusions, world.data_rank, world.data_size), world)
            for index in before
        }
        self.read[now] = entries(batch, world)
        hashes = np.concatenate([entry[0] for entry in self.read.values()])
        samples = np.concatenate([entry[1] for entry in self.read.values()])
        new = len(self.read[now][0])
        return int(np.count_nonzero(shared(hashes, samples)[len(hashes) - new :])) / len(batch.samples_B3)


def oldest(batch_index: int, loader: Loader) -> int:
    """The first batch that is remembered when this one comes."""
    end, _ = loader.batch_starts.rows_of(batch_index)
    first = max(0, batch_index - LOOK_BACK)
    while first < batch_index - 1 and end - loader.batch_starts.rows_of(first)[0] > MOST_ROWS:
        first += 1
    return first


def entries(batch: Batch, world: World) -> tuple[Words, Words]:
    """(hashes, samples) of the rows of the whole batch that count, in its order: not those mostly blank, nor one token over and over. Collective."""
    mine = row_hashes(batch.tokens_BT)
    blank_B = np.count_nonzero(batch.documents_BT == BLANK, axis=1) * 2 > batch.documents_BT.shape[1]
    plain_B = (batch.tokens_BT == batch.tokens_BT[:, :1]).all(axis=1)
    mine[blank_B | plain_B] = 0
    samples = (batch.samples_B3[:, 0] << ROW_BITS | batch.samples_B3[:, 2]).astype(np.uint64)
    everyone = mine if world.data_size == 1 else _over_ranks(mine, len(samples), world)
    counts_B = everyone != 0
    return everyone[counts_B], samples[counts_B]


def row_hashes(tokens_BT: npt.NDArray[np.int64]) -> Words:
    """64 bits per row, 0 aside: a sum of its tokens times odd multipliers drawn for their places, mixed."""
    sums = (tokens_BT.astype(np.uint64) * _multipliers(tokens_BT.shape[1])).sum(axis=1, dtype=np.uint64)
    return np.maximum(mix64_array(sums), np.uint64(1))


def shared(hashes: Words, samples: Words) -> npt.NDArray[np.bool_]:
    """For each row, whether one of another sample has the same hash."""
    if len(hashes) == 0:
        return np.zeros(0, dtype=np.bool_)
    order = np.argsort(hashes, kind="stable")
    first = np.concatenate([[True], np.diff(hashes[order]) != 0])
    starts = np.flatnonzero(first)
    differ = np.minimum.reduceat(samples[order], starts) != np.maximum.reduceat(samples[order], starts)
    found = np.empty(len(hashes), dtype=np.bool_)
    found[order] = differ[np.cumsum(first) - 1]
    return found


@lru_cache(maxsize=4)
def _multipliers(width: int) -> Words:
    counter = np.arange(width, dtype=np.uint64) + np.uint64(derive_key("row memory"))
    odd: Words = mix64_array(counter) | np.uint64(1)
    odd.setflags(write=False)
    return odd


def _over_ranks(mine: Words, num_rows: int, world: World) -> Words:
    """The hashes of all ranks, in the order of the rows: as two halves of 32 bits, which fp64 holds exactly."""
    parts = world.data_size
    most = -(-num_rows // parts)
    halves = np.zeros((2, most))
    halves[0, : len(mine)] = mine >> np.uint64(32)
    halves[1, : len(mine)] = mine & np.uint64(0xFFFFFFFF)
    told = gather_over_ranks(halves.ravel().tolist(), world)[list(world.layout.row_ranks)]
    gathered = told.cpu().numpy().astype(np.uint64)
    whole = gathered[:, :most] << np.uint64(32) | gathered[:, most:]
    ends = [part * num_rows // parts for part in range(parts + 1)]
    return np.concatenate([whole[part, : ends[part + 1] - ends[part]] for part in range(parts)])
