"""Where tokens come from and how they become batches."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PythonInstallation:
    """Text every machine has: the standard library of the running Python, without site-packages and test folders."""

    kind: Literal["python"] = "python"
    part: Literal["code", "prose"]
    """code: modules with their docstrings removed (pydoc's topics file left out). prose: the docstrings, one document per module, and pydoc's topics."""


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """One UTF-8 document per file."""

    kind: Literal["text"] = "text"
    glob: str
    """Pattern of the files, ``**`` allowed; sorted by path."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Native token shards written by ``surefoot data build``."""

    kind: Literal["shards"] = "shards"
    path: str
    """Folder that holds manifest.json; its train and val splits are used as they are."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One domain of the mixture."""

    name: str
    """Name of the domain, as it appears in metrics (``eval/<name>/bits_per_byte``)."""
    documents: PythonInstallation | TextFiles | Shards
    """Where its documents come from."""
    weight: float = 1.0
    """Share of rows, relative to the other sources; above 0."""


@dataclass(frozen=True, kw_only=True)
class BytesTokenizer:
    """One token per byte, 256 the end of a document."""

    kind: Literal["bytes"] = "bytes"


@dataclass(frozen=True, kw_only=True)
class BpeTokenizer:
    """Byte-level BPE trained on the training documents of all sources, deterministic."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = 4096
    """Tokens, the end of a document included."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A ``tokenizer.json`` of the tokenizers library."""

    kind: Literal["file"] = "file"
    path: str
    """The file."""
    eos_token: str = "<|endoftext|>"
    """The token appended to every document; must be in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class MixtureStage:
    """Source weights from a row onward; replaces the sources' own weights."""

    start_row: int
    """First global row of the stage; rounded up to a mixture block."""
    weights: tuple[float, ...]
    """One per source, in the order of the sources."""


@dataclass(frozen=True, kw_only=True)
class BatchStage:
    """Rows per batch from a batch onward: a batch-size ramp is a list of stages."""

    start_batch: int
    """First batch_index of the stage; above 0."""
    batch_size: int
    """Rows per batch from there on."""


@dataclass(frozen=True, kw_only=True)
class LengthStage:
    """Tokens per training row from a batch onward: a length ramp is a list of stages (arXiv:2108.06084)."""

    start_batch: int
    """First batch_index of the stage; 0 is the beginning."""
    seq_len: int
    """Rows of ``data.seq_len`` are cut into pieces of so many tokens, each attending to itself alone; a divisor of it."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A document blanked from a batch onward: its ids become one fixed id, its targets are ignored."""

    document: str
    """16 hex digits: the document's 64-bit content hash."""
    from_batch: int = 0
    """First batch_index it applies to."""


@dataclass(frozen=True, kw_only=True)
class NoRepetitionMask:
    """Rows are trained on as they are."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, kw_only=True)
class RepetitionMask:
    """Stretches of a row that repeat themselves are blanked when it is read (the rule of OLMo 2, arXiv:2501.00656 section 3.1);
    training rows only, held-out ones are judged as they are."""

    kind: Literal["mask"] = "mask"
    max_period: int = 13
    """Longest n-gram, in tokens, whose repetition counts."""
    count: int = 32
    """Repetitions in a row from which they count."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A mixture of sources cut into rows of ``seq_len`` tokens; batch number n is a pure function of this, the seed and the exclusions."""

    sources: tuple[SourceConfig, ...]
    tokenizer: BytesTokenizer | BpeTokenizer | TokenizerFile = BytesTokenizer()
    """How text becomes token ids; one for all sources."""
    seq_len: int
    """Tokens per row (T)."""
    batch_size: int
    """Rows per batch, over all ranks and micro-batches (B)."""
    length_stages: tuple[LengthStage, ...] = ()
    """Changes of the length of training rows, by batch; batches keep their samples and their number of tokens. Before the first, ``seq_len``."""
    batch_stages: tuple[BatchStage, ...] = ()
    mixture_stages: tuple[MixtureStage, ...] = ()
    document_mask: bool = True
    """Tokens attend only inside their own document, and positions restart with it."""
    val_fraction: float = 0.1
    """Share of the documents of each domain held out, chosen by document hash."""
    repetition: NoRepetitionMask | RepetitionMask = NoRepetitionMask()
    """What happens to n-grams repeated over and over."""
    exclude: tuple[Exclusion, ...] = ()
    """Documents blanked by choice; those the guard blanks are in the ledger."""
    cache_dir: str = "runs/.data"
    """Where shards built from text are kept, one folder per fingerprint."""
