"""Preparing data: texts are split by document hash, tokenised and written as shards, once; shards are checked."""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import tokenizers

from surefoot.config.data import BpeTokenizer, BytesTokenizer, DataConfig, Shards, SourceConfig, TokenizerFile
from surefoot.data.divide import Sides, divide, reconcile
from surefoot.data.errors import DataError
from surefoot.data.extract import extract, texts_of
from surefoot.data.hashing import sha256_of_file
from surefoot.data.prepared import TOKENIZER, PreparedData, PreparedSource, assemble, open_source, seal_source
from surefoot.data.shard_writer import SplitWriter
from surefoot.data.shards import MANIFEST, Split
from surefoot.data.source import describe_origin
from surefoot.data.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer, read_tokenizer, train_bpe
from surefoot.data.verify import note_verified, verify_once

BUILD_VERSION = 2  # raise it when the same texts would give other shards
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_VERIFIED = "verified.json"
_ABANDONED_S = 24 * 3600.0

Progress = Callable[[str, float], None]


def prepare(data: DataConfig, *, num_workers: int = 0, progress: Progress | None = None) -> PreparedData:
    """Build the shards that are missing below ``data.cache_dir``, check all, and say where they are.

    ``num_workers`` 0 is one per core. What was built before is found by a fingerprint of its inputs; what is read for the
    first time is verified in full, later by size and time of change. DataError for anything that cannot be trained on.
    """
    report: Progress = progress or (lambda what, share: None)
    _check_config(data)
    cache = Path(data.cache_dir)
    tokenizer_path = _tokenizer_of_shards(data)
    texts = [source for source in data.sources if not isinstance(source.documents, Shards)]
    folder = cache / _fingerprint(data, texts)
    if texts and not folder.is_dir():
        try:
            _build_folder(data, texts, folder, num_workers or num_cores(), report)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot be built: {error}; free space, or point data.cache_dir at a writable folder"
            ) from error
    sources = []
    for source in data.sources:
        place = Path(source.documents.path) if isinstance(source.documents, Shards) else folder / source.name
        sources.append(open_source(source.name, place))
        if tokenizer_path is None and (place / TOKENIZER).is_file():
            tokenizer_path = place / TOKENIZER
    if isinstance(data.tokenizer, TokenizerFile):
        tokenizer_path = Path(data.tokenizer.path)
    prepared = assemble(tuple(sources), tokenizer_path)
    _check_tokenizer(data, prepared)
    for built in prepared.sources:
        for side in (built.train, built.val):
            verify_once(Split.open(side), cache / _VERIFIED, partial(report, f"verify {built.name}"))
    return prepared


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_config(data: DataConfig) -> None:
    if not data.sources:
        raise DataError("data.sources is empty; name at least one source")
    names = [source.name for source in data.sources]
    for name in names:
        if not _NAME.fullmatch(name):
            raise DataError(
                f"data.sources: the name {name!r} must be letters, digits, '_', '-' or '.'; for example 'code'"
            )
        if names.count(name) > 1:
            raise DataError(f"data.sources: two sources are called {name!r}; names must differ")
    for source in data.sources:
        if not source.weight > 0:
            raise DataError(
                f"data.sources[{source.name}].weight={source.weight}: weights must be above 0; remove the source instead"
            )
    if not 0 < data.val_fraction < 1:
        raise DataError(f"data.val_fraction={data.val_fraction}: must lie between 0 and 1, for example 0.1")
    paths: dict[Path, str] = {}
    for source in data.sources:
        if isinstance(source.documents, Shards):
            path = Path(source.documents.path).resolve()
            if path in paths:
                raise DataError(
                    f"data.sources: {paths[path]!r} and {source.name!r} read the same shards {path}, so they would be read "
                    "twice per epoch; remove one and raise the weight of the other"
                )
            paths[path] = source.name


def _tokenizer_of_shards(data: DataConfig) -> Path | None:
    """The tokenizer that comes with shards when the config asks for a BPE; with texts beside them there is none."""
    shards = [source for source in data.sources if isinstance(source.documents, Shards)]
    if not shards or not isinstance(data.tokenizer, BpeTokenizer):
        return None
    path = Path(_shards_path(shards[0])) / TOKENIZER
    if len(shards) < len(data.sources):
        raise DataError(
            f"data.tokenizer.kind = bpe would be trained on the texts and not fit the shards of {shards[0].name!r}; set "
            f"data.tokenizer.kind = file and data.tokenizer.path = {path}"
        )
    return path


def _shards_path(source: SourceConfig) -> str:
    assert isinstance(source.documents, Shards)
    return source.documents.path


def _check_tokenizer(data: DataConfig, prepared: PreparedData) -> None:
    """The ids on disk are those of the tokenizer that the config asks for."""
    where = prepared.sources[0].train.parent
    match data.tokenizer:
        case BytesTokenizer():
            tokenizer: Tokenizer = ByteTokenizer()
        case TokenizerFile():
            tokenizer = read_tokenizer(Path(data.tokenizer.path), data.tokenizer.eos_token)
        case BpeTokenizer():
            if prepared.tokenizer_path is None:
                raise DataError(
                    f"{where}: shards without a {TOKENIZER}, and data.tokenizer.kind = bpe; set it to bytes, or to file "
                    "with the path of their tokenizer"
                )
            tokenizer = read_tokenizer(prepared.tokenizer_path)
            if tokenizer.vocab_size > data.tokenizer.vocab_size:
                raise DataError(
                    f"{prepared.tokenizer_path}: {tokenizer.vocab_size} ids where data.tokenizer.vocab_size="
                    f"{data.tokenizer.vocab_size}; set it to {tokenizer.vocab_size}"
                )
    if tokenizer.fingerprint != prepared.tokenizer_fingerprint:
        raise DataError(
            f"{where}: made with tokenizer {prepared.tokenizer_fingerprint[:16]}, but data.tokenizer (kind "
            f"{data.tokenizer.kind}) is {tokenizer.fingerprint[:16]}; set data.tokenizer to the one the shards were made with"
        )


def _fingerprint(data: DataConfig, texts: Sequence[SourceConfig]) -> str:
    """16 hex digits over all that decides the shards built from texts."""
    match data.tokenizer:
        case BytesTokenizer():
            tokenizer: list[object] = ["bytes"]
        case BpeTokenizer(vocab_size=vocab_size):
            tokenizer = ["bpe", vocab_size, tokenizers.__version__]
        case TokenizerFile(path=path, eos_token=eos_token):
            if not Path(path).is_file():
                raise DataError(f"{path}: no such tokenizer file; give data.tokenizer.path a tokenizer.json")
            tokenizer = ["file", sha256_of_file(Path(path)), eos_token]
    origins = [
        [source.name, describe_origin(source.documents)] for source in texts if not isinstance(source.documents, Shards)
    ]
    beside = [sha256_of_file(folder / MANIFEST) for source in _shards(data) for folder in (source.train, source.val)]
    identity = [BUILD_VERSION, tokenizer, data.val_fraction, origins, beside]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _build_folder(
    data: DataConfig, texts: Sequence[SourceConfig], folder: Path, num_workers: int, report: Progress
) -> None:
    """Build every text source in a folder beside ``folder`` and move it there whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    with tempfile.TemporaryDirectory(prefix=f".building-{folder.name}-", dir=folder.parent) as name:
        work, built = Path(name), Path(name) / "built"
        sides = _extract_sides(data, texts, work, num_workers, report)
        tokenizer = _make_tokenizer(data, sides, report)
        for source, side in zip(texts, sides, strict=True):
            _write_source(built / source.name, side, tokenizer, partial(report, f"tokenise {source.name}"))
        try:
            os.rename(built, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process built the same meanwhile
                raise
    for source in texts:
        for split in ("train", "val"):
            note_verified(Split.open(folder / source.name / split), folder.parent / _VERIFIED)


def _sweep(cache: Path) -> None:
    """Remove what builds that were killed left behind, once no build can still be at it."""
    for leftover in cache.glob(".building-*"):
        if time.time() - leftover.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(leftover, ignore_errors=True)


def _extract_sides(
    data: DataConfig, texts: Sequence[SourceConfig], work: Path, num_workers: int, report: Progress
) -> list[Sides]:
    """Read all texts and divide their documents; what any source holds out, none trains on."""
    sides = []
    for source in texts:
        assert not isinstance(source.documents, Shards)
        place = work / "texts" / source.name
        found = extract(source.documents, place, num_workers, partial(report, f"read {source.name}"))
        sides.append(divide(found, data.val_fraction, source.name))
    shards = _shards(data)
    train, val = ([Split.open(getattr(source, side)) for source in shards] for side in ("train", "val"))
    return reconcile(sides, [source.name for source in texts], train, val)


def _shards(data: DataConfig) -> list[PreparedSource]:
    sources = [source for source in data.sources if isinstance(source.documents, Shards)]
    return [open_source(source.name, Path(_shards_path(source))) for source in sources]


def _make_tokenizer(data: DataConfig, sides: Sequence[Sides], report: Progress) -> Tokenizer:
    match data.tokenizer:
        case BytesTokenizer():
            return ByteTokenizer()
        case TokenizerFile(path=path, eos_token=eos_token):
            return read_tokenizer(Path(path), eos_token)
        case BpeTokenizer(vocab_size=vocab_size):
            report("train tokenizer", 0.0)
            documents = [document for side in sides for document in side.train]
            trained = train_bpe((text for _, texts in texts_of(documents) for text in texts), vocab_size)
            report("train tokenizer", 1.0)
            return trained


def _write_source(folder: Path, sides: Sides, tokenizer: Tokenizer, progress: Callable[[float], None]) -> None:
    total = sum(document.num_bytes for document in sides.train + sides.val)
    done = 0
    for name, documents in (("train", sides.train), ("val", sides.val)):
        writer = SplitWriter(
            folder / name,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer_fingerprint=tokenizer.fingerprint,
        )
        writer.dropped_duplicates = sides.dropped if name == "train" else 0
        with writer:
            for batch, texts in texts_of(documents):
                for document, ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
                    writer.add(ids, document.number, document.num_bytes, document.name)
                    done += document.num_bytes
                progress(done / total)
    if isinstance(tokenizer, SubwordTokenizer):
        tokenizer.save(folder / TOKENIZER)
    seal_source(folder, tokenizer.fingerprint)
