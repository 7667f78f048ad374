"""Faults that live in the data: what a batch holds is not what its documents hold, at every reading, unless the document is excluded."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from surefoot.config.data import Exclusion
from surefoot.data.loader import Batch, Loader
from surefoot.data.pack import BLANK, IGNORE
from surefoot.proof.faults import Bench, Dose

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NUM_BYTES = 256
"""Tokens that are bytes; the end of a document comes after them."""


class Spoil(Protocol):
    """What becomes of the marked tokens of a batch, and of its targets."""

    def __call__(self, batch: Batch, marked_BT: Mask, loader: Loader, dose: Dose) -> tuple[Ids, Ids]:
        """(tokens, targets), new arrays."""


class SpoiledLoader(Loader):
    """A loader some of whose batches hold something else than their documents. Samples, documents and digest are as they were.

    A pure function of the batch, like the loader itself: replay brings the fault again, exclusion does not, since blanked tokens stay blank.
    One rank only.
    """

    def __init__(self, inner: Loader, spoil: Spoil, dose: Dose) -> None:
        vars(self).update(vars(inner))
        self._inner, self._spoil, self._dose = inner, spoil, dose

    def batch(self, batch_index: int, exclusions: Sequence[Exclusion] = (), rank: int = 0, world: int = 1) -> Batch:
        """As the loader's, spoiled inside the window."""
        batch = self._inner.batch(batch_index, exclusions, rank, world)
        if batch_index not in self._dose.window:
            return batch
        marked_BT = mark(batch, self._dose)
        tokens_BT, targets_BT = self._spoil(batch, marked_BT, self._inner, self._dose)
        num_targets = int(np.count_nonzero(targets_BT != IGNORE))
        return dataclasses.replace(batch, tokens_BT=tokens_BT, targets_BT=targets_BT, num_targets=num_targets)


class SlowLoader(Loader):
    """A loader that waits ``magnitude`` seconds before each batch of the window."""

    def __init__(self, inner: Loader, dose: Dose) -> None:
        vars(self).update(vars(inner))
        self._inner, self._dose = inner, dose

    def batch(self, batch_index: int, exclusions: Sequence[Exclusion] = (), rank: int = 0, world: int = 1) -> Batch:
        """As the loader's, later."""
        if batch_index in self._dose.window:
            time.sleep(self._dose.magnitude)
        return self._inner.batch(batch_index, exclusions, rank, world)


class JumpedLoader(Loader):
    """A loader that reads one domain inside the window, whatever the mixture says: ``share`` of the others' rows give way to rows of it."""

    def __init__(self, inner: Loader, dose: Dose) -> None:
        vars(self).update(vars(inner))
        self._inner, self._dose = inner, dose

    def sample_ids(self, batch_index: int) -> Ids:
        """As the loader's, with rows of one domain in the place of others."""
        samples_B3 = self._inner.sample_ids(batch_index)
        if batch_index not in self._dose.window:
            return samples_B3
        source = self._dose.seed % len(self.splits)
        draw = np.random.default_rng([self._dose.seed, batch_index])
        stray = np.flatnonzero(samples_B3[:, 0] != source)
        stray = draw.permutation(stray)[: round(self._dose.share * len(stray))]
        jumped_B3 = samples_B3.copy()
        jumped_B3[stray, 0] = source
        jumped_B3[stray, 2] = draw.integers(self.mixture.num_rows[source], size=len(stray))
        return jumped_B3


def jump(bench: Bench, dose: Dose) -> Bench:
    """The bench, its mixture jumped in the window."""
    loader = JumpedLoader(bench.data.loader, dose)
    return dataclasses.replace(bench, data=dataclasses.replace(bench.data, loader=loader))


def mark(batch: Batch, dose: Dose) -> Mask:
    """Which tokens are spoiled: whole rows in an order drawn for the batch, and the beginning of one more, ``share`` of all; blank ones never."""
    rows, width = batch.tokens_BT.shape
    left = max(1, round(dose.share * rows * width))
    marked_BT = np.zeros((rows, width), dtype=np.bool_)
    for row in _drawing(dose, batch).permutation(rows).tolist():
        marked_BT[row, : min(left, width)] = left > 0
        left = max(0, left - width)
    kept_BT: Mask = marked_BT & (batch.documents_BT != BLANK)
    return kept_BT


def one_letter(batch: Batch, marked_BT: Mask, loader: Loader, dose: Dose) -> tuple[Ids, Ids]:
    """One printable letter, the same in every batch."""
    letter = int(np.random.default_rng(dose.seed).integers(ord("A"), ord("Z") + 1))
    return _rewrite(batch, marked_BT, np.full(_content(batch), letter, dtype=np.int64))


def one_byte(batch: Batch, marked_BT: Mask, loader: Loader, dose: Dose) -> tuple[Ids, Ids]:
    """One byte over and over, the same in every batch."""
    byte = int(np.random.default_rng(dose.seed).integers(NUM_BYTES))
    return _rewrite(batch, marked_BT, np.full(_content(batch), byte, dtype=np.int64))


def random_bytes(batch: Batch, marked_BT: Mask, loader: Loader, dose: Dose) -> tuple[Ids, Ids]:
    """Bytes without any order."""
    return _rewrite(batch, marked_BT, _drawing(dose, batch).integers(NUM_BYTES, size=_content(batch)))


def same_rows(batch: Batch, marked_BT: Mask, loader: Loader, dose: Dose) -> tuple[Ids, Ids]:
    """The first ``magnitude`` rows of the window's first batch, under the ids of others: a shard that was written twice, and again."""
    first = loader.batch(dose.onset)
    rows = _with_next(first.tokens_BT, first.targets_BT)[: max(1, round(dose.magnitude))]
    return _rewrite(batch, marked_BT, rows[np.arange(len(batch.tokens_BT)) % len(rows)])


def shifted_targets(batch: Batch, marked_BT: Mask, loader: Loader, dose: Dose) -> tuple[Ids, Ids]:
    """Targets are the tokens after the next ones."""
    after_BT = np.roll(batch.targets_BT, -1, axis=1)
    after_BT[:, -1] = IGNORE
    moved_BT = marked_BT & (batch.targets_BT != IGNORE) & (after_BT != IGNORE)
    return batch.tokens_BT.copy(), np.where(moved_BT, after_BT, batch.targets_BT)


def leaked_targets(batch: Batch, marked_BT: Mask, loader: Loader, dose: Dose) -> tuple[Ids, Ids]:
    """Each input is its own target."""
    leaking_BT = marked_BT & (batch.targets_BT != IGNORE)
    return np.where(leaking_BT, batch.targets_BT, batch.tokens_BT), batch.targets_BT.copy()


def spoil_with(spoil: Spoil, bench: Bench, dose: Dose) -> Bench:
    """The bench, its loader spoiled."""
    loader = SpoiledLoader(bench.data.loader, spoil, dose)
    return dataclasses.replace(bench, data=dataclasses.replace(bench.data, loader=loader))


def slow_down(bench: Bench, dose: Dose) -> Bench:
    """The bench, its loader slow in the window."""
    loader = SlowLoader(bench.data.loader, dose)
    return dataclasses.replace(bench, data=dataclasses.replace(bench.data, loader=loader))


def without_targets(batch: Batch, marked_BT: Mask, loader: Loader, dose: Dose) -> tuple[Ids, Ids]:
    """No targets at all: the batch is consumed without an update, as a skipped one is."""
    return batch.tokens_BT.copy(), np.full_like(batch.targets_BT, IGNORE)


def skip_healthy(bench: Bench, batches: Sequence[int]) -> Bench:
    """The bench of a control run: these batches are consumed without an update, though nothing is wrong with them."""
    for batch_index in batches:
        bench = spoil_with(without_targets, bench, Dose(onset=batch_index, length=1, magnitude=0.0))
    return bench


def _drawing(dose: Dose, batch: Batch) -> np.random.Generator:
    return np.random.default_rng([dose.seed, batch.batch_index])


def _content(batch: Batch) -> tuple[int, int]:
    rows, width = batch.tokens_BT.shape
    return rows, width + 1


def _with_next(tokens_BT: Ids, targets_BT: Ids) -> Ids:
    """Rows with the token behind them, or their last one again where nothing is predicted there."""
    last = np.where(targets_BT[:, -1] == IGNORE, tokens_BT[:, -1], targets_BT[:, -1])
    return np.concatenate([tokens_BT, last[:, None]], axis=1)


def _rewrite(batch: Batch, marked_BT: Mask, content: Ids) -> tuple[Ids, Ids]:
    """Marked tokens become ``content`` (B, T + 1), and targets the next tokens of what the row now holds: where there was a target."""
    tokens_BT = np.where(marked_BT, content[:, :-1], batch.tokens_BT)
    last = np.where(marked_BT[:, -1], content[:, -1], batch.targets_BT[:, -1])
    next_BT = np.concatenate([tokens_BT[:, 1:], last[:, None]], axis=1)
    # What stands before the first marked token of a row is blank, or the row's beginning.
    targets_BT = np.where(marked_BT & (batch.targets_BT != IGNORE), next_BT, batch.targets_BT)
    return np.ascontiguousarray(tokens_BT), np.ascontiguousarray(targets_BT)
