"""Fixed functions from bytes and numbers to bits: document ids, mixed integers, file hashes."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MASK64 = (1 << 64) - 1
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 22


def document_id(text: bytes) -> int:
    """A document's id for life: 64 bits of BLAKE2b over its UTF-8 bytes, whatever tokenizer reads it."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def document_name(number: int) -> str:
    """The 16 hex digits by which configs and ledgers name a document."""
    return f"{number:016x}"


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from a path of names and numbers; any change gives an unrelated key."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"surefoot").digest(), "little")


def mix64(value: int) -> int:
    """One integer through the splitmix64 finaliser (Steele, Lea and Flood 2014), a bijection of 64 bits."""
    value = ((value ^ (value >> 30)) * _MIX_1) & MASK64
    value = ((value ^ (value >> 27)) * _MIX_2) & MASK64
    return value ^ (value >> 31)


def mix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``mix64`` of every element."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    return mixed ^ (mixed >> np.uint64(31))


def sha256_of_file(path: Path) -> str:
    """64 hex digits over a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def digest_of_array(array: npt.NDArray[Any]) -> str:
    """16 hex digits over the little-endian int64 values of an array."""
    return hashlib.blake2b(np.ascontiguousarray(array, dtype="<i8").tobytes(), digest_size=8).hexdigest()
