"""Token shards on disk: Megatron's ``.bin`` and ``.idx``, a sidecar of document ids, and a manifest that seals them.

A split folder holds ``tokens.bin`` (little-endian ids, documents one after another), ``tokens.idx`` (MMIDIDX version 1 as
Megatron-LM's IndexedDataset reads it, one sequence per document), ``documents.ids`` (one uint64 per document) and
``manifest.json``. Opening costs the same for a thousand tokens as for 10^11: nothing is read but headers.
"""

import json
import mmap
import os
import struct
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from surefoot.data.errors import DataError
from surefoot.data.hashing import MASK64, document_name, mix64, mix64_array

TOKENS, INDEX, IDS, MANIFEST = "tokens.bin", "tokens.idx", "documents.ids", "manifest.json"
UINT16_IDS = 65_500  # below it ids fit Megatron's uint16
FORMAT = "surefoot-split-1"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))
}
REBUILD = "the shard is damaged or half copied: build it again with `surefoot data build`, or copy it again"
Ids = Literal["content", "ordinal"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a split folder claims about itself."""

    dtype: str
    """NumPy name of the ids' type."""
    num_tokens: int
    """Ends of documents included."""
    num_documents: int
    num_bytes: int
    """UTF-8 bytes of the documents' text, exact."""
    vocab_size: int
    tokenizer_fingerprint: str
    eos_appended: bool
    """Every document ends with ``eos_id``."""
    eos_id: int
    document_ids: Ids = "content"
    """content: documents.ids holds 64-bit content hashes. ordinal: no sidecar, ids come from the shard's hash and the ordinal."""
    dropped_duplicates: int = 0
    """Documents left out because the source, or another source's held-out side, holds the same text."""
    sha256: dict[str, str]
    """Of every other file in the folder."""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; DataError if missing, damaged, or of another format."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a split folder is whole only with its manifest. {REBUILD}") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); {REBUILD}") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise DataError(f"{path}: not a split manifest of format {FORMAT!r}; give the folder of one source")
    names = {field.name for field in fields(Manifest)}
    if wrong := sorted(names.symmetric_difference(data)):
        raise DataError(f"{path}: keys missing or unknown: {', '.join(wrong)}; {REBUILD}")
    return Manifest(**data)


class Split:
    """One side of one source, open for reading; resident memory does not grow with it, nor with what was read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.num_tokens = self.manifest.num_tokens
        self.num_documents = self.manifest.num_documents
        self.dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._check_sizes()
        # Reads go through pread, not a map: a file cut short under us is then an error and not a SIGBUS.
        self._tokens_fd = _open_for_life(self, folder / TOKENS)
        self._index = _map_whole(folder / INDEX)
        self._pointers = self._read_index()
        self._document_ids = None
        if self.manifest.document_ids == "content":
            self._document_ids = memoryview(_map_whole(folder / IDS)).cast("Q")

    @classmethod
    def open(cls, folder: Path) -> "Split":
        """Open a split folder. DataError when sizes, counts, dtype and index do not agree (hashes: ``verify``)."""
        return cls(folder)

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All ids as a read-only memory map, (num_tokens,)."""
        return np.memmap(self.folder / TOKENS, dtype=self.dtype, mode="r")

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        """Fill ``out`` (contiguous, of the split's dtype) with the tokens from ``start`` on."""
        got = os.preadv(self._tokens_fd, [out.data], start * self.dtype.itemsize)
        if got != out.nbytes:
            raise DataError(
                f"{self.folder / TOKENS}: {got} of {out.nbytes} bytes at offset {start * self.dtype.itemsize}; the file "
                f"was cut short while in use. {REBUILD}"
            )

    def offsets_at(self, start: int, stop: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Documents that touch tokens [start, stop): number of the first, and where each of them starts (tokens).

        Bisection on the mapped index: about log2(num_documents) reads, whatever its size.
        """
        size = self.dtype.itemsize
        first = bisect_right(self._pointers, start * size) - 1
        # A document has at least one token, which bounds how many can start before ``stop``.
        end = bisect_left(self._pointers, stop * size, first + 1, min(first + 1 + stop - start, self.num_documents))
        starts = np.frombuffer(self._pointers[first:end], dtype="<i8") // size
        return first, starts

    def document_span(self, document: int) -> tuple[int, int]:
        """First token of a document, and the one after its last."""
        size = self.dtype.itemsize
        last = document + 1 == self.num_documents
        return self._pointers[document] // size, self.num_tokens if last else self._pointers[document + 1] // size

    def document_hash(self, document: int) -> int:
        """The document's 64-bit id."""
        if self._document_ids is not None:
            return self._document_ids[document]
        return mix64((document + self._ordinal_key()) & MASK64)

    def find_document(self, number: int) -> list[int]:
        """Which documents carry this id; reads the sidecar once in chunks (0.1 s per 10^8 documents)."""
        found: list[int] = []
        for start, ids in self.document_ids():
            found.extend((np.flatnonzero(ids == np.uint64(number)) + start).tolist())
        return found

    def document_ids(self) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """All ids in chunks, each with the number of its first document."""
        chunk = 1 << 20
        for start in range(0, self.num_documents, chunk):
            stop = min(start + chunk, self.num_documents)
            if self._document_ids is not None:
                ids = np.frombuffer(self._document_ids[start:stop], dtype="<u8")
            else:
                ids = mix64_array(np.arange(start, stop, dtype=np.uint64) + np.uint64(self._ordinal_key()))
            yield start, ids

    def _ordinal_key(self) -> int:
        return int(self.manifest.sha256[TOKENS][:16], 16)

    def _check_sizes(self) -> None:
        expected = {
            TOKENS: self.num_tokens * self.dtype.itemsize,
            INDEX: HEADER.size + 20 * self.num_documents + 8,
            IDS: 8 * self.num_documents,
        }
        if self.manifest.document_ids == "ordinal":
            del expected[IDS]
        for name, size in expected.items():
            path = self.folder / name
            if not path.is_file():
                raise DataError(f"{path}: no such file; {REBUILD}")
            actual = path.stat().st_size
            if actual != size:
                what = "ends" if actual < size else "goes on"
                raise DataError(
                    f"{path}: {what} at byte offset {min(actual, size)}: {actual} bytes where {MANIFEST} asks for {size}; "
                    f"{REBUILD}"
                )
        if self.num_documents < 1:
            raise DataError(f"{self.folder}: holds no documents; {REBUILD}")

    def _read_index(self) -> memoryview:
        """Check header and both ends of the index; the pointers (bytes into tokens.bin) as a view of the map."""
        path, count = self.folder / INDEX, self.num_documents
        magic, version, code, sequences, bounds = HEADER.unpack_from(self._index)
        if magic != MAGIC or version != 1:
            raise DataError(f"{path}: offset 0 holds {magic!r} version {version}, not {MAGIC!r} version 1; {REBUILD}")
        if DTYPES.get(code) != self.dtype:
            raise DataError(
                f"{path}: dtype code {code} at offset 17 is {DTYPES.get(code)}, {MANIFEST} says {self.dtype}; {REBUILD}"
            )
        if (sequences, bounds) != (count, count + 1):
            raise DataError(
                f"{path}: {sequences} sequences and {bounds} document bounds at offset 18 where {count} documents need "
                f"{count} and {count + 1} (one sequence per document); {REBUILD}"
            )
        view = memoryview(self._index)
        pointers = view[HEADER.size + 4 * count : HEADER.size + 12 * count].cast("q")
        (last_length,) = struct.unpack_from("<i", self._index, HEADER.size + 4 * (count - 1))
        end = pointers[count - 1] + last_length * self.dtype.itemsize
        if pointers[0] != 0 or end != self.num_tokens * self.dtype.itemsize:
            raise DataError(
                f"{path}: documents run from byte {pointers[0]} to {end} of {TOKENS}, which has "
                f"{self.num_tokens * self.dtype.itemsize}; {REBUILD}"
            )
        return pointers

    def describe(self, document: int) -> str:
        """File, document and byte offset, for error texts."""
        start, _ = self.document_span(document)
        return (
            f"{self.folder / TOKENS}: document {document} ({document_name(self.document_hash(document))}) at byte offset "
            f"{start * self.dtype.itemsize}"
        )


def _open_for_life(owner: object, path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def _map_whole(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
