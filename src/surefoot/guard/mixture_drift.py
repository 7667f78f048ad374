"""The mixture that arrives against the one that has been arriving: a domain gone, or much more of it, with no change of data planned."""

import math
from dataclasses import dataclass

from surefoot.guard.finding import Finding
from surefoot.guard.lasting import Lasting
from surefoot.guard.signals import StepSignals

RECENT = 8
"""Batches whose share is held against the usual one."""
SETTLED = 24
"""Batches without which no share is usual."""
SIGMAS = 8.0
"""Of a mean of ``RECENT`` batches."""
LEAST = 0.2
"""And at least so much of all document pieces."""
RATE = 1 / 64


@dataclass(frozen=True, kw_only=True)
class DomainShare:
    """What one domain usually has of a batch's document pieces, and what it has had lately."""

    name: str
    mean: float
    variance: float
    """Between batches."""
    count: int
    recent: tuple[float, ...]
    """Of the last batches, oldest first; they count for the usual share only once they have left here."""


def mixture_drift(shares: tuple[DomainShare, ...], signals: StepSignals, lasting: Lasting) -> tuple[DomainShare, ...]:
    """The shares with one more batch; a warning where a domain's recent share is far from its usual one."""
    counts = {domain.name: domain.num_documents for domain in signals.domains}
    total = sum(counts.values())
    if total == 0:
        return shares
    known = {share.name: share for share in shares}
    # A domain that is not in the batch has none of it.
    after = tuple(
        _with(known.get(name), name, counts.get(name, 0) / total) for name in dict.fromkeys([*known, *counts])
    )
    for share in after:
        recent = sum(share.recent) / len(share.recent)
        noise = math.sqrt(share.variance / RECENT)
        off = abs(recent - share.mean)
        begins = share.count >= SETTLED and len(share.recent) == RECENT and off > LEAST and off > SIGMAS * noise
        lasting.see(
            f"mixture/{share.name}",
            begins,
            off > LEAST / 2,
            lambda share=share, recent=recent, noise=noise: Finding(  # type: ignore[misc]
                kind="mixture",
                severity="warning",
                text=f"{recent:.0%} of the documents of the last {RECENT} batches are of {share.name}, usually {share.mean:.0%}: no change of "
                "the mixture was planned here",
                batch_index=signals.batch_index,
                onset=max(0, signals.batch_index - RECENT + 1),
                value=recent,
                normal=share.mean,
                z=(recent - share.mean) / noise if noise > 0 else 0.0,
                where=share.name,
            ),
        )
    return after


def _with(share: DomainShare | None, name: str, value: float) -> DomainShare:
    if share is None:
        return DomainShare(name=name, mean=0.0, variance=0.0, count=0, recent=(value,))
    recent = (*share.recent, value)
    if len(recent) <= RECENT:
        return DomainShare(name=name, mean=share.mean, variance=share.variance, count=share.count, recent=recent)
    left = recent[0]
    rate = max(RATE, 1 / (share.count + 1))
    step = left - share.mean
    return DomainShare(
        name=name,
        mean=share.mean + rate * step,
        variance=(1 - rate) * (share.variance + rate * step * step),
        count=share.count + 1,
        recent=recent[1:],
    )
