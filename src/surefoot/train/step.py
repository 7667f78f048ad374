"""One step: a page. Whatever can change a weight is called by name here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.config.ramp import ramp_factor
from surefoot.data.loader import Batch
from surefoot.guard.limits import Limits
from surefoot.guard.lr_change import LrChange
from surefoot.guard.signals import StepSignals
from surefoot.model.loss import LossSums
from surefoot.optim.optimizer import Update
from surefoot.optim.qk_clip import watched
from surefoot.optim.schedule import Landing, lr_at, lr_factor
from surefoot.parallel.forward_backward import MicroBatch
from surefoot.parallel.reduce import max_over_ranks
from surefoot.train.cutting import cut_rows, seq_len_at
from surefoot.train.documents import domain_stats
from surefoot.train.measure import Counts, Measured, Reading, count, count_nonfinite, measure, read
from surefoot.train.noise import PieceNorms, observe_noise, pass_pieces
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
    end: Landing | None = None,
) -> StepOutcome:
    """Consume one batch: gradients over the global count of targets, one global norm, one update or none.

    Advances ``state.batch_index`` always and ``state.step`` when the update was applied. On a skipped step weights, moments, step
    counts and the smoothed loss keep their bits; gradients stay until the caller drops them. ``end``: None is after ``setup.num_steps``.
    """
    config = setup.config
    lr = scheduled(state.step, batch, setup, end) * lr_factor(state.step, lr_changes)
    counts = count(batch, setup.world, stop_asked=stop_asked)
    state.batch_index += 1
    if counts.num_targets == 0:
        return _nothing_to_learn(state, batch, counts, regime)
    state.loss_scale.grow()
    pieces = noise_passes(state, batch, setup)
    state.optimizer.zero_grad()
    micro_batches = split(batch, setup)
    sums = gradients(setup, micro_batches, counts.num_targets)
    measured = measure(state, batch, setup, micro_batches, sums)
    # Observed only, a broken gradient is applied, and its scale spreads over all of it: it is looked at before.
    broken = (0, "") if limits.refuse_nonfinite else count_nonfinite(state, setup, float(measured.norm))

    clip_norm = min(config.optim.clip_norm or math.inf, limits.clip_norm)
    skip = refused(measured, counts, limits) | state.loss_scale.overflow(measured.norm, measured.sums[0])
    change, heads = move(state, batch, setup, measured, lr=lr, clip_norm=clip_norm, skip=skip)

    found = read(measured, skip, change, state, setup)
    if limits.refuse_nonfinite:
        broken = count_nonfinite(state, setup, found.norm)
    loss = found.ce_sum / counts.num_targets
    overflowed = state.loss_scale.settle(found.norm, loss, applied=not found.skipped)
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
        overflowed=overflowed,
        clipped_harder=not found.skipped and clip_norm < found.norm and clip_norm != config.optim.clip_norm,
        nonfinite=broken[0],
        first_nonfinite=broken[1],
        **_reported(counts, found, setup),
    )
    metrics = _metrics(signals, state.smoothed_loss) | heads | _of_settings(state, counts, found, setup)
    metrics |= observe_noise(state, pieces, found.norm, applied=not found.skipped)
    return StepOutcome(signals, found.skipped, metrics, counts.stop_asked)


def scheduled(step: int, batch: Batch, setup: Setup, end: Landing | None = None) -> float:
    """The rate of the schedule for a batch of this size."""
    config = setup.config
    ramp = ramp_factor(len(batch.samples_B3), config.data.batch_size, config.optim.ramp_lr)
    end = end or Landing(setup.num_steps)
    return lr_at(step, config.optim, end.last_step, end.decay_steps) * ramp


def noise_passes(state: TrainState, batch: Batch, setup: Setup) -> PieceNorms | None:
    """The gradients of the batch's pieces, when the noise scale is due with its update: before it, and before its own gradient is there."""
    log = setup.config.log
    if not log.noise_every or (state.step + 1) % log.noise_every:
        return None
    # Every n-th row, not a stretch of them: so a piece is the same rows on any number of ranks.
    pieces = [split(batch, setup, slice(k, None, log.noise_pieces)) for k in range(log.noise_pieces)]
    return pass_pieces(state, setup, pieces, num_rows=len(batch.samples_B3))


def gradients(setup: Setup, micro_batches: Sequence[MicroBatch], num_targets: int) -> list[LossSums]:
    """The passes whose update may be applied, their attention logits watched where QK-clip is on."""
    with watched(setup.qk_clip):
        return setup.forward_backward(micro_batches, num_targets)


def move(
    state: TrainState, batch: Batch, setup: Setup, measured: Measured, *, lr: float, clip_norm: float, skip: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The update, clipped, or none: all that changes weights.

    Returns what it did to the sample of weights, as far as this rank counts it, and the metrics of QK-clip, whose part it leaves out.
    """
    config = setup.config
    # What is refused is left as it came, for the diagnosis.
    scale = torch.where(skip, 1.0, state.clipping.divisor(measured.norm, measured.clip_squares, clip_norm, skip))
    before = setup.sample.read()
    update = Update(
        lr=lr, scale=scale, skip=skip, gated=config.optim.gated, seed=config.seed, batch_index=batch.batch_index
    )
    state.optimizer.apply(update)
    change = setup.sample.read() - before
    return change, clip_heads(setup, skip)


def clip_heads(setup: Setup, skip: Tensor) -> dict[str, float]:
    """QK-clip, after the update and only where there was one: no part of its size, nor of what a probe recomputes from the moments.

    Returns its metrics; nothing, where it is off.
    """
    if setup.qk_clip is None:
        return {}
    # NaN does not survive a maximum over ranks, and would clip nothing
    mine_LN = setup.qk_clip.maxima.largest_LN.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    largest_LN = max_over_ranks([mine_LN], setup.world).view_as(mine_LN)
    metrics = {"train/heads_clipped": 0.0}
    if not bool(skip):
        metrics["train/heads_clipped"] = float(setup.qk_clip.apply(largest_LN.tolist()))
    if (top := float(largest_LN.max())) > -math.inf:
        metrics["train/attention_logit_max"] = top
    return metrics


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


def split(batch: Batch, setup: Setup, part: slice = slice(None)) -> list[MicroBatch]:
    """This rank's rows, or part of them, as micro-batches on the device."""
    rows = range(batch.tokens_BT.shape[0])[part]
    size = setup.config.parallel.micro_batch_size or len(rows)
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [on_device(batch, setup, slice(chunk.start, chunk.stop, chunk.step)) for chunk in chunks]


def on_device(batch: Batch, setup: Setup, rows: slice = slice(None)) -> MicroBatch:
    """Some rows of a batch as the model takes them, cut where the length ramp says so; document numbers only where they mask attention."""

    def move(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array[rows]).to(setup.world.device, non_blocking=True)

    documents = move(batch.documents_BT) if setup.config.data.document_mask else None
    whole = MicroBatch(move(batch.tokens_BT), move(batch.positions_BT), documents, move(batch.targets_BT))
    return cut_rows(whole, seq_len_at(setup.config.data, batch.batch_index))


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


def _of_settings(state: TrainState, counts: Counts, found: Reading, setup: Setup) -> dict[str, float]:
    """Metrics that only some runs have."""
    config = setup.config
    metrics = {}
    if config.model.loss.z_loss > 0:
        metrics["train/z_loss"] = config.model.loss.z_loss * found.z_sum / counts.num_targets
    if config.data.repetition.kind == "mask":
        metrics["train/tokens_masked"] = float(counts.num_masked)
    if state.loss_scale.config is not None:
        metrics["train/loss_scale"] = state.loss_scale.value
        metrics["train/overflows"] = float(state.loss_scale.overflows)
    return metrics


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
