"""Reading a run's rows back: was every sample consumed exactly once per epoch in the surviving lineage?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from surefoot.config.data import Exclusion
from surefoot.data.loader import Loader

_LISTED = 20  # mistakes of one kind that are spelt out


@dataclass(frozen=True)
class ConsumedBatch:
    """What a run's row says about one batch of the surviving lineage."""

    batch_index: int
    digest: str
    excluded: tuple[str, ...] = ()
    """Documents that were blanked in it."""
    skipped: bool = False
    """Consumed without an update."""


@dataclass(frozen=True)
class SourceAudit:
    """How far one source was read."""

    name: str
    rows_per_epoch: int
    rows_consumed: int

    @property
    def epochs(self) -> float:
        return self.rows_consumed / self.rows_per_epoch


@dataclass(frozen=True)
class AuditReport:
    """The finding, and everything that was left out of training, by name."""

    num_batches: int
    num_samples: int
    sources: tuple[SourceAudit, ...]
    mistakes: tuple[str, ...]
    """Gaps, repeats and digests that do not fit, as sentences."""
    skipped_batches: tuple[int, ...]
    jumped_batches: tuple[int, ...]
    """Batches left out on purpose, by excluding a window."""
    excluded_documents: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.mistakes


def audit(
    consumed: Iterable[ConsumedBatch],
    loader: Loader,
    exclusions: Sequence[Exclusion] = (),
    jumped: Iterable[int] = (),
    first_batch: int = 0,
) -> AuditReport:
    """Recompute the samples of every batch from the config and compare with the rows, in their order.

    ``first_batch`` is where the lineage begins (a fork's first); ``jumped`` are the batches that the ledger left out on
    purpose; any other missing batch is a gap. A sample is repeated when the same (source, epoch, row) comes again,
    whatever its batch, and lost when its source has gone on to a later epoch without it.
    """
    on_purpose = frozenset(jumped)
    mistakes, seen = _Mistakes(), _Seen(loader)
    skipped: list[int] = []
    excluded: set[str] = set()
    expected, num_batches, num_samples = first_batch, 0, 0
    for row in consumed:
        if row.batch_index < expected:
            mistakes.add("repeats", f"batch {row.batch_index} comes again after batch {expected - 1}")
        for missing in range(expected, row.batch_index):
            seen.pass_over(missing)
            if missing not in on_purpose:
                mistakes.add("gaps", f"batch {missing} was never consumed, batch {row.batch_index} comes in its place")
        expected = max(expected, row.batch_index + 1)
        num_batches += 1
        num_samples += _check_batch(row, loader, exclusions, seen, mistakes)
        excluded.update(row.excluded)
        if row.skipped:
            skipped.append(row.batch_index)
    if first_batch == 0:
        seen.check_epochs(mistakes)
    return AuditReport(
        num_batches=num_batches,
        num_samples=num_samples,
        sources=seen.progress(),
        mistakes=mistakes.sentences(),
        skipped_batches=tuple(skipped),
        jumped_batches=tuple(sorted(on_purpose)),
        excluded_documents=tuple(sorted(excluded)),
    )


def _check_batch(
    row: ConsumedBatch, loader: Loader, exclusions: Sequence[Exclusion], seen: "_Seen", mistakes: "_Mistakes"
) -> int:
    """Compare one row with the config; returns its number of samples."""
    samples_B3 = loader.sample_ids(row.batch_index)
    due = loader.digest(samples_B3)
    if row.digest != due:
        mistakes.add("digests", f"batch {row.batch_index} has sample digest {row.digest}, the config gives {due}")
    for source, epoch, number in seen.consume(samples_B3):
        name = loader.data.sources[source].name
        mistakes.add("samples", f"batch {row.batch_index} repeats row {number} of source {name!r} in epoch {epoch}")
    due_excluded = loader.excluded_documents(row.batch_index, exclusions)
    if row.excluded != due_excluded:
        mistakes.add(
            "exclusions",
            f"batch {row.batch_index} blanked {_names(row.excluded)}, the ledger asks for {_names(due_excluded)}",
        )
    return len(samples_B3)


class _Seen:
    """Which rows of each (source, epoch) came by: a bit each."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._bits: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}
        self._consumed = [0] * len(loader.data.sources)

    def consume(self, samples_B3: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Mark the samples; returns those marked before."""
        repeated = []
        for source, epoch, row in samples_B3.tolist():
            num_rows = self._loader.mixture.num_rows[source]
            bits = self._bits.setdefault((source, epoch), np.zeros(-(-num_rows // 8), dtype=np.uint8))
            bit = 1 << (row % 8)
            if bits[row // 8] & bit:
                repeated.append((source, epoch, row))
            bits[row // 8] |= bit
            self._consumed[source] += 1
        return repeated

    def pass_over(self, batch_index: int) -> None:
        """Mark the samples of a batch that was not consumed: it is named on its own, its rows need not be."""
        before = list(self._consumed)
        self.consume(self._loader.sample_ids(batch_index))
        self._consumed = before

    def check_epochs(self, mistakes: "_Mistakes") -> None:
        """Every epoch but the last of each source holds all its rows."""
        for (source, epoch), bits in sorted(self._bits.items()):
            num_rows = self._loader.mixture.num_rows[source]
            came = int(np.unpackbits(bits).sum())
            if (source, epoch + 1) in self._bits and came < num_rows:
                name = self._loader.data.sources[source].name
                mistakes.add("epochs", f"epoch {epoch} of source {name!r} ended with {came} of its {num_rows} rows")

    def progress(self) -> tuple[SourceAudit, ...]:
        names = [source.name for source in self._loader.data.sources]
        return tuple(map(SourceAudit, names, self._loader.mixture.num_rows, self._consumed))


class _Mistakes:
    """Sentences by kind, the first few of each in full."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}
        self._more: dict[str, int] = {}

    def add(self, kind: str, sentence: str) -> None:
        listed = self._kinds.setdefault(kind, [])
        if len(listed) < _LISTED:
            listed.append(sentence)
        else:
            self._more[kind] = self._more.get(kind, 0) + 1

    def sentences(self) -> tuple[str, ...]:
        found = [sentence for listed in self._kinds.values() for sentence in listed]
        return (*found, *(f"and {count} more {kind}" for kind, count in self._more.items()))


def _names(documents: tuple[str, ...]) -> str:
    return ", ".join(documents) or "nothing"
