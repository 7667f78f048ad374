"""Losses of documents: sums of a fixed size per (row, document number), and what a whole batch says of them.

A piece is what one row holds of one document.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.guard.signals import DomainStats

MIN_TARGETS = 16
"""Pieces that predict fewer tokens are left out: their mean is mostly noise."""
TAIL = 1000
"""One piece in so many lies beyond the percentile: 99.9 %."""


class Pieces(NamedTuple):
    """One rank's pieces; the column is the document's number in its row."""

    loss_BS: Tensor
    """Mean nats per target, fp64; 0 where ``valid_BS`` is false."""
    valid_BS: Tensor
    """The piece exists and has at least MIN_TARGETS targets."""
    targets_BS: Tensor
    """Its predicted tokens, fp64."""


def piece_losses(token_losses_BT: Tensor, predicts_BT: Tensor, documents_BT: Tensor) -> Pieces:
    """Sum the losses of tokens into as many columns as the row has tokens: no shape depends on the data, so this runs unread on a device."""
    rows, tokens = documents_BT.shape
    place = documents_BT.long().clamp(min=0)
    place += torch.arange(rows, device=place.device)[:, None] * tokens
    wide = torch.where(predicts_BT, token_losses_BT.double(), 0.0)
    empty = wide.new_zeros(rows * tokens)
    sums = empty.index_add(0, place.flatten(), wide.flatten()).view(rows, tokens)
    counts = empty.index_add(0, place.flatten(), predicts_BT.double().flatten()).view(rows, tokens)
    valid = counts >= MIN_TARGETS
    return Pieces(torch.where(valid, sums / counts, 0.0), valid, counts)


def domain_sums(pieces: Pieces, domains_B: Tensor, num_domains: int) -> Tensor:
    """(domains, 3): how many pieces of each domain, the sum of their losses and of their squares; adds up over ranks."""
    loss = pieces.loss_BS
    by_row_B3 = torch.stack([pieces.valid_BS.double().sum(1), loss.sum(1), loss.square().sum(1)], dim=1)
    mine_DB = domains_B == torch.arange(num_domains, device=loss.device)[:, None]
    return torch.where(mine_DB[:, :, None], by_row_B3, 0.0).sum(1)


def largest(pieces: Pieces, count: int) -> Tensor:
    """The largest losses of the rank's pieces, in order, (count,) or fewer where there are fewer tokens; -inf fills up, NaN comes first."""
    losses = torch.where(pieces.valid_BS, pieces.loss_BS, -torch.inf).flatten()
    return torch.topk(losses, min(count, len(losses))).values


def tail_length(num_tokens: int) -> int:
    """How many of the largest losses every rank must tell so that the percentile of a batch of so many tokens is exact."""
    return num_tokens // (MIN_TARGETS * TAIL) + 1


def tail(tops: Tensor, num_pieces: Tensor) -> tuple[Tensor, Tensor]:
    """The largest loss and the 99.9th percentile (nearest rank) of ``num_pieces``, from what all ranks told; -inf where there is no piece."""
    ranked = tops.flatten().sort(descending=True).values
    place = (num_pieces // TAIL).long().clamp(max=len(ranked) - 1)
    return ranked[0], ranked.gather(0, place.reshape(1))[0]


def domain_stats(names: Sequence[str], sums: Sequence[float]) -> tuple[DomainStats, ...]:
    """Stats of the domains that have a piece, from ``domain_sums`` over all ranks, flattened."""
    stats = []
    for at, name in enumerate(names):
        count, total, squares = sums[3 * at : 3 * at + 3]
        if count > 0:
            stats.append(
                DomainStats(name=name, num_documents=round(count), mean=total / count, mean_square=squares / count)
            )
    return tuple(stats)
