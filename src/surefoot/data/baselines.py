"""What general compressors make of the held-out text: the figures a trained model stands beside."""

import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from surefoot.config.data import DataConfig
from surefoot.data.prepared import PreparedData
from surefoot.data.shards import Split
from surefoot.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class CompressionBaselines:
    """Bits per byte of the documents compressed in one piece, as long as they are."""

    num_bytes: int
    zlib_bits_per_byte: float
    """zlib at level 9 (a window of 32 KiB)."""
    xz_bits_per_byte: float
    """LZMA2 as the xz command uses it, preset 6 (a window of 8 MiB)."""


def compression_baselines(text_bytes_by_document: Iterable[bytes]) -> CompressionBaselines:
    """Compress the documents one after another, in constant memory beside the compressors' own."""
    deflate, xz = zlib.compressobj(9), lzma.LZMACompressor(preset=6)
    num_bytes = deflated = xzed = 0
    for text in text_bytes_by_document:
        num_bytes += len(text)
        deflated += len(deflate.compress(text))
        xzed += len(xz.compress(text))
    deflated += len(deflate.flush())
    xzed += len(xz.flush())
    if not num_bytes:
        raise ValueError("no text to compress")
    return CompressionBaselines(num_bytes, 8 * deflated / num_bytes, 8 * xzed / num_bytes)


def held_out_texts(data: DataConfig, prepared: PreparedData, source: int) -> Iterator[bytes]:
    """The text of each held-out document of a source, decoded from its tokens."""
    tokenizer = load_tokenizer(data.tokenizer, prepared.tokenizer_path)
    split = Split.open(prepared.sources[source].val)
    for document in range(split.num_documents):
        start, stop = split.document_span(document)
        ids = np.empty(stop - start, dtype=split.dtype)
        split.read(start, ids)
        yield tokenizer.decode(ids.tolist()).encode()
