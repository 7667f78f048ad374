"""What the tokens of a batch say without the model: targets out of place, targets in the input, floods of repetition."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from surefoot.config.data import RepetitionMask
from surefoot.data.loader import Batch
from surefoot.data.pack import IGNORE, Rows
from surefoot.data.repetition import repeated_BT

RULE = RepetitionMask()
"""What a flood is: the published rule, whether or not the run masks by it."""

Bools = npt.NDArray[np.bool_]


class FactCounts(NamedTuple):
    """Counts over one rank's rows; they add up over ranks."""

    checked: int
    """Targets whose next token stands in the same row."""
    misaligned: int
    """Of them, those that are not that token."""
    copied: int
    """Targets equal to their own input token."""
    repeated: int
    """Tokens that predict something and lie inside a flood."""


def fact_counts(batch: Batch) -> FactCounts:
    """The counts of a batch's rows. Tokens that predict nothing (blanked, padding, last of a document) are left out of all of them."""
    tokens, targets = batch.tokens_BT, batch.targets_BT
    predicts = targets != IGNORE
    inside = predicts[:, :-1]
    return FactCounts(
        checked=int(np.count_nonzero(inside)),
        misaligned=int(np.count_nonzero((targets[:, :-1] != tokens[:, 1:]) & inside)),
        copied=int(np.count_nonzero((targets == tokens) & predicts)),
        repeated=int(np.count_nonzero(in_flood(batch) & predicts)),
    )


def in_flood(batch: Batch) -> Bools:
    """(B, T), true for tokens inside a stretch that repeats itself as RULE says.

    A stretch of period p is one where every token equals the one p before it; it covers at least 31 p such tokens, so four neighbouring
    points of a grid of width 31 p // 4. Only rows where four such points agree are looked at in full: a healthy batch has next to none.
    """
    tokens_BT = batch.tokens_BT
    suspicious_B = np.zeros(len(tokens_BT), dtype=np.bool_)
    for period in range(1, RULE.max_period + 1):
        shortest = (RULE.count - 1) * period
        if tokens_BT.shape[1] < shortest + period:
            break
        step = shortest // 4
        same = tokens_BT[:, period::step] == tokens_BT[:, :-period:step]
        suspicious_B |= (same[:, :-3] & same[:, 1:-2] & same[:, 2:-1] & same[:, 3:]).any(axis=1)
    flood = np.zeros(tokens_BT.shape, dtype=np.bool_)
    at = np.flatnonzero(suspicious_B)
    if len(at):
        some = Rows(tokens_BT[at], batch.targets_BT[at], batch.documents_BT[at], batch.positions_BT[at])
        flood[at] = repeated_BT(some, RULE)
    return flood
