"""Fast spikes: loss, largest document loss and gradient norm against their own trends, one step at a time."""

import math
import struct
from dataclasses import replace

from surefoot.config.guard import Thresholds
from surefoot.guard.baseline import LARGEST, Baseline
from surefoot.guard.finding import Finding, Kind
from surefoot.guard.lasting import Lasting
from surefoot.guard.limits import Limits
from surefoot.guard.signals import MISSING, StepSignals

LOSS_FLOOR = 0.01
"""Least standard deviation of a loss, nats: logs in bf16 move in steps of 1/32, and most of their steps are the same."""
NORM_FLOOR = 0.02
"""Least standard deviation of the logarithm of a norm."""
CLIP_RATIO = 6.0
"""The least over its trend that is clipped harder."""
PEAKS = 1.5
"""Times the farthest of the healthy outliers so far: gradients of small batches have some that no spread of 64 values tells of."""
FAR = 1.25
"""Times the ratio of an alarm from which half of its sigmas are enough: where batches are small, the spread is wide."""
LARGEST_EXPONENT = 88.0
"""exp of it is about the largest fp32 number."""


def log_norm(norm: float) -> float:
    """What a norm enters its baseline as; missing where it has no logarithm."""
    return math.log(min(max(norm, 1 / LARGEST), LARGEST)) if norm > 0 and math.isfinite(norm) else MISSING


def spike_limits(loss: Baseline, document: Baseline, gradient: Baseline, thresholds: Thresholds) -> Limits:
    """Where alarm begins: the device refuses beyond exactly these, so they are numbers that fp32 holds."""
    sigmas, ratio = thresholds.gradient_sigmas, thresholds.gradient_ratio
    far = gradient.upper(sigmas / 2, math.log(FAR * ratio), NORM_FLOOR, PEAKS)
    high = min(far, gradient.upper(sigmas, math.log(ratio), NORM_FLOOR, PEAKS))
    return Limits(
        loss=_fp32(loss.upper(thresholds.loss_sigmas, thresholds.loss_nats, LOSS_FLOOR)),
        document_loss=_fp32(document.upper(thresholds.document_sigmas, thresholds.document_nats, LOSS_FLOOR)),
        gradient_norm=_exp(high),
        clip_norm=_exp(min(high, gradient.upper(thresholds.clip_sigmas, math.log(CLIP_RATIO), NORM_FLOOR, PEAKS))),
    )


def _exp(logarithm: float) -> float:
    return math.inf if logarithm > LARGEST_EXPONENT else _fp32(math.exp(logarithm))


def _fp32(value: float) -> float:
    if math.isinf(value):
        return value
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def spikes(
    signals: StepSignals,
    limits: Limits,
    loss: Baseline,
    document: Baseline,
    gradient: Baseline,
    fact: tuple[str, str] = ("", ""),
) -> list[Finding]:
    """An alarm for every number beyond its limit. Infinite ones are not this detector's. ``fact`` is what stands out in the batch's tokens."""
    found = []
    largest = signals.document_loss_max
    if limits.loss < signals.loss < math.inf:
        z = loss.z(signals.loss, LOSS_FLOOR)
        spike = _above(signals, "loss_spike", "loss", signals.loss, loss.center, z)
        found.append(replace(spike, text=f"{spike.text}: {fact[1]}", where=fact[0]) if fact[0] else spike)
    if limits.document_loss < largest < math.inf:
        z = document.z(largest, LOSS_FLOOR)
        found.append(_above(signals, "document_spike", "largest document loss", largest, document.center, z))
    if limits.gradient_norm < signals.gradient_norm < math.inf:
        z = gradient.z(log_norm(signals.gradient_norm), NORM_FLOOR)
        found.append(_norm_above(signals, "gradient_spike", "alarm", signals.gradient_norm, gradient.center, z))
    return found


def _above(signals: StepSignals, kind: Kind, what: str, value: float, center: float, z: float) -> Finding:
    return Finding(
        kind=kind,
        severity="alarm",
        text=f"{what} {value:.4g} is {value - center:.3g} nats above its trend of {center:.4g} ({z:.0f} sigmas)",
        batch_index=signals.batch_index,
        onset=signals.batch_index,
        value=value,
        normal=center,
        z=z,
    )


def _norm_above(signals: StepSignals, kind: Kind, severity: str, value: float, center: float, z: float) -> Finding:
    normal = math.exp(center)
    what = "embedding gradient norm" if kind == "embedding_gradient" else "gradient norm"
    return Finding(
        kind=kind,
        severity="alarm" if severity == "alarm" else "warning",
        text=f"{what} {value:.4g} is {value / normal:.3g} times its trend of {normal:.3g} ({z:.0f} sigmas)",
        batch_index=signals.batch_index,
        onset=signals.batch_index,
        value=value,
        normal=normal,
        z=z,
        where="embedding" if kind == "embedding_gradient" else "",
    )


def clipped(signals: StepSignals, limits: Limits, gradient: Baseline, lasting: Lasting) -> float:
    """What the gradient norm enters its baseline as: at most the norm it is clipped to. A warning while it is beyond that."""
    norm = signals.gradient_norm
    lasting.see(
        "gradient_spike",
        norm > limits.clip_norm,
        False,
        lambda: _norm_above(
            signals, "gradient_spike", "warning", norm, gradient.center, gradient.z(log_norm(norm), NORM_FLOOR)
        ),
    )
    return log_norm(min(norm, limits.clip_norm))


def embedding_gradient(baseline: Baseline, signals: StepSignals, thresholds: Thresholds, lasting: Lasting) -> Baseline:
    """The embeddings' gradient norm, which in published runs spikes before the rest; a warning when it does."""
    norm = next((norm for role, norm in signals.role_gradient_norms if role == "embedding"), MISSING)
    value = log_norm(norm)
    if not math.isfinite(value):
        return baseline
    limit = baseline.upper(thresholds.gradient_sigmas, math.log(thresholds.gradient_ratio), NORM_FLOOR, PEAKS)
    z = baseline.z(value, NORM_FLOOR)
    lasting.see(
        "embedding_gradient",
        value > limit,
        False,
        lambda: _norm_above(signals, "embedding_gradient", "warning", norm, baseline.center, z),
    )
    return baseline.accept(min(value, limit))


def frozen_gradient(
    repeats: tuple[float, int], gradient: Baseline, signals: StepSignals, lasting: Lasting
) -> tuple[float, int]:
    """(gradient norm, how often it has come in a row); a warning at ``FROZEN`` of exactly the same: an update silently skipped.

    Logs that print few digits repeat themselves in health: there nothing is said unless the norm has been one constant throughout.
    """
    norm = signals.gradient_norm
    if not math.isfinite(norm):
        return repeats
    count = repeats[1] + 1 if norm == repeats[0] else 1
    before = gradient.values[: len(gradient.values) - count + 1]
    distinct = len(set(before))
    telling = distinct <= 1 or distinct >= 0.75 * len(before)
    lasting.see(
        "frozen_gradient",
        count >= FROZEN and telling,
        count > 1,
        lambda: Finding(
            kind="frozen_gradient",
            severity="warning",
            text=f"gradient norm has been exactly {norm!r} for {count} updates: is it computed anew, and is the update applied?",
            batch_index=signals.batch_index,
            onset=signals.batch_index - count + 1,
            value=norm,
        ),
    )
    return norm, count


FROZEN = 4
"""Updates with the same gradient norm to the bit."""
