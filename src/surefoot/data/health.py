"""The step-0 proof: a real batch checked against its files, read and cut by code that the loader does not use."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from surefoot.config.data import Exclusion, RepetitionMask
from surefoot.data.loader import Batch, Loader
from surefoot.data.mixture import BLOCK
from surefoot.data.pack import BLANK, IGNORE
from surefoot.data.shards import TOKENS, read_manifest


def prove_batch(
    batch: Batch, loader: Loader, exclusions: Sequence[Exclusion] = (), rank: int = 0, world: int = 1
) -> list[str]:
    """What is wrong with a batch, as sentences; none when all holds.

    Holds means: tokens are those of the stream; targets are the tokens shifted by one, inside documents only, and none
    where a token is blanked; document numbers and positions restart at the ends of documents found in the stream itself;
    padding, exclusions and what repeats itself are blank; ids are inside the vocabulary.
    """
    num = len(batch.samples_B3)
    mine = batch.samples_B3[rank * num // world : (rank + 1) * num // world]
    seq_len = loader.data.seq_len
    shape = (len(mine), seq_len)
    arrays = (batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT)
    if any(array.shape != shape for array in arrays):
        shapes = ", ".join(str(array.shape) for array in arrays)
        return [f"batch {batch.batch_index}: shapes {shapes} where rank {rank} of {world} has {shape}"]
    mistakes: list[str] = []
    may_exclude = bool(exclusions) or bool(loader.data.exclude)
    blanked = 0
    for at, (source, _, row) in enumerate(mine.tolist()):
        stream = _read_stream(Path(loader.prepared.sources[source].train), row * seq_len, seq_len + 1)
        inputs = _Row(*(array[at] for array in arrays))
        where = f"row {at} (source {loader.prepared.sources[source].name!r}, row {row})"
        found, num_blanked = _prove_row(inputs, stream, loader, may_exclude)
        found += _prove_repetition(inputs, stream, loader, may_exclude)
        mistakes += [f"{where}: {mistake}" for mistake in found]
        blanked += num_blanked
    if blanked != batch.num_excluded + batch.num_masked:
        said = f"num_excluded says {batch.num_excluded}" + (
            f" and num_masked {batch.num_masked}" if batch.num_masked else ""
        )
        mistakes.append(f"{blanked} tokens are blank without being padding, {said}")
    predicted = int((batch.targets_BT != IGNORE).sum())
    if predicted != batch.num_targets:
        mistakes.append(f"{predicted} targets are predicted, num_targets says {batch.num_targets}")
    return mistakes


def prove_shares(loader: Loader) -> list[str]:
    """What is wrong with the order of the first block of rows: shares off by a row or more, samples read twice."""
    samples = loader.mixture.samples(0, BLOCK)
    weights = np.array([source.weight for source in loader.data.sources])
    mistakes = []
    for at, source in enumerate(loader.data.sources):
        rows, due = int((samples[:, 0] == at).sum()), BLOCK * weights[at] / weights.sum()
        if abs(rows - due) >= 1:
            mistakes.append(
                f"source {source.name!r} has {rows} of the first {BLOCK} rows, its weight asks for {due:.2f}"
            )
    repeated = BLOCK - len(np.unique(samples, axis=0))
    if repeated:
        mistakes.append(f"{repeated} of the first {BLOCK} samples come twice")
    return mistakes


class _Row:
    """One row of a batch."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        documents: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> None:
        self.tokens, self.targets, self.documents, self.positions = tokens, targets, documents, positions


class _Stream:
    """Tokens of a split from ``start`` on, as they are in the file, and which of them begin a document."""

    def __init__(self, tokens: npt.NDArray[np.int64], begins: npt.NDArray[np.bool_], eos_id: int) -> None:
        self.tokens, self.begins, self.eos_id = tokens, begins, eos_id


def _read_stream(folder: Path, start: int, count: int) -> _Stream:
    """Beginnings are what follows an end-of-document id; without such ids in the shard they come from the index."""
    manifest = read_manifest(folder)
    dtype = np.dtype(manifest.dtype)
    before = min(start, 1)
    tokens = np.fromfile(folder / TOKENS, dtype, count + before, offset=(start - before) * dtype.itemsize)
    begins = np.empty(len(tokens) - before, dtype=np.bool_)
    if manifest.eos_appended:
        begins[1 - before :] = tokens[: len(begins) - 1 + before] == manifest.eos_id
    else:
        lengths = np.fromfile(folder / "tokens.idx", "<i4", manifest.num_documents, offset=34)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        begins[:] = np.isin(np.arange(start, start + len(begins)), starts)
    if start == 0:
        begins[0] = True
    return _Stream(tokens[before:].astype(np.int64), begins, manifest.eos_id)


def _prove_row(row: _Row, stream: _Stream, loader: Loader, may_exclude: bool) -> tuple[list[str], int]:
    """Mistakes of one row, and how many of its real tokens are blank."""
    seq_len = len(row.tokens)
    held = min(seq_len, len(stream.tokens))
    blank = row.documents == BLANK
    kept = np.flatnonzero(~blank[:held])
    mistakes = []

    def check(wrong: npt.NDArray[np.bool_], at: npt.NDArray[np.int64], sentence: str) -> None:
        if wrong.any():
            first = int(at[np.flatnonzero(wrong)[0]])
            mistakes.append(f"{sentence} ({int(wrong.sum())} places, first at token {first})")

    everywhere = np.arange(seq_len)
    vocab_size = loader.prepared.vocab_size
    check((row.tokens < 0) | (row.tokens >= vocab_size), everywhere, f"an id is beyond the vocabulary of {vocab_size}")
    check(row.targets >= vocab_size, everywhere, f"a target is beyond the vocabulary of {vocab_size}")
    check(~blank[held:], everywhere[held:], "padding is not blank")
    check(row.targets[blank] != IGNORE, everywhere[blank], "a blank token has a target")
    check(row.tokens[blank] != stream.eos_id, everywhere[blank], "a blank token is not the end-of-document id")
    if not may_exclude and not isinstance(loader.data.repetition, RepetitionMask):
        check(blank[:held], everywhere[:held], "a token is blank though nothing is excluded")
    check(row.tokens[kept] != stream.tokens[kept], kept, "a token is not the one in the file")
    due = _due_targets(stream, seq_len)
    before_blank = np.append(blank[1:], False)
    check((row.targets != IGNORE)[kept] & before_blank[kept], kept, "a target is a blank token")
    due[before_blank] = IGNORE
    check((row.targets != due)[kept] & (due[kept] == IGNORE), kept, "a target crosses the end of a document")
    check((row.targets != due)[kept] & (due[kept] != IGNORE), kept, "a target is not the next token")
    numbers = np.cumsum(stream.begins[:held]) - int(stream.begins[0])
    check(row.documents[kept] != numbers[kept], kept, "a document number does not follow the ends of documents")
    due_positions = everywhere[:held]
    if loader.data.document_mask:
        begin = np.where(stream.begins[:held], everywhere[:held], 0)
        due_positions = everywhere[:held] - np.maximum.accumulate(begin)
    what = "does not restart with its document" if loader.data.document_mask else "does not count across the row"
    check(row.positions[kept] != due_positions[kept], kept, f"a position {what}")
    return mistakes, int(blank[:held].sum())


def _prove_repetition(row: _Row, stream: _Stream, loader: Loader, may_exclude: bool) -> list[str]:
    """Nothing that is left repeats itself, and what is blank without an exclusion does (or is in a row with something that does)."""
    rule = loader.data.repetition
    if not isinstance(rule, RepetitionMask):
        return []
    held = min(len(row.tokens), len(stream.tokens))
    blank = row.documents[:held] == BLANK
    tokens = stream.tokens[:held].tolist()
    mistakes = []
    left = _repeating([None if gone else token for token, gone in zip(tokens, blank.tolist(), strict=True)], rule)
    if left.any():
        mistakes.append(f"a stretch that repeats itself is not blank (first at token {int(left.argmax())})")
    if not may_exclude:
        due = _repeating(tokens, rule)
        due = due if loader.data.document_mask else np.full(held, due.any())
        if (blank & ~due).any():
            mistakes.append(f"a token is blank that does not repeat (first at token {int((blank & ~due).argmax())})")
    return mistakes


def _repeating(tokens: list[int | None], rule: RepetitionMask) -> npt.NDArray[np.bool_]:
    """Which tokens lie inside ``count`` repetitions of a period, one token after the other; None equals nothing."""
    inside = np.zeros(len(tokens), dtype=np.bool_)
    for period in range(1, rule.max_period + 1):
        equal = 0
        for at in range(period, len(tokens)):
            equal = equal + 1 if tokens[at] is not None and tokens[at] == tokens[at - period] else 0
            if equal >= (rule.count - 1) * period:
                inside[at + 1 - equal - period : at + 1] = True
    return inside


def _due_targets(stream: _Stream, seq_len: int) -> npt.NDArray[np.int64]:
    """The next token of the stream, nothing where that begins a document or the stream ends."""
    due = np.full(seq_len, IGNORE, dtype=np.int64)
    following = stream.tokens[1 : seq_len + 1]
    due[: len(following)] = np.where(stream.begins[1 : seq_len + 1], IGNORE, following)
    return due
