"""What ``prepare`` hands to the loader: checked split folders with one tokenizer."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.data.errors import DataError
from surefoot.data.shard_writer import write_atomically
from surefoot.data.shards import MANIFEST, TOKENS, Split

SOURCE_FORMAT = "surefoot-source-1"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class PreparedSource:
    """One domain, its two sides as split folders."""

    name: str
    train: Path
    val: Path


@dataclass(frozen=True)
class PreparedData:
    """All sources of a run in one tokenizer's ids."""

    sources: tuple[PreparedSource, ...]
    tokenizer_path: Path | None
    """``tokenizer.json``; None for bytes."""
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    fingerprint: str
    """16 hex digits over the names and contents of all splits."""


def seal_source(folder: Path, tokenizer_fingerprint: str) -> None:
    """Write the manifest that makes train and val one source, ``Shards`` elsewhere."""
    hashes = {side: hashlib.sha256((folder / side / MANIFEST).read_bytes()).hexdigest() for side in ("train", "val")}
    text = {"format": SOURCE_FORMAT, "tokenizer_fingerprint": tokenizer_fingerprint, "splits": hashes}
    write_atomically(folder / MANIFEST, json.dumps(text, indent=2, sort_keys=True) + "\n")


def open_source(name: str, folder: Path) -> PreparedSource:
    """A source folder on disk; DataError if it is none, or a split's manifest is not the one it was sealed with."""
    path = folder / MANIFEST
    try:
        sealed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; data.sources[{name}] wants a folder written by `surefoot data build`, with "
            "manifest.json, train and val"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); build the source again") from error
    if not isinstance(sealed, dict) or sealed.get("format") != SOURCE_FORMAT:
        raise DataError(
            f"{path}: not a source manifest of format {SOURCE_FORMAT!r}; give the folder above train and val"
        )
    for side, expected in sealed["splits"].items():
        manifest = folder / side / MANIFEST
        if not manifest.is_file():
            raise DataError(f"{manifest}: no such file; build the source again, or copy the folder whole")
        actual = hashlib.sha256(manifest.read_bytes()).hexdigest()
        if actual != expected:
            raise DataError(
                f"{manifest}: sha256 is {actual[:16]}…, {path} says {expected[:16]}…; the split was changed after the "
                "source was built: build it again"
            )
    return PreparedSource(name, folder / "train", folder / "val")


def assemble(sources: tuple[PreparedSource, ...], tokenizer_path: Path | None) -> PreparedData:
    """Put sources together; DataError when their tokenizers differ or two of them hold the same shard."""
    splits = [(source, side, Split.open(getattr(source, side))) for source in sources for side in ("train", "val")]
    first = splits[0][2].manifest
    shards: dict[str, str] = {}
    for source, side, split in splits:
        manifest = split.manifest
        if manifest.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise DataError(
                f"{split.folder}: made with tokenizer {manifest.tokenizer_fingerprint[:16]}, but "
                f"{splits[0][2].folder} with {first.tokenizer_fingerprint[:16]}; build both with one tokenizer"
            )
        where = f"{source.name}/{side}"
        same = shards.setdefault(manifest.sha256[TOKENS], where)
        if same != where:
            raise DataError(
                f"{split.folder / TOKENS}: the same tokens as {same} (sha256 {manifest.sha256[TOKENS][:16]}…), so they "
                "would be read twice per epoch; remove one of the two, or raise the weight of the other"
            )
    contents = [[source.name, side, split.manifest.to_json()] for source, side, split in splits]
    fingerprint = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]
    return PreparedData(
        sources, tokenizer_path, first.tokenizer_fingerprint, first.vocab_size, first.eos_id, fingerprint
    )
