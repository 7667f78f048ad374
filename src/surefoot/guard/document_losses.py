"""What a domain's documents usually lose: the yardstick for suspects."""

import math
from dataclasses import dataclass

from surefoot.guard.baseline import LARGEST
from surefoot.guard.signals import MISSING, DomainStats

RATE = 1 / 32
"""Weight of the newest batch."""
CLAMP_SIGMAS = 3.0
"""How far, in standard deviations of documents, one batch's mean may stand from the usual one and count in full."""
CLAMP_SPREAD = 4.0
"""How many times the usual variance one batch's may be and count in full."""


@dataclass(frozen=True, kw_only=True)
class DocumentLoss:
    """Moving mean and variance of one domain's document losses, nats per token, measured from the loss of their batch: that falls as the
    model learns, and a mean of the values themselves would lag behind."""

    name: str
    mean: float
    variance: float
    count: int
    """Batches seen."""


def add_domains(
    known: tuple[DocumentLoss, ...], domains: tuple[DomainStats, ...], batch_loss: float
) -> tuple[DocumentLoss, ...]:
    """With one more accepted batch; domains that it lacks stay as they are."""
    by_name = {item.name: item for item in known}
    for stats in domains:
        variance = stats.mean_square - stats.mean * stats.mean
        if stats.num_documents > 0 and abs(stats.mean) <= LARGEST and math.isfinite(variance):
            by_name[stats.name] = _add(by_name.get(stats.name), stats, stats.mean - batch_loss, max(0.0, variance))
    return tuple(by_name.values())


def _add(usual: DocumentLoss | None, stats: DomainStats, mean: float, variance: float) -> DocumentLoss:
    if usual is None:
        return DocumentLoss(name=stats.name, mean=mean, variance=variance, count=1)
    if usual.variance > 0:
        reach = CLAMP_SIGMAS * math.sqrt(usual.variance)
        mean = min(max(mean, usual.mean - reach), usual.mean + reach)
        variance = min(variance, CLAMP_SPREAD * usual.variance)
    rate = max(RATE, 1 / (usual.count + 1))
    step = mean - usual.mean
    return DocumentLoss(
        name=usual.name,
        mean=usual.mean + rate * step,
        # Within batches and between them: a domain may have one document a batch.
        variance=usual.variance + rate * (variance - usual.variance) + rate * (1 - rate) * step * step,
        count=usual.count + 1,
    )


def usual_loss(known: tuple[DocumentLoss, ...], domain: str, batch_loss: float) -> tuple[float, float]:
    """(mean, standard deviation) of a domain's document losses where their batch would have ``batch_loss``, nats per token; (NaN, NaN) where
    unknown."""
    found = next((item for item in known if item.name == domain), None)
    return (batch_loss + found.mean, math.sqrt(found.variance)) if found else (MISSING, MISSING)
