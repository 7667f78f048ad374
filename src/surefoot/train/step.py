"""One step: a page. Whatever can change a weight is called by name here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.data.loader import Batch
from surefoot.guard.limits import Limits
from surefoot.guard.lr_change import LrChange
from surefoot.guard.signals import StepSignals
from surefoot.optim.build import apply_update
from surefoot.optim.schedule import lr_at, lr_factor
from surefoot.parallel.forward_backward import MicroBatch
from surefoot.train.documents import domain_stats
from surefoot.train.measure import Counts, Measured, Reading, count, count_nonfinite, measure, read
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState

SMOOTHING = 0.98
"""Weight of the past in the smoothed loss: a span of about 50 steps."""
NO_LIMITS = Limits()
"""Only what is not finite is refused."""


@dataclass(frozen=True)
class StepOutcome:
    """What one batch did, the same numbers on every rank."""

    signals: StepSignals
    skipped: bool
    """The update was refused (or there was nothing to learn from)."""
    metrics: dict[str, float]
    """The reduced metrics of this batch."""
    stop_asked: bool
    """A rank was asked to stop."""


def train_step(
    state: TrainState,
    batch: Batch,
    setup: Setup,
    *,
    limits: Limits = NO_LIMITS,
    lr_changes: Sequence[LrChange] = (),
    regime: int = 0,
    stop_asked: bool = False,
) -> StepOutcome:
    """Consume one batch: gradients over the global count of targets, one global norm, one update or none.

    Advances ``state.batch_index`` always and ``state.step`` when the update was applied. On a skipped step weights, moments, step
    counts and the smoothed loss keep their bits; gradients stay until the caller drops them.
    """
    config = setup.config
    lr = lr_at(state.step, config.optim, config.steps) * lr_factor(state.step, lr_changes)
    counts = count(batch, setup.world, stop_asked=stop_asked)
    state.batch_index += 1
    if counts.num_targets == 0:
        return _nothing_to_learn(state, batch, counts, regime)
    state.optimizer.zero_grad(set_to_none=True)
    micro_batches = split(batch, setup)
    sums = setup.forward_backward(micro_batches, counts.num_targets)
    measured = measure(state, batch, setup, micro_batches, sums)
    # Observed only, a broken gradient is applied, and its scale spreads over all of it: it is looked at before.
    broken = (0, "") if limits.refuse_nonfinite else count_nonfinite(state, setup, float(measured.norm))

    skip = refused(measured, counts, limits)
    clip_norm = min(config.optim.clip_norm or math.inf, limits.clip_norm)
    # What is refused is left as it came, for the diagnosis.
    scale = torch.where(skip, 1.0, state.clipping.divisor(measured.norm, measured.clip_squares, clip_norm, skip))
    before = setup.sample.read()
    apply_update(state.optimizer, lr=lr, scale=scale, skip=skip, gated=config.optim.gated)

    found = read(measured, skip, setup.sample.read() - before, state, setup)
    if limits.refuse_nonfinite:
        broken = count_nonfinite(state, setup, found.norm)
    loss = found.ce_sum / counts.num_targets
    if not found.skipped:
        state.step += 1
        if math.isfinite(loss):
            state.smoothed_loss = smoothed(state.smoothed_loss, loss, state.step)
    signals = StepSignals(
        batch_index=batch.batch_index,
        step=state.step,
        loss=loss,
        lr=lr,
        regime=regime,
        clipped_harder=not found.skipped and clip_norm < found.norm and clip_norm != config.optim.clip_norm,
        nonfinite=broken[0],
        first_nonfinite=broken[1],
        **_reported(counts, found, setup),
    )
    metrics = _metrics(signals, state.smoothed_loss)
    if config.model.loss.z_loss > 0:
        metrics["train/z_loss"] = config.model.loss.z_loss * found.z_sum / counts.num_targets
    if config.data.repetition.kind == "mask":
        metrics["train/tokens_masked"] = float(counts.num_masked)
    return StepOutcome(signals, found.skipped, metrics, counts.stop_asked)


def refused(measured: Measured, counts: Counts, limits: Limits) -> Tensor:
    """Whether the update is beyond a limit, a scalar bool on the device. What is NaN is beyond none but the first."""
    loss = measured.sums[0] / counts.num_targets
    beyond = (
        (loss > limits.loss) | (measured.norm > limits.gradient_norm) | (measured.document_max > limits.document_loss)
    )
    if limits.odd(counts.facts):
        beyond = beyond | (loss < limits.loss_floor)
    if limits.wrong(counts.facts):
        return torch.ones_like(beyond)
    if not limits.refuse_nonfinite:
        return beyond
    return beyond | ~(torch.isfinite(measured.norm) & torch.isfinite(measured.sums[0]))


def split(batch: Batch, setup: Setup) -> list[MicroBatch]:
    """This rank's rows as micro-batches on the device."""
    rows = batch.tokens_BT.shape[0]
    size = setup.config.parallel.micro_batch_size or rows
    return [on_device(batch, setup, slice(start, start + size)) for start in range(0, rows, size)]


def on_device(batch: Batch, setup: Setup, rows: slice = slice(None)) -> MicroBatch:
    """Some rows of a batch as the model takes them; document numbers only where they mask attention."""

    def move(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array[rows]).to(setup.world.device, non_blocking=True)

    documents = move(batch.documents_BT) if setup.config.data.document_mask else None
    return MicroBatch(move(batch.tokens_BT), move(batch.positions_BT), documents, move(batch.targets_BT))


def smoothed(previous: float, loss: float, step: int) -> float:
    """Bias-corrected exponential mean after ``step`` applied losses; ``previous`` is the value after ``step`` - 1."""
    before = previous * (1.0 - SMOOTHING ** (step - 1))
    return (SMOOTHING * before + (1.0 - SMOOTHING) * loss) / (1.0 - SMOOTHING**step)


def _reported(counts: Counts, found: Reading, setup: Setup) -> dict[str, Any]:
    """The fields of the signals that are read off as they are."""
    return {
        "gradient_norm": found.norm,
        "num_targets": counts.num_targets,
        "applied": not found.skipped,
        "document_loss_max": found.document_max,
        "document_loss_p999": found.document_p999,
        "domains": domain_stats([source.name for source in setup.config.data.sources], found.domains),
        "role_gradient_norms": tuple(zip(setup.role_names, map(math.sqrt, found.role_squares), strict=True)),
        "logsumexp_mean": found.lse_sum / counts.num_targets,
        "logsumexp_max": found.lse_max,
        "tokens_excluded": counts.num_excluded,
        "update_size": math.sqrt(found.moved / setup.sample.count),
        "optimizer_steps": found.optimizer_steps,
        "facts": counts.facts,
    }


def _metrics(signals: StepSignals, smoothed_loss: float) -> dict[str, float]:
    """The row of one step; what was not measured is not written."""
    metrics = {
        "train/loss": signals.loss,
        "train/loss_smoothed": smoothed_loss,
        "train/gradient_norm": signals.gradient_norm,
        "train/lr": signals.lr,
        "train/logsumexp_mean": signals.logsumexp_mean,
        "train/logsumexp_max": signals.logsumexp_max,
        "train/num_targets": signals.num_targets,
        "train/tokens_excluded": float(signals.tokens_excluded),
        "train/skipped": float(not signals.applied),
        "train/update_size": signals.update_size,
        "train/nonfinite": float(signals.nonfinite),
        "data/misaligned": signals.facts.misaligned,
        "data/copied": signals.facts.copied,
        "data/repeated": signals.facts.repeated,
        "data/duplicated": signals.facts.duplicated,
    }
    if any(domain.num_documents for domain in signals.domains):
        metrics["train/document_loss_max"] = signals.document_loss_max
        metrics["train/document_loss_p999"] = signals.document_loss_p999
    return metrics | {f"train/gradient_norm/{role}": norm for role, norm in signals.role_gradient_norms}


def _nothing_to_learn(state: TrainState, batch: Batch, counts: Counts, regime: int) -> StepOutcome:
    signals = StepSignals(
        batch_index=batch.batch_index,
        step=state.step,
        loss=math.nan,
        gradient_norm=math.nan,
        num_targets=0,
        applied=False,
        regime=regime,
        tokens_excluded=counts.num_excluded,
        facts=counts.facts,
    )
    metrics = {
        "train/num_targets": 0.0,
        "train/tokens_excluded": float(counts.num_excluded),
        "train/skipped": 1.0,
    }
    return StepOutcome(signals=signals, skipped=True, metrics=metrics, stop_asked=counts.stop_asked)
