"""Full verification of a split: every byte hashed, every id inside the vocabulary, every document whole."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from surefoot.data.errors import DataError
from surefoot.data.hashing import sha256_of_file
from surefoot.data.shard_writer import write_atomically
from surefoot.data.shards import HEADER, INDEX, REBUILD, TOKENS, Split

_CHUNK = 1 << 22  # elements held at once
Stamp = list[int | str]


def verify_split(split: Split, progress: Callable[[float], None] | None = None) -> None:
    """DataError, with file and offset, unless the folder is what its manifest says. Reads it all, in constant memory."""
    actual_of = {TOKENS: _check_ids(split, progress)}
    _check_documents(split)
    for name, expected in split.manifest.sha256.items():
        actual = actual_of.get(name) or sha256_of_file(split.folder / name)
        if actual != expected:
            raise DataError(
                f"{split.folder / name}: sha256 is {actual[:16]}…, the manifest says {expected[:16]}…; the file was "
                f"changed after it was built, somewhere in its {(split.folder / name).stat().st_size} bytes from offset 0. "
                f"{REBUILD}"
            )


def verify_once(split: Split, cache: Path, progress: Callable[[float], None] | None = None) -> None:
    """``verify_split``, unless these very files (path, size, time of change) passed it before, as noted in ``cache``."""
    known: dict[str, Stamp] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        known = json.loads(cache.read_text(encoding="utf-8"))
    stamps = _stamps(split)
    if all(known.get(name) == stamp for name, stamp in stamps.items()):
        return
    verify_split(split, progress)
    note_verified(split, cache)


def note_verified(split: Split, cache: Path) -> None:
    """Remember that the split is known to be whole, as a writer knows of what it wrote. A read-only place is no error."""
    known: dict[str, Stamp] = {}
    with contextlib.suppress(FileNotFoundError, ValueError):
        known = json.loads(cache.read_text(encoding="utf-8"))
    known.update(_stamps(split))
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, json.dumps(known, indent=1, sort_keys=True))


def _stamps(split: Split) -> dict[str, Stamp]:
    stamps: dict[str, Stamp] = {}
    for name, sha256 in split.manifest.sha256.items():
        path = (split.folder / name).resolve()
        stat = path.stat()
        stamps[str(path)] = [stat.st_size, stat.st_mtime_ns, sha256]
    return stamps


def _check_ids(split: Split, progress: Callable[[float], None] | None) -> str:
    """Every id is below the vocabulary's size. Returns the SHA-256 of what was read."""
    digest = hashlib.sha256()
    vocab_size, size = split.manifest.vocab_size, split.dtype.itemsize
    buffer = np.empty(min(_CHUNK, split.num_tokens), dtype=split.dtype)
    for start in range(0, split.num_tokens, _CHUNK):
        ids = buffer[: min(_CHUNK, split.num_tokens - start)]
        split.read(start, ids)
        digest.update(ids.data)
        if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
            at = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
            raise DataError(
                f"{split.folder / TOKENS}: id {ids[at]} at byte offset {(start + at) * size} is beyond the vocabulary of "
                f"{vocab_size}; the shard was made with another tokenizer or is damaged. {REBUILD}"
            )
        if progress:
            progress(min(1.0, (start + _CHUNK) / split.num_tokens))
    return digest.hexdigest()


def _check_documents(split: Split) -> None:
    """Documents follow each other without a gap, none is empty, each ends with the end of a document."""
    count, size = split.num_documents, split.dtype.itemsize
    path = split.folder / INDEX
    tokens = split.tokens
    expected = 0
    for start in range(0, count, _CHUNK):
        num = min(_CHUNK, count - start)
        lengths = np.fromfile(path, "<i4", num, offset=HEADER.size + 4 * start).astype(np.int64)
        pointers = np.fromfile(path, "<i8", num, offset=HEADER.size + 4 * count + 8 * start)
        bounds = np.fromfile(path, "<i8", num, offset=HEADER.size + 12 * count + 8 * start)
        ends = np.cumsum(lengths) * size + expected
        wrong = np.flatnonzero(
            (lengths < 1) | (pointers != ends - lengths * size) | (bounds != np.arange(start, start + num))
        )
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{path}: document {start + at} (pointer at byte offset {HEADER.size + 4 * count + 8 * (start + at)}) has "
                f"length {lengths[at]} and starts at byte {pointers[at]} of {TOKENS}, not at {ends[at] - lengths[at] * size}"
                f"; {REBUILD}"
            )
        if split.manifest.eos_appended:
            open_ended = np.flatnonzero(tokens[ends // size - 1] != split.manifest.eos_id)
            if len(open_ended):
                raise DataError(
                    f"{split.describe(start + int(open_ended[0]))} does not end with id {split.manifest.eos_id}, though "
                    f"the manifest says eos_appended; {REBUILD}"
                )
        expected = int(ends[-1])
