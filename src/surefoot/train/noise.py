"""The gradient noise scale measured: a batch passed again in pieces, before its update, at the same weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.model.loss import IGNORE
from surefoot.optim.clip import squared_norm_share
from surefoot.optim.noise_scale import noise_of
from surefoot.parallel.forward_backward import MicroBatch
from surefoot.parallel.reduce import of_rows, sum_over_ranks
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState


@dataclass(frozen=True)
class PieceNorms:
    """Of each piece of a batch, over all ranks."""

    squares: tuple[float, ...]
    """Squared norm of the gradient of its mean loss."""
    sizes: tuple[int, ...]
    """Its targets."""
    num_rows: int
    """Rows of all pieces together: of the batch."""


def pass_pieces(
    state: TrainState, setup: Setup, pieces: Sequence[Sequence[MicroBatch]], *, num_rows: int
) -> PieceNorms | None:
    """The gradient norm of every piece; None where one predicts nothing or breaks. Collective; leaves no gradient behind."""
    counted = [sum((micro.targets_BT != IGNORE).sum() for micro in piece) for piece in pieces]
    sizes = [
        round(n)
        for n in sum_over_ranks(of_rows([torch.as_tensor(n) for n in counted], setup.world), setup.world).tolist()
    ]
    if min(sizes) == 0:
        return None
    shares = []
    for piece, size in zip(pieces, sizes, strict=True):
        state.optimizer.zero_grad()
        setup.forward_backward(piece, size)
        shares.append(squared_norm_share(state.parameters.values(), first_replica=setup.first_replica).total)
    state.optimizer.zero_grad()
    squares = sum_over_ranks(shares, setup.world).tolist()
    return PieceNorms(tuple(squares), tuple(sizes), num_rows) if all(map(math.isfinite, squares)) else None


def observe_noise(state: TrainState, pieces: PieceNorms | None, norm: float, *, applied: bool) -> dict[str, float]:
    """Bring the smoothed figures up to date with one applied batch and return its row's metrics; nothing where nothing was measured.

    ``norm``: of the whole batch's gradient.
    """
    if pieces is None or not applied or not math.isfinite(norm):
        return {}
    num_targets = sum(pieces.sizes)
    state.noise = state.noise.after(noise_of(pieces.squares, pieces.sizes, norm**2, num_targets))
    found = state.noise.smoothed()
    metrics = {"train/noise_signal": found.squared_norm, "train/noise_trace": found.trace}
    tokens = state.noise.critical_batch()
    if math.isnan(tokens):
        return metrics
    return metrics | {"train/noise_scale": tokens, "train/noise_scale_rows": tokens * pieces.num_rows / num_targets}
