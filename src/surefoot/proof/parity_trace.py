"""What a small run left, rank by rank, and the whole that the ranks' pieces make up."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surefoot.optim.clip import local_part
from surefoot.parallel.boxes import box_of


@dataclass(frozen=True)
class Piece:
    """The box of a tensor that one rank holds."""

    whole: tuple[int, ...]
    slices: tuple[slice, ...]
    content: Tensor
    """On the CPU, in its own dtype, a copy."""


Pieces = dict[str, Piece | None]
"""By name; None where the rank should hold something and does not."""


def pieces_of(tensors: Mapping[str, Tensor | None]) -> Pieces:
    """What this rank holds of each."""
    return {name: None if tensor is None else piece_of(tensor) for name, tensor in tensors.items()}


def piece_of(tensor: Tensor) -> Piece:
    """What this rank holds of a tensor."""
    box = box_of(tensor)
    return Piece(box.whole, box.slices, local_part(tensor).detach().cpu().clone())


@dataclass(frozen=True)
class BatchTrace:
    """One consumed batch as a rank saw it."""

    batch_index: int
    step: int
    state_digest: str
    figures: dict[str, float]
    """Metrics by their names, and the guard's signals as ``signals/...``; the clock's left out."""
    words: dict[str, str]
    """What the guard was told, and said, that is no number, and the digest of the batch's sample ids."""
    rows: tuple[str, ...]
    """Of each of this rank's rows a hash of its tokens, targets, positions and documents."""
    token_losses_BT: Tensor
    """Of this rank's rows."""


@dataclass
class RankTrace:
    """What one rank tells of a run."""

    data_rank: int
    opening: str = ""
    batches: list[BatchTrace] = field(default_factory=list)
    gradient: Pieces = field(default_factory=dict)
    """Of the first update that this process made, as the optimiser got it: reduced, not clipped."""
    states: dict[int, Pieces] = field(default_factory=dict)
    """Weights and all that optimiser and clipping remember, by step."""
    memory: dict[str, float] = field(default_factory=dict)
    """The guard's, at the end."""
    warnings: tuple[str, ...] = ()
    broken: str = ""
    """What ended the run on all ranks at once: they found that they differ."""


class Incoherent(Exception):
    """Ranks that should agree do not, or leave a part of a tensor to nobody; the text names it."""


@dataclass
class Trace:
    """A run, whole."""

    batches: list[BatchTrace]
    """With the rows and token losses of the whole batch, in order."""
    gradient: dict[str, Tensor]
    states: dict[int, dict[str, Tensor]]
    memory: dict[str, float]
    opening: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def last(self) -> dict[str, Tensor]:
        """The state at the end."""
        return self.states[max(self.states)]


def whole_trace(ranks: Sequence[RankTrace]) -> Trace:
    """Put the ranks' parts together. Raises Incoherent where they do not fit, or where replicas differ in a single bit."""
    first = ranks[0]
    gradient = assemble([rank.gradient for rank in ranks], "gradient of step 1")
    batches = [_whole_batch([rank.batches[n] for rank in ranks], ranks) for n in range(len(first.batches))]
    if any(len(rank.batches) != len(batches) or rank.states.keys() != first.states.keys() for rank in ranks):
        raise Incoherent(f"ranks consumed {sorted({len(rank.batches) for rank in ranks})} batches")
    for at, rank in enumerate(ranks):
        if _told(rank.memory) != _told(first.memory):
            raise Incoherent(f"what the guard remembers differs between ranks 0 and {at}")
    states = {
        step: assemble([rank.states[step] for rank in ranks], f"state after step {step}") for step in first.states
    }
    if first.broken:
        raise Incoherent(first.broken)
    return Trace(
        batches=batches,
        gradient=gradient,
        states=states,
        memory=first.memory,
        opening=first.opening,
        warnings=tuple(dict.fromkeys(text for rank in ranks for text in rank.warnings)),
    )


def assemble(ranks: Sequence[Pieces], what: str) -> dict[str, Tensor]:
    """Whole tensors from every rank's pieces. Raises Incoherent, naming tensor and ranks."""
    names = dict.fromkeys(name for pieces in ranks for name in pieces)
    return {name: _whole_tensor([pieces.get(name) for pieces in ranks], ranks, name, what) for name in names}


def _whole_tensor(pieces: Sequence[Piece | None], ranks: Sequence[Pieces], name: str, what: str) -> Tensor:
    if lost := [rank for rank, piece in enumerate(pieces) if piece is None and name in ranks[rank]]:
        raise Incoherent(f"{name}: rank {lost[0]} has no {what}")
    held = {rank: piece for rank, piece in enumerate(pieces) if piece is not None}
    lead = next(iter(held.values()))
    content = torch.zeros(lead.whole, dtype=lead.content.dtype)
    owner = torch.full(lead.whole, -1, dtype=torch.int32)
    for rank, piece in held.items():
        if piece.whole != lead.whole or piece.content.dtype != content.dtype:
            raise Incoherent(f"{name}: rank {rank} has another shape or dtype of its {what}")
        if piece.content.numel() == 0:
            continue
        there, mine = owner[piece.slices] >= 0, piece.content
        if not _same_bits(content[piece.slices][there], mine[there]):
            other = int(owner[piece.slices][there].min())
            raise Incoherent(f"{name}: replicas of the {what} differ, on ranks {other} and {rank}")
        content[piece.slices], owner[piece.slices] = mine, rank
    if bool((owner < 0).any()):
        raise Incoherent(f"{name}: no rank holds {int((owner < 0).sum())} of its {owner.numel()} elements ({what})")
    return content


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _whole_batch(seen: Sequence[BatchTrace], ranks: Sequence[RankTrace]) -> BatchTrace:
    """One batch from its parts: peers that share rows must have seen the same, all ranks the same numbers."""
    first = seen[0]
    parts: dict[int, BatchTrace] = {}
    for number, (mine, rank) in enumerate(zip(seen, ranks, strict=True)):
        for what in ("batch_index", "step", "state_digest", "figures", "words"):
            if _told(getattr(mine, what)) != _told(getattr(first, what)):
                raise Incoherent(
                    f"{_difference(what, getattr(first, what), getattr(mine, what))} of batch {first.batch_index} differs between ranks 0 and {number}"
                )
        part = parts.setdefault(rank.data_rank, mine)
        if part.rows != mine.rows:
            raise Incoherent(f"rows of batch {first.batch_index}: rank {number} has others than its peers")
        if not _same_bits(part.token_losses_BT, mine.token_losses_BT):
            raise Incoherent(f"token losses of batch {first.batch_index}: rank {number} has others than its peers")
    in_order = [parts[number] for number in sorted(parts)]
    return BatchTrace(
        batch_index=first.batch_index,
        step=first.step,
        state_digest=first.state_digest,
        figures=first.figures,
        words=first.words,
        rows=tuple(row for part in in_order for row in part.rows),
        token_losses_BT=torch.cat([part.token_losses_BT for part in in_order]),
    )


def _told(value: object) -> str:
    """A value in words in which NaN equals itself."""
    return repr(sorted(value.items())) if isinstance(value, dict) else repr(value)


def _difference(what: str, a: object, b: object) -> str:
    """The entry that differs, where it is a table."""
    if isinstance(a, dict) and isinstance(b, dict):
        return next((key for key in {**a, **b} if repr(a.get(key)) != repr(b.get(key))), what)
    return what


def print_of(arrays: Iterable[Tensor]) -> str:
    """16 hex digits over the values of integer tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(array.to(torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()
