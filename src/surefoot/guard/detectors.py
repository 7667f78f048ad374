"""Signals in, findings out: all detectors over one step, with what they remember."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.config.guard import Thresholds
from surefoot.guard.attention import attention_growth, entropy_collapse
from surefoot.guard.baseline import Baseline
from surefoot.guard.data_facts import Share, duplicated, evidence, loss_floor, misaligned, too_good, unexplained_drop
from surefoot.guard.document_losses import DocumentLoss, add_domains, usual_loss
from surefoot.guard.finding import Finding
from surefoot.guard.held_out import HeldOut, validation
from surefoot.guard.inside import ProbeView, Series, remember
from surefoot.guard.lasting import Lasting
from surefoot.guard.limits import Limits
from surefoot.guard.mixture_drift import DomainShare, mixture_drift
from surefoot.guard.saved import thawed
from surefoot.guard.signals import MISSING, EvalSignals, ProbeSignals, StepSignals
from surefoot.guard.slow import Best, Drift, gradient_creep, logit_drift, slow_spike
from surefoot.guard.spikes import (
    LOSS_FLOOR,
    NORM_FLOOR,
    clipped,
    embedding_gradient,
    frozen_gradient,
    log_norm,
    spike_limits,
    spikes,
)
from surefoot.guard.updates import Updates, optimizer_steps, update_size, update_z
from surefoot.guard.weights import activation_explosion, broken_weights, stale_second_moment, update_ratio

LONG_GAP = 64
"""Steps missing from a log after which its level is opened anew (where gaps have not been as long before)."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Where a step stands, in robust standard deviations from its trend; NaN where there is no baseline yet or no value."""

    loss: float = MISSING
    document_loss: float = MISSING
    gradient_norm: float = MISSING
    update_size: float = MISSING
    expected_loss: float = MISSING
    """Nats per token: the trend's value for this step."""


@dataclass(frozen=True, kw_only=True)
class DetectorState:
    """All baselines. Plain numbers and tuples, none of them NaN or infinite, so that JSON brings them back to the bit.

    Nothing of a rejected step enters, but for the values that each ``Baseline`` keeps apart until the next accepted step.
    """

    batch_index: int = -1
    """Last accepted batch; -1 before there is one."""
    step: int = -1
    stride: int = 0
    """Steps between the last two accepted values; more than 1 only in logs."""
    regime: int = 0
    """Of the signals seen last."""
    loss: Baseline = Baseline()
    document: Baseline = Baseline()
    gradient: Baseline = Baseline()
    """Of the logarithm of the gradient norm."""
    embedding: Baseline = Baseline()
    """Of the logarithm of the embeddings' gradient norm."""
    updates: Updates = Updates()
    copied: Share = Share()
    repeated: Share = Share()
    duplicated: Share = Share()
    slow: Best = Best()
    creep: Best = Best()
    drift: Drift = Drift()
    repeats: tuple[float, int] = (0.0, 0)
    """The last gradient norm, and how often it has come in a row."""
    drops: int = 0
    """Steps in a row with the loss far below its band."""
    domains: tuple[DocumentLoss, ...] = ()
    shares: tuple[DomainShare, ...] = ()
    probes: Series = ()
    held_out: tuple[HeldOut, ...] = ()
    active: tuple[str, ...] = ()
    """Conditions that were said and have not ended."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "DetectorState":
        """The state that ``to_dict`` wrote; what an older one lacks starts afresh."""
        return thawed(cls, data)


@dataclass(frozen=True)
class Detected:
    """What detectors make of one set of signals."""

    state: DetectorState
    findings: tuple[Finding, ...] = ()
    scores: Scores = Scores()


def limits_of(state: DetectorState, thresholds: Thresholds, regime: int | None = None) -> Limits:
    """What the next update may not exceed, from accepted steps only. ``regime`` is the next batch's where known: the first of a new one has no
    limits, since its level is not known yet."""
    state = _in_regime(state, regime)
    return replace(
        spike_limits(state.loss, state.document, state.gradient, thresholds),
        loss_floor=loss_floor(state.loss, thresholds),
        copied=state.copied.limit(),
        repeated=state.repeated.limit(),
        duplicated=state.duplicated.limit(),
    )


def observe_step(state: DetectorState, signals: StepSignals, thresholds: Thresholds) -> Detected:
    """Judge one step against the baselines; its values enter them only when the update was applied and is not an outlier."""
    if signals.num_targets == 0:
        return Detected(state)
    state = _in_regime(state, signals.regime)
    scores = _scores(state, signals)
    fact = evidence(signals.facts, state.copied, state.repeated)
    found = _nonfinite(signals)
    by_tokens = (
        misaligned(signals),
        duplicated(signals, state.duplicated),
        too_good(signals, state.loss, thresholds, fact),
    )
    found += [finding for finding in by_tokens if finding]
    limits = limits_of(state, thresholds)
    found += spikes(signals, limits, state.loss, state.document, state.gradient, fact)
    if found or not signals.applied or not signals.finite:
        return Detected(_rejected(state, signals), tuple(found), scores)
    lasting = Lasting(state.active)
    slow: list[Finding] = []
    state = _over_gap(state, signals.step)
    after = replace(
        state,
        batch_index=signals.batch_index,
        step=signals.step,
        stride=signals.step - state.step if state.step >= 0 else 0,
        loss=state.loss.accept(signals.loss),
        document=state.document.accept(signals.document_loss_max),
        gradient=state.gradient.accept(clipped(signals, limits, state.gradient, lasting)),
        embedding=embedding_gradient(state.embedding, signals, thresholds, lasting),
        updates=update_size(state.updates, signals, thresholds, lasting),
        copied=state.copied.add(signals.facts.copied),
        repeated=state.repeated.add(signals.facts.repeated),
        duplicated=state.duplicated.add(signals.facts.duplicated),
        slow=slow_spike(state.slow, signals, state.loss.above, thresholds, slow),
        creep=gradient_creep(state.creep, log_norm(signals.gradient_norm), signals, lasting),
        drift=logit_drift(state.drift, signals, lasting),
        repeats=frozen_gradient(state.repeats, state.gradient, signals, lasting),
        drops=unexplained_drop(state.drops, signals, state.loss, thresholds, lasting),
        shares=mixture_drift(state.shares, signals, lasting),
        domains=add_domains(state.domains, signals.domains, signals.loss),
    )
    optimizer_steps(signals, lasting)
    return Detected(replace(after, active=lasting.active), (*slow, *lasting.findings), scores)


def observe_probe(state: DetectorState, probe: ProbeSignals, thresholds: Thresholds, total_steps: int) -> Detected:
    """Judge a cadence probe; ``total_steps`` bounds the forecasts. Findings are placed at the last accepted batch."""
    lasting = Lasting(state.active)
    view = ProbeView(probe, state.batch_index, thresholds, total_steps, dict(state.probes), lasting)
    broken_weights(view)
    update_ratio(view)
    activation_explosion(view)
    attention_growth(view)
    entropy_collapse(view)
    stale_second_moment(view)
    after = replace(state, probes=remember(state.probes, probe), active=lasting.active)
    return Detected(after, tuple(lasting.findings))


def observe_evaluation(state: DetectorState, evaluation: EvalSignals, thresholds: Thresholds) -> Detected:
    """Judge held-out losses against their own best and the training loss. Findings are placed at the last accepted batch."""
    lasting = Lasting(state.active)
    held_out = validation(state.held_out, evaluation, state.batch_index, state.slow, lasting)
    return Detected(replace(state, held_out=held_out, active=lasting.active), tuple(lasting.findings))


def expected_document_loss(state: DetectorState, domain: str) -> tuple[float, float]:
    """(mean, standard deviation) of a domain's document losses lately, nats per token; (NaN, NaN) where unknown."""
    if not state.loss.ready:
        return MISSING, MISSING
    return usual_loss(state.domains, domain, state.loss.center)


def accept_level(state: DetectorState) -> DetectorState:
    """Take the level of the values lately rejected for the new normal. The band is wide at first, and tight again after a few accepted steps."""
    return replace(
        state,
        loss=state.loss.accept_level(),
        document=state.document.accept_level(),
        gradient=state.gradient.accept_level(),
        copied=Share(),
        repeated=Share(),
        duplicated=Share(),
        slow=Best(),
    )


def _in_regime(state: DetectorState, regime: int | None) -> DetectorState:
    """The state for a batch of a regime: a planned change of mixture or batch size opens all levels anew."""
    if regime is None or regime == state.regime:
        return state
    opened = _reopened(state)
    return replace(
        opened,
        regime=regime,
        embedding=state.embedding.reopen(),
        copied=Share(),
        repeated=Share(),
        duplicated=Share(),
        shares=(),
        creep=Best(),
    )


def _over_gap(state: DetectorState, step: int) -> DetectorState:
    gap = step - state.step
    long = state.step >= 0 and gap > LONG_GAP * max(1, state.stride)
    return _reopened(state) if long else state


def _reopened(state: DetectorState) -> DetectorState:
    return replace(
        state,
        loss=state.loss.reopen(),
        document=state.document.reopen(),
        gradient=state.gradient.reopen(),
        slow=Best(),
    )


def _rejected(state: DetectorState, signals: StepSignals) -> DetectorState:
    return replace(
        state,
        loss=state.loss.reject(signals.loss),
        document=state.document.reject(signals.document_loss_max),
        gradient=state.gradient.reject(log_norm(signals.gradient_norm)),
    )


def _scores(state: DetectorState, signals: StepSignals) -> Scores:
    return Scores(
        loss=state.loss.z(signals.loss, LOSS_FLOOR),
        document_loss=state.document.z(signals.document_loss_max, LOSS_FLOOR),
        gradient_norm=state.gradient.z(log_norm(signals.gradient_norm), NORM_FLOOR),
        update_size=update_z(state.updates, signals),
        expected_loss=state.loss.center if state.loss.ready else MISSING,
    )


def _nonfinite(signals: StepSignals) -> list[Finding]:
    """An alarm where loss, gradient norm or largest document loss is not a number an update may be made of."""
    if signals.finite and not math.isinf(signals.document_loss_max):
        return []
    text = f"loss {signals.loss:.4g}, gradient norm {signals.gradient_norm:.4g}: not finite"
    if signals.finite:
        text = f"largest document loss {signals.document_loss_max}: not finite"
    if signals.nonfinite:
        text += f"; {signals.nonfinite:,} elements of gradients, the first in {signals.first_nonfinite}"
    return [
        Finding(
            kind="nonfinite",
            severity="alarm",
            text=text,
            batch_index=signals.batch_index,
            onset=signals.batch_index,
            value=signals.gradient_norm if math.isfinite(signals.loss) else signals.loss,
            where=signals.first_nonfinite,
        )
    ]
