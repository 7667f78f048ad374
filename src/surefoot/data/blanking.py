"""Exclusion: a document's spans are blanked, and nothing else moves.

Its ids become the end-of-document id, its targets are ignored, its document number is BLANK. Where documents may attend to
each other (no ``document_mask``), every row that holds a span of it goes as a whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.config.data import Exclusion
from surefoot.data.errors import DataError
from surefoot.data.pack import BLANK, IGNORE, Rows
from surefoot.data.shards import Split

_DOCUMENT = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class _Intervals:
    """Excluded documents of one source: disjoint token intervals in order, the batch each applies from, their names."""

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    from_batches: npt.NDArray[np.int64]
    names: tuple[str, ...]

    def active(self, batch_index: int) -> "_Intervals":
        keep = np.flatnonzero(self.from_batches <= batch_index)
        names = tuple(self.names[at] for at in keep)
        return _Intervals(self.starts[keep], self.stops[keep], self.from_batches[keep], names)


def find_document(splits: Sequence[Split], document: str) -> list[tuple[int, int]]:
    """(source, document number) of every copy; DataError when no source holds it."""
    if not _DOCUMENT.fullmatch(document):
        raise DataError(
            f"document {document!r}: a document is named by 16 hex digits, as `surefoot data inspect` prints"
        )
    number = int(document, 16)
    found = [(source, at) for source, split in enumerate(splits) for at in split.find_document(number)]
    if not found:
        folders = ", ".join(str(split.folder) for split in splits)
        raise DataError(
            f"excluded document {document}: in no training split ({folders}), so the exclusion has no effect; remove it, or "
            "give the name as `surefoot data inspect` prints it"
        )
    return found


class Blanking:
    """A set of exclusions, located in the splits; applying it costs a few searches per batch."""

    def __init__(
        self, splits: Sequence[Split], exclusions: Sequence[Exclusion], seq_len: int, document_mask: bool
    ) -> None:
        self._seq_len, self._document_mask = seq_len, document_mask
        earliest: dict[str, int] = {}
        for exclusion in exclusions:
            known = earliest.get(exclusion.document, exclusion.from_batch)
            earliest[exclusion.document] = min(known, exclusion.from_batch)
        per_source: dict[int, list[tuple[int, int, int, str]]] = {}
        for document, from_batch in earliest.items():
            for source, at in find_document(splits, document):
                per_source.setdefault(source, []).append((*splits[source].document_span(at), from_batch, document))
        self._intervals = {source: _intervals(spans) for source, spans in per_source.items()}
        self._num_tokens = [split.num_tokens for split in splits]

    def documents_in(self, batch_index: int, samples_B3: npt.NDArray[np.int64]) -> tuple[str, ...]:
        """Names of the excluded documents with a span in these rows, sorted."""
        names: set[str] = set()
        for _, intervals, low, high in self._hits(batch_index, samples_B3):
            names.update(intervals.names[low:high])
        return tuple(sorted(names))

    def apply(self, batch_index: int, samples_B3: npt.NDArray[np.int64], rows: Rows, eos_id: int) -> int:
        """Blank the rows in place; returns how many real tokens went (padding does not count)."""
        num_tokens = 0
        for at, intervals, low, high in self._hits(batch_index, samples_B3):
            source, _, row = samples_B3[at]
            start = int(row) * self._seq_len
            held = min(self._seq_len, self._num_tokens[source] - start)
            pieces = [(0, held)]
            if self._document_mask:
                begins = np.maximum(intervals.starts[low:high] - start, 0)
                ends = np.minimum(intervals.stops[low:high] - start, held)
                pieces = list(zip(begins.tolist(), ends.tolist(), strict=True))
            for begin, end in pieces:
                rows.tokens_BT[at, begin:end] = eos_id
                rows.targets_BT[at, begin:end] = IGNORE
                rows.documents_BT[at, begin:end] = BLANK
                num_tokens += end - begin
        return num_tokens

    def _hits(self, batch_index: int, samples_B3: npt.NDArray[np.int64]) -> list[tuple[int, _Intervals, int, int]]:
        """(row of the batch, intervals of its source, first and past-last interval that it meets)."""
        hits = []
        for source, all_intervals in self._intervals.items():
            intervals = all_intervals.active(batch_index)
            mine = np.flatnonzero(samples_B3[:, 0] == source)
            starts = samples_B3[mine, 2] * self._seq_len
            low = np.searchsorted(intervals.stops, starts, side="right")
            high = np.searchsorted(intervals.starts, starts + self._seq_len, side="left")
            hits += [(int(mine[at]), intervals, int(low[at]), int(high[at])) for at in np.flatnonzero(high > low)]
        return hits


def _intervals(spans: list[tuple[int, int, int, str]]) -> _Intervals:
    spans = sorted(spans)
    columns: list[Any] = list(zip(*spans, strict=True))
    starts, stops, from_batches = (np.array(column, dtype=np.int64) for column in columns[:3])
    return _Intervals(starts, stops, from_batches, tuple(columns[3]))
