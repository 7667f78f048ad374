"""Documents cut into rows of ``seq_len`` tokens, and which span of which document a row holds.

Row r of a split is tokens [r T, (r + 1) T) of its stream, with token (r + 1) T as the last target; a last, shorter row is padded.
Every token but the first of the split is so a target once, unless it starts a document.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from surefoot.data.hashing import document_name
from surefoot.data.shards import Split

IGNORE = -100  # a target that is not predicted
BLANK = -1  # document number of blanked and padding tokens


@dataclass(frozen=True)
class RowSpan:
    """A piece of a document inside one row."""

    document: str
    """16 hex digits, its id for life."""
    start: int
    """First token of the piece, counted inside the document."""
    stop: int
    offset: int
    """Token of the row at which the piece starts."""


@dataclass
class Rows:
    """Model inputs of B rows, filled in place."""

    tokens_BT: npt.NDArray[np.int64]
    targets_BT: npt.NDArray[np.int64]
    documents_BT: npt.NDArray[np.int32]
    positions_BT: npt.NDArray[np.int32]


def num_rows(split: Split, seq_len: int) -> int:
    """Rows of a split. A last lone token would predict nothing and makes no row."""
    return max(1, -(-(split.num_tokens - 1) // seq_len))


def row_documents(split: Split, row: int, seq_len: int) -> list[RowSpan]:
    """The spans that a row holds, in order."""
    start, stop = row * seq_len, min((row + 1) * seq_len, split.num_tokens)
    first, starts = split.offsets_at(start, stop)
    ends = [*starts[1:].tolist(), stop]
    return [
        RowSpan(
            document_name(split.document_hash(first + at)),
            max(begin, start) - begin,
            end - begin,
            max(begin, start) - start,
        )
        for at, (begin, end) in enumerate(zip(starts.tolist(), ends, strict=True))
    ]


def rows_of_document(split: Split, document: int, seq_len: int) -> range:
    """The rows that hold a span of a document."""
    start, stop = split.document_span(document)
    last = min((stop - 1) // seq_len, num_rows(split, seq_len) - 1)
    return range(min(start // seq_len, last + 1), last + 1)


def read_rows(sources: list[tuple[Split, int]], seq_len: int, document_mask: bool) -> Rows:
    """Read the given (split, row) pairs.

    documents_BT counts 0, 1, 2.. inside a row. positions_BT restart with each document under ``document_mask`` (also for
    a document begun in an earlier row: its first token here has position 0), else they run across the row.
    """
    num = len(sources)
    tokens_BT = np.empty((num, seq_len), dtype=np.int64)
    targets_BT = np.empty((num, seq_len), dtype=np.int64)
    begins: list[npt.NDArray[np.int64]] = []  # flat index at which each segment (span or padding) begins
    numbers: list[npt.NDArray[np.int32]] = []
    silent: list[npt.NDArray[np.int64]] = []  # flat indices that predict nothing
    ordinals = np.arange(seq_len + 1, dtype=np.int32)
    raw = {split.dtype: np.empty(seq_len + 1, dtype=split.dtype) for split, _ in sources}
    for at, (split, row) in enumerate(sources):
        start, base = row * seq_len, at * seq_len
        held = min(seq_len, split.num_tokens - start)
        _, starts = split.offsets_at(start, start + held + 1)
        buffer = raw[split.dtype]
        with_next = min(held + 1, split.num_tokens - start)
        split.read(start, buffer[:with_next])
        # The documents that begin inside the row or right behind it end their predecessors' predictions.
        inside = starts[1:] - start
        silent.append(inside + (base - 1))
        if len(inside) and inside[-1] == held:
            inside = inside[:-1]
        begin = np.empty(len(inside) + 1, dtype=np.int64)
        begin[0] = base
        begin[1:] = inside
        begin[1:] += base
        begins.append(begin)
        numbers.append(ordinals[: len(begin)])
        if with_next <= seq_len:
            buffer[with_next:] = split.manifest.eos_id
            silent.append(np.arange(base + with_next - 1, base + seq_len))
            if held < seq_len:
                begins.append(np.array([base + held], dtype=np.int64))
                numbers.append(np.array([BLANK], dtype=np.int32))
        tokens_BT[at] = buffer[:-1]
        targets_BT[at] = buffer[1:]
    begin = np.concatenate(begins) if begins else np.empty(0, dtype=np.int64)
    lengths = np.diff(begin, append=num * seq_len)
    documents_BT = np.repeat(np.concatenate(numbers or [ordinals[:0]]), lengths).reshape(num, seq_len)
    if document_mask:
        positions = np.arange(num * seq_len, dtype=np.int32)
        positions -= np.repeat(begin.astype(np.int32), lengths)
        positions_BT = positions.reshape(num, seq_len)
    else:
        positions_BT = np.tile(np.arange(seq_len, dtype=np.int32), (num, 1))
    if silent:
        targets_BT.reshape(-1)[np.concatenate(silent)] = IGNORE
    return Rows(tokens_BT, targets_BT, documents_BT, positions_BT)
