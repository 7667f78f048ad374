"""What was seen and what to do next, in words."""

import math
from collections.abc import Mapping, Sequence

from surefoot.guard.actions import Cause
from surefoot.guard.finding import Finding
from surefoot.guard.signals import StepSignals

ADVICE: Mapping[Cause, str] = {
    "data": "Look at the batches named in `surefoot report RUN`; `surefoot fork RUN --at STEP` goes on with their source repaired or left out",
    "optimiser": "Fork from an earlier checkpoint with `surefoot fork RUN --at STEP` and a lower optim.lr, a longer warm-up or QK-norm",
    "numerics": "Fork with `surefoot fork RUN --at STEP` and parallel.precision=fp32, or QK-norm or z-loss, which keep numbers in range",
    "hardware": "Check the device (`surefoot doctor`, its error counters) and run the same command on another machine if it comes again",
    "unknown": "Look at the last steps in `surefoot report RUN`, then fork with `surefoot fork RUN --at STEP` and a lower optim.lr",
}
"""Sentences without a full stop."""
AFTER_DIPS = "QK-norm, z-loss or a lower optim.lr keep it from growing"

_GRAVEST_FIRST = ("alarm", "warning", "note")


def seen(signals: StepSignals, findings: Sequence[Finding]) -> str:
    """Batch and the two gravest findings; without any, what is not finite, or the bare numbers."""
    told = sorted(findings, key=lambda f: _GRAVEST_FIRST.index(f.severity))[:2]
    texts = dict.fromkeys(f.text.removeprefix(f"batch {signals.batch_index}: ") for f in told)
    return f"batch {signals.batch_index}: " + ("; ".join(texts) or _numbers(signals))


def _numbers(signals: StepSignals) -> str:
    numbers = f"loss {signals.loss:.4g} nats, gradient norm {signals.gradient_norm:.4g}"
    if not signals.finite:
        return f"{numbers}, not finite"
    largest = signals.document_loss_max
    return numbers + (f", largest document loss {largest:.4g} nats" if math.isfinite(largest) else "")
