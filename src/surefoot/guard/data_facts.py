"""What the tokens of a batch say by themselves, and with a loss outside its band: misaligned, leaked, repeated, too good."""

import math
from dataclasses import dataclass

from surefoot.config.guard import Thresholds
from surefoot.guard.baseline import Baseline
from surefoot.guard.finding import Finding
from surefoot.guard.lasting import Lasting
from surefoot.guard.limits import DUPLICATED, LEAKED, MISALIGNED
from surefoot.guard.signals import BatchFacts, StepSignals
from surefoot.guard.spikes import LOSS_FLOOR

FACT_SIGMAS = 8.0
FACT_SHARE = 0.02
"""Least rise of a share over its normal that is evidence."""
FACT_RATE = 1 / 32
SETTLED = 16
ODD_BAND = 0.7
"""Of the band of the loss, below which a batch with odd tokens lies too low: one row of dashes in a batch of four takes it down by five sigmas."""
TOO_GOOD_SHARE = 0.15
"""Of the loss, least drop that is said without evidence."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What is usual of a share of tokens: moving mean and mean absolute deviation of accepted batches."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, value: float) -> "Share":
        """With one more batch."""
        rate = max(FACT_RATE, 1 / (self.count + 1))
        return Share(
            mean=self.mean + rate * (value - self.mean),
            deviation=self.deviation + rate * (abs(value - self.mean) - self.deviation) if self.count else 0.0,
            count=self.count + 1,
        )

    def limit(self) -> float:
        """The share beyond which one is far above what is usual; infinite before that is known."""
        known = self.count >= SETTLED
        return self.mean + max(FACT_SHARE, FACT_SIGMAS * 1.25 * self.deviation) if known else math.inf

    def stands_out(self, value: float) -> bool:
        """Far above what is usual; never before that is known."""
        return value > self.limit()


def misaligned(signals: StepSignals) -> Finding | None:
    """An alarm where targets are not the next tokens."""
    share = signals.facts.misaligned
    if not share > MISALIGNED:
        return None
    return Finding(
        kind="misaligned",
        severity="alarm",
        text=f"{share:.1%} of the targets are not the next token of their row",
        batch_index=signals.batch_index,
        onset=signals.batch_index,
        value=share,
    )


def evidence(facts: BatchFacts, copied: Share, repeated: Share) -> tuple[str, str]:
    """(which fact, the phrase that says it) where the tokens themselves are unlike those before; ("", "") otherwise."""
    if copied.stands_out(facts.copied):
        if repeated.stands_out(facts.repeated):
            return "copied", f"{facts.repeated:.1%} of the tokens repeat a short period (usually {repeated.mean:.1%})"
        return "copied", f"{facts.copied:.1%} of the targets equal their own input token (usually {copied.mean:.1%})"
    if repeated.stands_out(facts.repeated):
        return "repeated", f"{facts.repeated:.1%} of the tokens repeat a short period (usually {repeated.mean:.1%})"
    return "", ""


def duplicated(signals: StepSignals, usual: Share) -> Finding | None:
    """An alarm where rows come again under new names: the loss says so only once the model knows them by heart."""
    share = signals.facts.duplicated
    if not (share > DUPLICATED and usual.stands_out(share)):
        return None
    return Finding(
        kind="too_good",
        severity="alarm",
        text=f"{share:.0%} of the rows were read before under another name in the last 64 batches",
        batch_index=signals.batch_index,
        onset=signals.batch_index,
        value=share,
        where="duplicated",
    )


def too_good(signals: StepSignals, loss: Baseline, thresholds: Thresholds, fact: tuple[str, str]) -> Finding | None:
    """An alarm where the loss lies below its band and the batch's tokens say why; a plain leak whatever the loss is."""
    which, phrase = fact
    if not which:
        return None
    if which == "copied" and signals.facts.copied > LEAKED:
        return _leak(signals, phrase)
    if not signals.loss < loss_floor(loss, thresholds):
        return None
    return _below(signals, loss, "alarm", f": {phrase}", which)


def loss_floor(loss: Baseline, thresholds: Thresholds) -> float:
    """The loss below which one is too good where the tokens are odd: seven tenths of the band are enough then."""
    return loss.lower(ODD_BAND * thresholds.loss_sigmas, ODD_BAND * thresholds.loss_nats, LOSS_FLOOR)


def _leak(signals: StepSignals, phrase: str) -> Finding:
    return Finding(
        kind="too_good",
        severity="alarm",
        text=phrase,
        batch_index=signals.batch_index,
        onset=signals.batch_index,
        value=signals.facts.copied,
        where="copied",
    )


def unexplained_drop(seen: int, signals: StepSignals, loss: Baseline, thresholds: Thresholds, lasting: Lasting) -> int:
    """Steps in a row with the loss far below its band, this one's included; a warning at the second. Learning does this too: it is only said."""
    least = max(thresholds.loss_nats, TOO_GOOD_SHARE * abs(loss.center))
    seen = seen + 1 if signals.loss < loss.lower(thresholds.loss_sigmas, least, LOSS_FLOOR) else 0
    lasting.see("too_good", seen >= 2, False, lambda: _below(signals, loss, "warning", " and nothing says why", ""))
    return seen


def _below(signals: StepSignals, loss: Baseline, severity: str, why: str, where: str) -> Finding:
    z = loss.z(signals.loss, LOSS_FLOOR)
    return Finding(
        kind="too_good",
        severity="alarm" if severity == "alarm" else "warning",
        text=f"loss {signals.loss:.4g} is {loss.center - signals.loss:.3g} nats below its trend of {loss.center:.4g} ({z:.0f} sigmas){why}",
        batch_index=signals.batch_index,
        onset=signals.batch_index,
        value=signals.loss,
        normal=loss.center,
        z=z if math.isfinite(z) else 0.0,
        where=where,
    )
