"""Writing a split folder: files first, hashed as they are written; the manifest last."""

import hashlib
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from surefoot.data.errors import DataError
from surefoot.data.shards import DTYPES, HEADER, IDS, INDEX, MAGIC, MANIFEST, TOKENS, UINT16_IDS, Manifest

_MAX_DOCUMENT = 2**31 - 1  # Megatron's index holds lengths as int32
_IDX_BATCH = 1 << 16


class SplitWriter:
    """Appends documents to a new split folder; leaving the ``with`` block without an error seals it."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_id: int, tokenizer_fingerprint: str) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.dtype = np.dtype("<u2") if vocab_size < UINT16_IDS else np.dtype("<i4")
        self._vocab_size, self._eos_id, self._fingerprint = vocab_size, eos_id, tokenizer_fingerprint
        self._lengths, self._ids = array("i"), array("Q")
        self._num_bytes = 0
        self.dropped_duplicates = 0
        self._tokens = _HashedFile(folder / TOKENS)

    def add(self, token_ids: npt.ArrayLike, document_id: int, num_bytes: int, name: str) -> None:
        """Append one document; the end-of-document id is added here.

        DataError, naming the document, if it is empty, too long, holds an id beyond the vocabulary or the end itself.
        """
        ids = np.append(np.asarray(token_ids, dtype=np.int64), self._eos_id)
        if len(ids) == 1:
            raise DataError(f"{name}: an empty document; remove it from the source")
        if len(ids) > _MAX_DOCUMENT:
            raise DataError(
                f"{name}: {len(ids)} tokens, and a document may have {_MAX_DOCUMENT}; cut the file in parts"
            )
        self._check_ids(ids, name)
        self._tokens.write(ids.astype(self.dtype))
        self._lengths.append(len(ids))
        self._ids.append(document_id)
        self._num_bytes += num_bytes

    def _check_ids(self, ids: npt.NDArray[np.int64], name: str) -> None:
        beyond = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(beyond):
            raise DataError(
                f"{name}: token {beyond[0]} has id {ids[beyond[0]]} beyond the vocabulary of {self._vocab_size}; the "
                "tokenizer contradicts itself, take another"
            )
        early = np.flatnonzero(ids[:-1] == self._eos_id)
        if len(early):
            raise DataError(
                f"{name}: token {early[0]} is the end of a document (id {self._eos_id}) in the middle of one; choose an "
                "eos_token that text cannot spell"
            )

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._seal()
        else:
            self._tokens.close()

    def _seal(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        hashes = {TOKENS: self._tokens.close()}
        index = _HashedFile(self.folder / INDEX)
        for part in _index_parts(lengths, self.dtype):
            index.write(part)
        hashes[INDEX] = index.close()
        ids = _HashedFile(self.folder / IDS)
        ids.write(np.frombuffer(self._ids, dtype=np.uint64).astype("<u8"))
        hashes[IDS] = ids.close()
        manifest = Manifest(
            dtype=self.dtype.name,
            num_tokens=int(lengths.sum(dtype=np.int64)),
            num_documents=len(lengths),
            num_bytes=self._num_bytes,
            vocab_size=self._vocab_size,
            tokenizer_fingerprint=self._fingerprint,
            eos_appended=True,
            eos_id=self._eos_id,
            dropped_duplicates=self.dropped_duplicates,
            sha256=hashes,
        )
        write_atomically(self.folder / MANIFEST, manifest.to_json())


def _index_parts(
    lengths: npt.NDArray[np.int32], dtype: np.dtype[np.generic]
) -> Iterable[npt.NDArray[np.generic] | bytes]:
    """The index file piece by piece: header, lengths, byte pointers, document bounds."""
    count = len(lengths)
    code = next(code for code, known in DTYPES.items() if known == dtype)
    yield HEADER.pack(MAGIC, 1, code, count, count + 1)
    yield lengths.astype("<i4")
    offset = 0
    for start in range(0, count, _IDX_BATCH):
        sizes = lengths[start : start + _IDX_BATCH].astype("<i8") * dtype.itemsize
        ends = np.cumsum(sizes) + offset
        yield ends - sizes
        offset = int(ends[-1])
    yield np.arange(count + 1, dtype="<i8")


class _HashedFile:
    """A file whose SHA-256 is known when it closes, its bytes then on disk."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._digest = hashlib.sha256()

    def write(self, data: npt.NDArray[np.generic] | bytes) -> None:
        view = (memoryview(data) if isinstance(data, bytes) else data.data).cast("B")
        self._digest.update(view)
        self._file.write(view)

    def close(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """The file is whole or not there, also after a power cut."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
