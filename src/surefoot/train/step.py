"""One step: a page. Whatever can change a weight is called by name here."""

import math
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.data.loader import Batch
from surefoot.guard.signals import StepSignals
from surefoot.optim.build import apply_update
from surefoot.optim.clip import clip_scale, squared_norm_share
from surefoot.optim.schedule import lr_at
from surefoot.parallel.forward_backward import MicroBatch
from surefoot.parallel.reduce import max_over_ranks, sum_over_ranks
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState

SMOOTHING = 0.98
"""Weight of the past in the smoothed loss: a span of about 50 steps."""


@dataclass(frozen=True)
class StepOutcome:
    """What one batch did, the same numbers on every rank."""

    signals: StepSignals
    skipped: bool
    """The update was refused (or there was nothing to learn from)."""
    metrics: dict[str, float]
    """The reduced ``train/*`` metrics of this batch."""
    stop_asked: bool
    """A rank was asked to stop."""


def train_step(state: TrainState, batch: Batch, setup: Setup, *, stop_asked: bool = False) -> StepOutcome:
    """Consume one batch: gradients over the global count of targets, one global norm, one update or none.

    Advances ``state.batch_index`` always and ``state.step`` when the update was applied. On a skipped step weights, moments, step
    counts and the smoothed loss keep their bits; gradients stay until the caller drops them.
    """
    config = setup.config
    lr = lr_at(state.step, config.optim, config.steps)
    counts = sum_over_ranks([batch.num_targets, batch.num_excluded, float(stop_asked)], setup.world).tolist()
    num_targets = round(counts[0])
    state.batch_index += 1
    if num_targets == 0:
        return _nothing_to_learn(state, batch, counts)
    state.optimizer.zero_grad(set_to_none=True)
    sums = setup.forward_backward(split(batch, setup), num_targets)
    share, broken = squared_norm_share(state.parameters.values(), first_replica=setup.first_replica)
    parts = [torch.stack([s.ce_sum, s.z_sum, s.lse_sum]).double() for s in sums]
    ce, z, lse = torch.stack(parts).sum(0)
    total = sum_over_ranks([share, ce, z, lse, broken], setup.world)
    lse_max = max_over_ranks([torch.stack([s.lse_max for s in sums]).max()], setup.world)

    norm = torch.where(total[4] > 0, math.nan, total[0].sqrt())
    skip = ~(torch.isfinite(norm) & torch.isfinite(total[1]))
    apply_update(
        state.optimizer, lr=lr, scale=clip_scale(norm, config.optim.clip_norm), skip=skip, gated=config.optim.gated
    )

    gradient_norm, ce_sum, z_sum, lse_sum, lse_top, skipped = torch.stack(
        [norm, *total[1:4], lse_max[0], skip.double()]
    ).tolist()
    loss = ce_sum / num_targets
    if not skipped:
        state.step += 1
        state.smoothed_loss = smoothed(state.smoothed_loss, loss, state.step)
    metrics = {
        "train/loss": loss,
        "train/loss_smoothed": state.smoothed_loss,
        "train/gradient_norm": gradient_norm,
        "train/lr": lr,
        "train/logsumexp_mean": lse_sum / num_targets,
        "train/logsumexp_max": lse_top,
        "train/num_targets": num_targets,
        "train/tokens_excluded": counts[1],
        "train/skipped": float(skipped),
    }
    if config.model.loss.z_loss > 0:
        metrics["train/z_loss"] = config.model.loss.z_loss * z_sum / num_targets
    signals = StepSignals(
        batch_index=batch.batch_index, step=state.step, loss=loss, gradient_norm=gradient_norm, num_targets=num_targets
    )
    return StepOutcome(signals=signals, skipped=bool(skipped), metrics=metrics, stop_asked=counts[2] > 0)


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


def _nothing_to_learn(state: TrainState, batch: Batch, counts: list[float]) -> StepOutcome:
    signals = StepSignals(
        batch_index=batch.batch_index, step=state.step, loss=math.nan, gradient_norm=math.nan, num_targets=0
    )
    metrics = {"train/num_targets": 0.0, "train/tokens_excluded": counts[1], "train/skipped": 1.0}
    return StepOutcome(signals=signals, skipped=True, metrics=metrics, stop_asked=counts[2] > 0)
