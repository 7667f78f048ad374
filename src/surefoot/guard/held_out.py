"""Held-out loss that rises while the training loss is at its best."""

import math
from dataclasses import dataclass, replace

from surefoot.guard.finding import Finding
from surefoot.guard.lasting import Lasting
from surefoot.guard.signals import EvalSignals
from surefoot.guard.slow import Best

MARGIN_NATS = 0.03
MARGIN_SHARE = 0.02
"""Of its best, what a held-out loss may lie above it."""
IN_A_ROW = 2
"""Evaluations for which it must."""
TRAIN_NATS = 0.03
"""What the smoothed training loss may lie above its own best and still be fine."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """One domain's held-out loss at its best, and how long it has been above."""

    domain: str
    best: float
    best_step: int
    above: int = 0


def validation(
    known: tuple[HeldOut, ...], evaluation: EvalSignals, batch_index: int, train: Best, lasting: Lasting
) -> tuple[HeldOut, ...]:
    """The held-out losses with this evaluation's; a warning per domain that the training loss no longer speaks for."""
    by_domain = {item.domain: item for item in known}
    fine = train.lowest_batch >= 0 and train.excess <= TRAIN_NATS
    for domain, loss in evaluation.losses:
        if not math.isfinite(loss):
            continue
        item = by_domain.get(domain)
        if item is None or loss < item.best:
            by_domain[domain] = HeldOut(domain=domain, best=loss, best_step=evaluation.step)
        else:
            far = loss > item.best + max(MARGIN_NATS, MARGIN_SHARE * item.best)
            by_domain[domain] = replace(item, above=item.above + 1 if far else 0)
        _judge(by_domain[domain], loss, fine, batch_index, lasting)
    return tuple(by_domain.values())


def _judge(item: HeldOut, loss: float, fine: bool, batch_index: int, lasting: Lasting) -> None:
    lasting.see(
        f"validation/{item.domain}",
        fine and item.above >= IN_A_ROW,
        item.above > 0,
        lambda: Finding(
            kind="validation",
            severity="warning",
            text=f"held-out loss of {item.domain} is {loss:.4g}, {loss - item.best:.2g} nats above its best at step {item.best_step:,}, "
            "while the training loss is at its best: overfitting, or data that no longer resemble it",
            batch_index=batch_index,
            onset=batch_index,
            value=loss,
            normal=item.best,
            where=item.domain,
        ),
    )
