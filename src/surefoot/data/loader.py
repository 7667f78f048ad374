"""Batches: a pure function of (config, prepared data, seed, batch_index, exclusions), the same for any number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from surefoot.config.data import DataConfig, Exclusion
from surefoot.data.blanking import Blanking, find_document
from surefoot.data.errors import DataError
from surefoot.data.hashing import digest_of_array
from surefoot.data.mixture import BatchStarts, Mixture
from surefoot.data.pack import IGNORE, Rows, RowSpan, num_rows, read_rows, row_documents, rows_of_document
from surefoot.data.prepared import PreparedData
from surefoot.data.repetition import mask_repetition
from surefoot.data.shards import REBUILD, TOKENS, Split
from surefoot.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a batch, C-contiguous, and what identifies the whole batch."""

    batch_index: int
    tokens_BT: npt.NDArray[np.int64]
    targets_BT: npt.NDArray[np.int64]
    """The next token; IGNORE where nothing is predicted: at the end of a document, when blanked, in padding."""
    documents_BT: npt.NDArray[np.int32]
    """0, 1, 2.. inside the row; BLANK where blanked or padding."""
    positions_BT: npt.NDArray[np.int32]
    """Restart with each document under ``document_mask``, else run across the row."""
    samples_B3: npt.NDArray[np.int64]
    """(source, epoch, row) of every row of the whole batch, all ranks."""
    digest: str
    """16 hex digits over samples_B3."""
    num_targets: int
    """Predicted tokens of this rank."""
    num_excluded: int
    """Tokens of this rank blanked by exclusion; padding does not count."""
    excluded: tuple[str, ...]
    """Documents blanked in the whole batch, sorted."""
    num_masked: int = 0
    """Tokens of this rank blanked because they repeat themselves (``data.repetition``), exclusions aside."""
    duplicated: float = 0.0
    """Share of the whole batch's rows that were read lately under another name; filled in by the loop, which remembers them."""


class Loader:
    """The training side of prepared data, open for batches in any order."""

    def __init__(self, data: DataConfig, prepared: PreparedData, seed: int) -> None:
        self.data, self.prepared, self.seed = data, prepared, seed
        self.splits = tuple(Split.open(source.train) for source in prepared.sources)
        _check_lengths(data, prepared, self.splits)
        self.mixture = Mixture(data, [num_rows(split, data.seq_len) for split in self.splits], seed)
        self.batch_starts = BatchStarts(data)
        self._blanking = lru_cache(maxsize=4)(self._locate)
        self._blanking(data.exclude)

    def batch(self, batch_index: int, exclusions: Sequence[Exclusion] = (), rank: int = 0, world: int = 1) -> Batch:
        """Batch number ``batch_index``; rank r of w gets the r-th contiguous part of its rows.

        ``exclusions`` (the ledger's) add to ``data.exclude``. DataError for a token beyond the vocabulary or a file that
        was cut short.
        """
        samples_B3 = self.sample_ids(batch_index)
        num = len(samples_B3)
        mine_B3 = samples_B3[rank * num // world : (rank + 1) * num // world]
        rows = read_rows(
            [(self.splits[source], row) for source, _, row in mine_B3.tolist()],
            self.data.seq_len,
            self.data.document_mask,
        )
        num_excluded = 0
        if active := (*self.data.exclude, *exclusions):
            num_excluded = self._blanking(active).apply(batch_index, mine_B3, rows, self.prepared.eos_id)
        num_masked = mask_repetition(
            rows, self.data.repetition, document_mask=self.data.document_mask, eos_id=self.prepared.eos_id
        )
        excluded = self.excluded_documents(batch_index, exclusions)
        _check_vocabulary(rows, mine_B3, self.splits, self.prepared.vocab_size)
        return _batch(batch_index, rows, samples_B3, num_excluded, excluded, num_masked)

    def sample_ids(self, batch_index: int) -> npt.NDArray[np.int64]:
        """(source, epoch, row) of the whole batch, shape (B, 3)."""
        return self.mixture.samples(*self.batch_starts.rows_of(batch_index))

    def excluded_documents(self, batch_index: int, exclusions: Sequence[Exclusion] = ()) -> tuple[str, ...]:
        """Names of the documents that ``batch`` blanks under these exclusions, sorted; no tokens are read."""
        active = (*self.data.exclude, *exclusions)
        return self._blanking(active).documents_in(batch_index, self.sample_ids(batch_index)) if active else ()

    def digest(self, samples_B3: npt.NDArray[np.int64]) -> str:
        """16 hex digits that identify the samples of a batch and their order."""
        return digest_of_array(samples_B3)

    def row_documents(self, source: int, row: int) -> list[RowSpan]:
        """Which spans of which documents a row holds."""
        return row_documents(self.splits[source], row, self.data.seq_len)

    def first_batch_with(self, document: str) -> int:
        """The first batch that holds a span of the document."""
        first = min(
            self.mixture.global_row(source, 0, row)
            for source, at in find_document(self.splits, document)
            for row in rows_of_document(self.splits[source], at, self.data.seq_len)
        )
        return self.batch_starts.batch_of(first)

    def spans_read_before(self, document: str, batch_index: int) -> int:
        """How many spans of the document the batches before this one read, repeats over epochs included."""
        limit, _ = self.batch_starts.rows_of(batch_index)
        read = 0
        for source, at in find_document(self.splits, document):
            # The rows of a source come epoch after epoch, so all epochs but the last begun one are through.
            epochs, begun = divmod(self.mixture.rows_before(source, limit), self.mixture.num_rows[source])
            rows = rows_of_document(self.splits[source], at, self.data.seq_len)
            read += epochs * len(rows)
            if begun:
                read += sum(self.mixture.global_row(source, epochs, row) < limit for row in rows)
        return read

    def holds(self, document: str) -> bool:
        """Whether a training split holds the document (16 hex digits)."""
        return any(split.find_document(int(document, 16)) for split in self.splits)

    def _locate(self, exclusions: tuple[Exclusion, ...]) -> Blanking:
        return Blanking(self.splits, exclusions, self.data.seq_len, self.data.document_mask)


@dataclass(frozen=True)
class EvalBatch:
    """Held-out rows with the bytes of text that they account for."""

    batch: Batch
    text_bytes_B: npt.NDArray[np.int64]
    """UTF-8 bytes of each row's text: of its predicted targets and of the first tokens of its documents."""
    predicted_bytes_B: npt.NDArray[np.int64]
    """Bytes of the predicted targets alone."""
    first_tokens_B: npt.NDArray[np.int64]
    """Tokens that begin a document in the row, which nothing predicts; a full code charges ln(vocab_size) for each."""


class EvalRows:
    """The held-out side of one source, in order. Over all rows every token is predicted once, or begins a document."""

    def __init__(self, data: DataConfig, prepared: PreparedData, source: int) -> None:
        self.source = source
        self.name = prepared.sources[source].name
        self.split = Split.open(Path(prepared.sources[source].val))
        self.vocab_size = prepared.vocab_size
        self._data = data
        self._num_bytes_V = load_tokenizer(data.tokenizer, prepared.tokenizer_path).token_num_bytes()

    @property
    def num_rows(self) -> int:
        return num_rows(self.split, self._data.seq_len)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all held-out text, exact (from the manifest)."""
        return self.split.manifest.num_bytes

    @property
    def num_documents(self) -> int:
        return self.split.num_documents

    def rows(self, start: int, stop: int) -> EvalBatch:
        """Rows [start, stop) of the split, fewer at its end."""
        return self.take(np.arange(start, min(stop, self.num_rows), dtype=np.int64))

    def spread(self, count: int) -> npt.NDArray[np.int64]:
        """Numbers of ``count`` rows at even distances over the split (0, or more than there are: all): a fair sample of its documents."""
        if count <= 0 or count >= self.num_rows:
            return np.arange(self.num_rows, dtype=np.int64)
        return np.arange(count, dtype=np.int64) * self.num_rows // count

    def take(self, numbers: npt.NDArray[np.int64]) -> EvalBatch:
        """The rows of these numbers."""
        samples_B3 = np.zeros((len(numbers), 3), dtype=np.int64)
        samples_B3[:, 0] = self.source
        samples_B3[:, 2] = numbers
        seq_len = self._data.seq_len
        rows = read_rows([(self.split, row) for row in numbers.tolist()], seq_len, self._data.document_mask)
        _check_vocabulary(rows, samples_B3, {self.source: self.split}, self.vocab_size)
        predicted = np.where(
            rows.targets_BT != IGNORE, self._num_bytes_V[rows.targets_BT * (rows.targets_BT != IGNORE)], 0
        )
        predicted_bytes_B = predicted.sum(axis=1, dtype=np.int64)
        first_tokens_B = np.zeros(len(numbers), dtype=np.int64)
        first_bytes_B = np.zeros(len(numbers), dtype=np.int64)
        for at, row in enumerate(numbers.tolist()):
            _, starts = self.split.offsets_at(row * seq_len, min((row + 1) * seq_len, self.split.num_tokens))
            inside = starts[starts >= row * seq_len] - row * seq_len
            first_tokens_B[at] = len(inside)
            first_bytes_B[at] = self._num_bytes_V[rows.tokens_BT[at, inside]].sum()
        batch = _batch(-1, rows, samples_B3)
        return EvalBatch(batch, predicted_bytes_B + first_bytes_B, predicted_bytes_B, first_tokens_B)


def _batch(
    batch_index: int,
    rows: Rows,
    samples_B3: npt.NDArray[np.int64],
    num_excluded: int = 0,
    excluded: tuple[str, ...] = (),
    num_masked: int = 0,
) -> Batch:
    return Batch(
        batch_index=batch_index,
        tokens_BT=rows.tokens_BT,
        targets_BT=rows.targets_BT,
        documents_BT=rows.documents_BT,
        positions_BT=rows.positions_BT,
        samples_B3=samples_B3,
        digest=digest_of_array(samples_B3),
        num_targets=int(np.count_nonzero(rows.targets_BT != IGNORE)),
        num_excluded=num_excluded,
        excluded=excluded,
        num_masked=num_masked,
    )


def _check_lengths(data: DataConfig, prepared: PreparedData, splits: Sequence[Split]) -> None:
    if data.seq_len < 1:
        raise DataError(f"data.seq_len={data.seq_len}: must be at least 1 token")
    if len(splits) != len(data.sources):
        raise DataError(
            f"{len(splits)} prepared sources for {len(data.sources)} in data.sources; prepare the data again"
        )
    for source, split in zip(prepared.sources, splits, strict=True):
        if split.num_tokens <= data.seq_len:
            raise DataError(
                f"{split.folder / TOKENS}: source {source.name!r} has {split.num_tokens} training tokens, too few for one "
                f"row of data.seq_len={data.seq_len} and its last target; lower data.seq_len to "
                f"{max(1, split.num_tokens - 1)} or add documents"
            )


def _check_vocabulary(
    rows: Rows, samples_B3: npt.NDArray[np.int64], splits: Sequence[Split] | dict[int, Split], vocab_size: int
) -> None:
    """Every id that survived blanking is below the vocabulary; a target is a token of its row, or the one behind it."""
    # As unsigned numbers negative ids are large ones.
    if rows.tokens_BT.size == 0:
        return
    last_B = np.where(rows.targets_BT[:, -1] == IGNORE, 0, rows.targets_BT[:, -1])
    if rows.tokens_BT.view(np.uint64).max() < vocab_size and last_B.view(np.uint64).max() < vocab_size:
        return
    ids = np.column_stack([rows.tokens_BT, last_B])
    at, column = (int(x) for x in np.argwhere((ids < 0) | (ids >= vocab_size))[0])
    source, _, row = (int(x) for x in samples_B3[at])
    split = splits[source]
    offset = (row * rows.tokens_BT.shape[1] + column) * split.dtype.itemsize
    raise DataError(
        f"{split.folder / TOKENS}: id {ids[at, column]} at byte offset {offset} is beyond the vocabulary of {vocab_size}. {REBUILD}"
    )
