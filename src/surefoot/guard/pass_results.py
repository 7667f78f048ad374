"""What an extra pass says: the same again, cured, or still healthy."""

import math

from surefoot.guard.evidence import Evidence, PassResult

LEAST_EXCESS = 0.2
"""Nats per token above normal that a pass may have and still count as healthy,"""
EXCESS_LEFT = 0.25
"""or so much of the refused step's own excess, whichever is more."""
SAME_GRADIENT = 2.0
"""Times its gradient norm when it was applied, within which a healthy batch is as it was."""
LASTS = 3
"""Skipped steps in a row that are no single bad batch any more."""
NOISE_FLOORS = 3.0
"""A repeated pass differs when it is so many times the noise of repeating away."""


def differs(again: PassResult, evidence: Evidence) -> bool:
    """The same batch at the same weights gave other numbers than noise explains: bits, where there is no noise."""
    if again.same_bits:
        return False
    pairs = ((evidence.signals.loss, again.loss), (evidence.signals.gradient_norm, again.gradient_norm))
    return any(_apart(was, now) > NOISE_FLOORS * evidence.noise for was, now in pairs)


def _apart(was: float, now: float) -> float:
    """Relative difference; 0 between any two numbers that are not finite."""
    if not math.isfinite(was) or not math.isfinite(now):
        return 0.0 if math.isfinite(was) == math.isfinite(now) else math.inf
    return abs(was - now) / max(abs(was), abs(now)) if was != now else 0.0


def cured(result: PassResult, evidence: Evidence) -> bool:
    """Nothing of what the update was refused for is left: finite, the excess of loss gone, the gradient no longer beyond normal."""
    signals = evidence.signals
    left = result.excess if math.isfinite(evidence.expected_loss) else math.nan
    if math.isnan(left) and any(f.kind == "loss_spike" for f in evidence.findings):
        # Nothing to measure by but the refused loss itself.
        left = 0.0 if not result.loss > signals.loss - LEAST_EXCESS else math.inf
    allowed = LEAST_EXCESS
    if math.isfinite(signals.loss - evidence.expected_loss):
        allowed = max(allowed, EXCESS_LEFT * abs(signals.loss - evidence.expected_loss))
    if left < -allowed and any(f.kind == "too_good" for f in evidence.findings):
        return False
    return result.finite and not left > allowed and _calm(result, evidence)


def fine(healthy: PassResult, evidence: Evidence) -> bool:
    """A batch that was healthy still is, so the weights are. Where it has its loss, a large gradient alone does not say that they are broken,
    until the trouble has lasted for ``LASTS`` skipped steps: then other batches must be calm as well."""
    as_before = healthy.gradient_norm <= SAME_GRADIENT * healthy.gradient_before
    has_its_loss = evidence.skips < LASTS and math.isfinite(healthy.excess)
    calm = has_its_loss or as_before or _calm(healthy, evidence)
    return healthy.finite and not healthy.excess > LEAST_EXCESS and calm


def _calm(result: PassResult, evidence: Evidence) -> bool:
    """The gradient is nearer to normal than to what was refused (as ratios), where it was refused for its size."""
    spike = next((f for f in evidence.findings if f.kind == "gradient_spike" and math.isfinite(f.value)), None)
    if spike is None:
        return True
    limit = math.sqrt(spike.value * spike.normal) if spike.normal > 0 else spike.value / 4
    return not result.gradient_norm > limit
