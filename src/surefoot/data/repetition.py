"""N-grams repeated over and over in a row are blanked when it is read (OLMo 2, arXiv:2501.00656 section 3.1).

The rule: at least ``count`` repetitions, one right after the other, of any ``max_period`` tokens or fewer. It is a function of the row as
it would be trained on, so that what an exclusion has blanked has no say in it, and neither has padding.
"""

import numpy as np
import numpy.typing as npt

from surefoot.config.data import NoRepetitionMask, RepetitionMask
from surefoot.data.pack import BLANK, IGNORE, Rows


def repeated_BT(rows: Rows, rule: RepetitionMask) -> npt.NDArray[np.bool_]:
    """The tokens inside a stretch that repeats itself, shape (B, T), by one comparison of all rows per period."""
    num, seq_len = rows.tokens_BT.shape
    margin = min(rule.max_period, seq_len)
    apart = np.arange(-1, -num * (seq_len + margin) - 1, -1).reshape(
        num, -1
    )  # ids that equal no other: what ends a stretch
    ids = apart.copy()
    np.copyto(ids[:, :seq_len], rows.tokens_BT, where=rows.documents_BT != BLANK)
    flat = ids.reshape(-1)
    edges = np.zeros(len(flat) + 1, dtype=np.int32)
    for period in range(1, margin + 1):
        # A stretch of n repetitions is one in which (n - 1) periods in a row equal the token one period on.
        same = flat[:-period] == flat[period:]
        least = (rule.count - 1) * period
        if np.count_nonzero(same) < least:
            continue
        breaks = np.flatnonzero(~same)
        starts = np.concatenate([[0], breaks + 1])
        lengths = np.append(breaks, len(same)) - starts
        long = lengths >= least
        np.add.at(edges, starts[long], 1)
        np.add.at(edges, starts[long] + lengths[long] + period, -1)
    inside: npt.NDArray[np.bool_] = np.cumsum(edges[:-1]).reshape(num, -1)[:, :seq_len] > 0
    return inside


def mask_repetition(rows: Rows, rule: RepetitionMask | NoRepetitionMask, *, document_mask: bool, eos_id: int) -> int:
    """Blank, in place, what repeats itself; returns how many tokens went.

    As in an exclusion ids become ``eos_id``, targets are ignored and document numbers are BLANK; so is the target of the token before a
    stretch, which would be its first token. Without ``document_mask`` later tokens would still look at the hole, so the whole row goes.
    """
    if isinstance(rule, NoRepetitionMask):
        return 0
    gone_BT = repeated_BT(rows, rule)
    if not gone_BT.any():
        return 0
    if not document_mask:
        gone_BT = gone_BT.any(axis=1, keepdims=True) & (rows.documents_BT != BLANK)
    rows.tokens_BT[gone_BT] = eos_id
    rows.targets_BT[gone_BT] = IGNORE
    rows.targets_BT[:, :-1][gone_BT[:, 1:]] = IGNORE
    rows.documents_BT[gone_BT] = BLANK
    return int(np.count_nonzero(gone_BT))
