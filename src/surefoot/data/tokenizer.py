"""Text to ids and back: bytes, a byte-level BPE, or a tokenizer file. Each has a fingerprint."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from surefoot.config.data import BpeTokenizer, BytesTokenizer, TokenizerFile
from surefoot.data.errors import DataError

EOS_TOKEN = "<|endoftext|>"
_MIN_BPE_VOCAB = 257  # 256 byte symbols and the end of a document


class Tokenizer(Protocol):
    """What data needs of a tokenizer; ids run from 0 to ``vocab_size`` - 1 and ``eos_id`` ends every document."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """64 hex digits over all that decides ids."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text without the end of a document; the text of a special token is ordinary text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """``encode`` of many texts at once, in parallel where that pays."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; ends of documents are left out, broken UTF-8 becomes U+FFFD."""
        ...

    def token_num_bytes(self) -> npt.NDArray[np.int32]:
        """UTF-8 bytes of text that each id stands for; 0 for special tokens."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte, 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = hashlib.sha256(b'{"eos_id":256,"kind":"bytes"}').hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if i != self.eos_id).decode(errors="replace")

    def token_num_bytes(self) -> npt.NDArray[np.int32]:
        return np.array([1] * 256 + [0], dtype=np.int32)


class SubwordTokenizer:
    """A tokenizer of the ``tokenizers`` library with its end-of-document token."""

    def __init__(self, inner: tokenizers.Tokenizer, eos_token: str, where: str) -> None:
        eos_id = inner.token_to_id(eos_token)
        if eos_id is None:
            raise DataError(
                f"{where}: the token {eos_token!r} is not in its vocabulary; set data.tokenizer.eos_token to one that is"
            )
        # A document that spells a special token must not end early: its text is encoded like any other.
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._where = where
        self._json: dict[str, Any] = json.loads(inner.to_str())
        self.eos_id: int = eos_id
        self.vocab_size: int = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        identity = json.dumps({"eos_id": eos_id, "tokenizer": self._json}, sort_keys=True, separators=(",", ":"))
        self.fingerprint: str = hashlib.sha256(identity.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [i for i in map(int, ids) if i != self.eos_id]
        text: str = self._inner.decode(kept, skip_special_tokens=True)
        return text

    def token_num_bytes(self) -> npt.NDArray[np.int32]:
        """See ``Tokenizer``; known for byte-level and byte-fallback vocabularies, DataError for others."""
        parts = json.dumps([self._json["pre_tokenizer"], self._json["decoder"]])
        if '"ByteLevel"' not in parts and '"ByteFallback"' not in parts and "▁" not in parts:
            raise DataError(
                f"{self._where}: the bytes of its tokens are unknown (neither byte-level nor byte-fallback), so bits "
                "per byte cannot be computed; use a byte-level BPE or data.tokenizer.kind = bytes"
            )
        byte_level = '"ByteLevel"' in parts
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        for token, index in self._inner.get_vocab(with_added_tokens=False).items():
            sizes[index] = len(token) if byte_level else _num_bytes_of_piece(token)
        for added in self._json["added_tokens"]:
            sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return sizes

    def save(self, path: Path) -> None:
        """Write the ``tokenizer.json`` that ``load_tokenizer`` and the ``tokenizers`` library read."""
        path.write_text(self._inner.to_str(pretty=True), encoding="utf-8")


def _num_bytes_of_piece(piece: str) -> int:
    """Bytes of a SentencePiece-style token: ``<0xAB>`` is one byte, ``▁`` one space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("▁", " ").encode())


def train_bpe(texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """Learn a byte-level BPE (GPT-2's pre-tokenisation); the same texts in any order give the same merges.

    Fewer than ``vocab_size`` ids result when the texts run out of pairs.
    """
    if vocab_size < _MIN_BPE_VOCAB:
        raise DataError(
            f"data.tokenizer.vocab_size={vocab_size} is below {_MIN_BPE_VOCAB}, the 256 bytes and the end of a "
            "document; raise it or set data.tokenizer.kind = bytes"
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return SubwordTokenizer(inner, EOS_TOKEN, "the trained BPE")


def read_tokenizer(path: Path, eos_token: str = EOS_TOKEN) -> SubwordTokenizer:
    """Open a ``tokenizer.json``; DataError if it is missing, damaged or lacks ``eos_token``."""
    try:
        inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such tokenizer file; give data.tokenizer.path a tokenizer.json") from None
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{path}: not a tokenizer.json of the tokenizers library ({error}); export it again") from error
    return SubwordTokenizer(inner, eos_token, str(path))


def load_tokenizer(cfg: BytesTokenizer | BpeTokenizer | TokenizerFile, path: Path | None) -> Tokenizer:
    """The tokenizer of prepared data; ``path`` is ``PreparedData.tokenizer_path``, None for bytes."""
    match cfg:
        case BytesTokenizer():
            return ByteTokenizer()
        case BpeTokenizer():
            if path is None:
                raise DataError("the BPE of these data has no tokenizer.json; prepare them again")
            return read_tokenizer(path)
        case TokenizerFile():
            return read_tokenizer(Path(cfg.path) if path is None else path, cfg.eos_token)
