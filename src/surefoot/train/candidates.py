"""The documents of a batch that may have done it: those whose losses stand out, with their tokens and text."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from surefoot.config.data import Exclusion
from surefoot.data.blanking import Blanking
from surefoot.data.loader import Batch, Loader
from surefoot.data.pack import BLANK, IGNORE, Rows
from surefoot.data.tokenizer import Tokenizer
from surefoot.guard.evidence import Candidate
from surefoot.guard.suspects import TOKEN_VARIANCE
from surefoot.parallel.mesh import World
from surefoot.parallel.reduce import from_every_rank
from surefoot.train.documents import MIN_TARGETS

PER_RANK = 8
"""Candidates each rank puts forward."""
MAX_TOKENS = 512
MAX_CHARACTERS = 400

Expected = Callable[[str], tuple[float, float]]
"""Domain -> (mean, standard deviation) of its documents' losses lately; NaN where unknown."""
Floats = npt.NDArray[np.float64]


def candidates(
    batch: Batch, losses_BT: Tensor, loader: Loader, tokenizer: Tokenizer, expected: Expected, world: World
) -> tuple[Candidate, ...]:
    """The pieces of all ranks whose loss is furthest from that of their domain, either way; those that are not finite first. Collective."""
    first = world.data_rank * len(batch.samples_B3) // world.data_size
    names = [source.name for source in loader.data.sources]
    loss_BS, targets_BS = piece_means(batch, losses_BT.double().cpu().numpy())
    sources_B = batch.samples_B3[first : first + len(loss_BS), 0]
    distance_BS = np.full(loss_BS.shape, -np.inf)
    for source, name in enumerate(names):
        rows = np.flatnonzero(sources_B == source)
        told = (targets_BS[rows] >= MIN_TARGETS) | ((targets_BS[rows] > 0) & ~np.isfinite(loss_BS[rows]))
        if told.any():
            mean, spread = _normal(expected(name), loss_BS[rows][told])
            noise_BS = np.sqrt(spread**2 + TOKEN_VARIANCE / np.maximum(targets_BS[rows], 1.0))
            far = np.nan_to_num(np.abs(loss_BS[rows] - mean) / noise_BS, nan=np.inf)
            distance_BS[rows] = np.where(told, far, -np.inf)
    order = np.argsort(-distance_BS, axis=None, kind="stable")[:PER_RANK]
    mine = []
    for row, number in zip(*np.unravel_index(order, distance_BS.shape), strict=True):
        if distance_BS[row, number] == -np.inf:
            break
        source, _, source_row = batch.samples_B3[first + row].tolist()
        tokens = batch.tokens_BT[row][batch.documents_BT[row] == number][:MAX_TOKENS].tolist()
        loss = float(loss_BS[row, number])
        mine.append(
            Candidate(
                document=loader.row_documents(source, source_row)[number].document,
                domain=names[source],
                row=int(first + row),
                loss=loss if math.isfinite(loss) else math.nan,
                num_targets=int(targets_BS[row, number]),
                tokens=tuple(tokens),
                text=tokenizer.decode(tokens)[:MAX_CHARACTERS],
            )
        )
    return tuple(
        candidate for of_rank in from_every_rank(mine if world.counts_rows else [], world) for candidate in of_rank
    )


def piece_means(batch: Batch, losses_BT: Floats) -> tuple[Floats, Floats]:
    """Mean loss and number of targets of each piece of this rank's rows, (row, document number in the row); the mean is 0 where nothing is predicted."""
    rows, tokens = losses_BT.shape
    predicts = (batch.targets_BT != IGNORE) & (batch.documents_BT != BLANK)
    place = (batch.documents_BT + np.arange(rows)[:, None] * tokens)[predicts]
    sums = np.bincount(place, weights=losses_BT[predicts], minlength=rows * tokens).reshape(rows, tokens)
    counts = np.bincount(place, minlength=rows * tokens).reshape(rows, tokens).astype(np.float64)
    return np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0), counts


def _normal(expected: tuple[float, float], losses: Floats) -> tuple[float, float]:
    """(centre, spread): what the domain's documents had lately, else the middle of these and 1.4826 times their median distance to it."""
    mean, spread = expected
    if math.isfinite(mean) and spread > 0:
        return mean, spread
    finite = losses[np.isfinite(losses)]
    if len(finite) == 0:
        return 0.0, 1.0
    centre = float(np.median(finite))
    return centre, 1.4826 * float(np.median(np.abs(finite - centre))) or 1.0


def without_documents(batch: Batch, documents: tuple[str, ...], loader: Loader, world: World) -> Batch:
    """The batch with these documents blanked, as an exclusion would."""
    first = world.data_rank * len(batch.samples_B3) // world.data_size
    rows = _copied(batch)
    exclusions = [Exclusion(document=document) for document in documents]
    blanking = Blanking(loader.splits, exclusions, loader.data.seq_len, loader.data.document_mask)
    mine_B3 = batch.samples_B3[first : first + len(rows.tokens_BT)]
    blanking.apply(batch.batch_index, mine_B3, rows, loader.prepared.eos_id)
    return _with_rows(batch, rows)


def half(batch: Batch, which: int, eos_id: int, rank: int) -> Batch:
    """The first (0) or second (1) half of a rank's rows, the others blanked; a rank's only row belongs to the half of its number's parity."""
    rows = _copied(batch)
    count = len(rows.tokens_BT)
    second_B = np.arange(count) >= count // 2 if count > 1 else np.array([rank % 2 == 1])
    gone_B = second_B != bool(which)
    rows.tokens_BT[gone_B] = eos_id
    rows.targets_BT[gone_B] = IGNORE
    rows.documents_BT[gone_B] = BLANK
    return _with_rows(batch, rows)


def _copied(batch: Batch) -> Rows:
    return Rows(batch.tokens_BT.copy(), batch.targets_BT.copy(), batch.documents_BT.copy(), batch.positions_BT)


def _with_rows(batch: Batch, rows: Rows) -> Batch:
    num_targets = int(np.count_nonzero(rows.targets_BT != IGNORE))
    return replace(
        batch,
        tokens_BT=rows.tokens_BT,
        targets_BT=rows.targets_BT,
        documents_BT=rows.documents_BT,
        num_targets=num_targets,
    )
