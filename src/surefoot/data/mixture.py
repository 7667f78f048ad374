"""Which row comes when: a pure function of (weights, row counts, seed, row number), O(1) to seek.

Global row n lies in block n // 1024. Each block holds every source in its exact share (largest remainder); a Feistel
permutation keyed by (seed, block) shuffles the shares inside it. The rows of one source are thereby numbered on for ever;
number j is epoch j // R, and row Feistel(seed, source, epoch)(j % R) of the R it has.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from surefoot.config.data import DataConfig
from surefoot.data.errors import DataError
from surefoot.data.permutation import permutation

BLOCK = 1024  # rows in which the shares of the sources are exact


def counts_per_block(weights: Sequence[float], names: Sequence[str], where: str = "data.sources") -> list[int]:
    """Rows of each source in a block of 1024, by largest remainder; ties go to the earlier source.

    DataError for a weight that is not above 0 or that gives a source no row at all.
    """
    for name, weight in zip(names, weights, strict=True):
        if not weight > 0 or weight == float("inf"):
            raise DataError(f"{where}[{name}]: weight {weight} must be above 0 and finite; remove the source instead")
    total = sum(weights)
    exact = [BLOCK * weight / total for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: (counts[at] - exact[at], at))
    for at in by_remainder[: BLOCK - sum(counts)]:
        counts[at] += 1
    for name, weight, share, count in zip(names, weights, exact, counts, strict=True):
        if count == 0:
            raise DataError(
                f"{where}[{name}]: weight {weight} of {total:g} is {share:.3f} rows in a block of {BLOCK}, so the source "
                f"would never be read; raise it to {total / BLOCK:.3g} or more, or remove the source"
            )
    return counts


class Mixture:
    """The order of the rows of all sources under the stages of a config."""

    def __init__(self, data: DataConfig, num_rows: Sequence[int], seed: int) -> None:
        self.num_rows = tuple(num_rows)
        self.seed = seed
        names = [source.name for source in data.sources]
        first = counts_per_block([source.weight for source in data.sources], names)
        self._first_blocks = [0]
        self._counts = [np.array(first, dtype=np.int64)]
        for at, stage in enumerate(data.mixture_stages):
            where = f"data.mixture_stages[{at}]"
            if len(stage.weights) != len(names):
                raise DataError(f"{where}: {len(stage.weights)} weights for {len(names)} sources ({', '.join(names)})")
            block = -(-stage.start_row // BLOCK)
            if block <= self._first_blocks[-1]:
                raise DataError(
                    f"{where}.start_row={stage.start_row}: starts with block {block} of {BLOCK} rows, the stage before with "
                    f"block {self._first_blocks[-1]}; stages must start in later blocks, in order"
                )
            self._first_blocks.append(block)
            self._counts.append(np.array(counts_per_block(stage.weights, names, f"{where}.weights"), dtype=np.int64))
        # Rows of each source before each stage.
        self._before = [np.zeros(len(names), dtype=np.int64)]
        for (start, stop), counts in zip(pairwise(self._first_blocks), self._counts, strict=False):
            self._before.append(self._before[-1] + (stop - start) * counts)
        self._block = lru_cache(maxsize=8)(self._compute_block)

    def samples(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """(source, epoch, row) of the global rows [start, stop), shape (stop - start, 3)."""
        blocks = range(start // BLOCK, (stop - 1) // BLOCK + 1)
        parts = [self._block(block)[max(start - block * BLOCK, 0) : stop - block * BLOCK] for block in blocks]
        return np.concatenate(parts) if parts else np.empty((0, 3), dtype=np.int64)

    def global_row(self, source: int, epoch: int, row: int) -> int:
        """The one global row at which this sample comes: the inverse of ``samples``."""
        num_rows = self.num_rows[source]
        number = epoch * num_rows + permutation(num_rows, "rows", self.seed, source, epoch).inverse(row)
        stage = bisect_right([int(before[source]) for before in self._before], number) - 1
        block, rank = divmod(number - int(self._before[stage][source]), int(self._counts[stage][source]))
        block += self._first_blocks[stage]
        slots = np.flatnonzero(self._block(block)[:, 0] == source)
        return block * BLOCK + int(slots[rank])

    def rows_before(self, source: int, global_row: int) -> int:
        """Rows of a source among the global rows before this one, over all epochs."""
        block = global_row // BLOCK
        stage = bisect_right(self._first_blocks, block) - 1
        before = int(self._before[stage][source] + (block - self._first_blocks[stage]) * self._counts[stage][source])
        inside = self._block(block)[: global_row - block * BLOCK, 0] == source
        return before + int(np.count_nonzero(inside))

    def _compute_block(self, block: int) -> npt.NDArray[np.int64]:
        stage = bisect_right(self._first_blocks, block) - 1
        counts = self._counts[stage]
        slots = permutation(BLOCK, "block", self.seed, block).of(np.arange(BLOCK))
        sources = np.searchsorted(np.cumsum(counts), slots, side="right")
        samples = np.empty((BLOCK, 3), dtype=np.int64)
        samples[:, 0] = sources
        for source, num_rows in enumerate(self.num_rows):
            mine = np.flatnonzero(sources == source)
            first = self._before[stage][source] + (block - self._first_blocks[stage]) * counts[source]
            epochs, ordinals = np.divmod(first + np.arange(len(mine)), num_rows)
            samples[mine, 1] = epochs
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                order = permutation(num_rows, "rows", self.seed, source, int(epoch))
                samples[mine[chosen], 2] = order.of(ordinals[chosen])
        samples.setflags(write=False)
        return samples


class BatchStarts:
    """Where batch number i starts among the global rows: prefix sums over the stages of the batch size."""

    def __init__(self, data: DataConfig) -> None:
        self._first_batches, self._sizes, self._first_rows = [0], [data.batch_size], [0]
        if data.batch_size < 1:
            raise DataError(f"data.batch_size={data.batch_size}: must be at least 1 row")
        for at, stage in enumerate(data.batch_stages):
            where = f"data.batch_stages[{at}]"
            if stage.batch_size < 1:
                raise DataError(f"{where}.batch_size={stage.batch_size}: must be at least 1 row")
            if stage.start_batch <= self._first_batches[-1]:
                raise DataError(
                    f"{where}.start_batch={stage.start_batch}: must be above {self._first_batches[-1]}, where the stage "
                    "before starts"
                )
            num_batches = stage.start_batch - self._first_batches[-1]
            self._first_rows.append(self._first_rows[-1] + num_batches * self._sizes[-1])
            self._first_batches.append(stage.start_batch)
            self._sizes.append(stage.batch_size)

    def rows_of(self, batch_index: int) -> tuple[int, int]:
        """First global row of the batch, and the one after its last."""
        if batch_index < 0:
            raise ValueError(f"batch_index={batch_index}: must be 0 or more")
        stage = bisect_right(self._first_batches, batch_index) - 1
        start = self._first_rows[stage] + (batch_index - self._first_batches[stage]) * self._sizes[stage]
        return start, start + self._sizes[stage]

    def batch_of(self, global_row: int) -> int:
        """The batch that holds a global row."""
        stage = bisect_right(self._first_rows, global_row) - 1
        return self._first_batches[stage] + (global_row - self._first_rows[stage]) // self._sizes[stage]
