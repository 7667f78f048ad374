"""Small shards and configs for the data tests."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from surefoot.config.data import (
    BatchStage,
    DataConfig,
    Exclusion,
    MixtureStage,
    NoRepetitionMask,
    RepetitionMask,
    Shards,
    SourceConfig,
)
from surefoot.data.hashing import document_id
from surefoot.data.loader import Loader
from surefoot.data.prepared import PreparedData, PreparedSource
from surefoot.data.shard_writer import SplitWriter
from surefoot.data.tokenizer import ByteTokenizer

WriteSplit = Callable[..., Path]
MakeLoader = Callable[..., Loader]
UNMASKED = NoRepetitionMask()


@pytest.fixture
def write_split(tmp_path: Path) -> WriteSplit:
    """Write texts, as bytes, into a new split folder."""
    numbers = itertools.count()

    def write(texts: Sequence[str], folder: Path | None = None, vocab_size: int = 257) -> Path:
        tokenizer = ByteTokenizer()
        folder = folder or tmp_path / f"split-{next(numbers)}"
        writer = SplitWriter(
            folder,
            vocab_size=vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer_fingerprint=tokenizer.fingerprint,
        )
        with writer:
            for text in texts:
                writer.add(tokenizer.encode(text), document_id(text.encode()), len(text.encode()), text[:10])
        return folder

    return write


@pytest.fixture
def make_loader(write_split: WriteSplit) -> MakeLoader:
    """A loader over byte-tokenised texts, a list of them per source; its first text is also the held-out one."""

    def make(
        sources: Sequence[Sequence[str]],
        weights: Sequence[float] = (),
        seq_len: int = 16,
        batch_size: int = 4,
        seed: int = 0,
        document_mask: bool = True,
        exclude: tuple[Exclusion, ...] = (),
        mixture_stages: tuple[MixtureStage, ...] = (),
        batch_stages: tuple[BatchStage, ...] = (),
        repetition: NoRepetitionMask | RepetitionMask = UNMASKED,
    ) -> Loader:
        folders = [write_split(texts) for texts in sources]
        prepared = PreparedData(
            sources=tuple(
                PreparedSource(f"s{at}", folder, write_split(["held out"])) for at, folder in enumerate(folders)
            ),
            tokenizer_path=None,
            tokenizer_fingerprint=ByteTokenizer.fingerprint,
            vocab_size=257,
            eos_id=256,
            fingerprint="0" * 16,
        )
        weights = weights or [1.0] * len(sources)
        data = DataConfig(
            sources=tuple(
                SourceConfig(name=f"s{at}", documents=Shards(path=str(folder)), weight=weights[at])
                for at, folder in enumerate(folders)
            ),
            seq_len=seq_len,
            batch_size=batch_size,
            document_mask=document_mask,
            exclude=exclude,
            mixture_stages=mixture_stages,
            batch_stages=batch_stages,
            repetition=repetition,
        )
        return Loader(data, prepared, seed)

    return make


@pytest.fixture
def texts() -> list[str]:
    """Forty distinct documents of 3 to 60 bytes, about 1,200 in all."""
    return [f"{at:03d}" + chr(97 + at % 26) * ((at * 37) % 58) for at in range(40)]
