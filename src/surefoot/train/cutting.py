"""The length ramp: rows cut into shorter ones just before the model, so that samples, documents and tokens of a batch stay what they are."""

from bisect import bisect_right

from surefoot.config.data import DataConfig
from surefoot.parallel.forward_backward import MicroBatch


def seq_len_at(data: DataConfig, batch_index: int) -> int:
    """Tokens that attend to each other at most in a training row of this batch."""
    begun = bisect_right([stage.start_batch for stage in data.length_stages], batch_index)
    return data.length_stages[begun - 1].seq_len if begun else data.seq_len


def lengths(data: DataConfig) -> list[int]:
    """Every row length that is trained or evaluated on, once."""
    return list(dict.fromkeys([data.seq_len, *(stage.seq_len for stage in data.length_stages)]))


def cut_rows(micro: MicroBatch, seq_len: int) -> MicroBatch:
    """(B, T) as (B x T / seq_len, seq_len): nothing attends across a cut; positions, document numbers and targets stay what they are."""
    if micro.tokens_BT.shape[1] == seq_len:
        return micro
    documents = None if micro.documents_BT is None else micro.documents_BT.reshape(-1, seq_len)
    return MicroBatch(
        micro.tokens_BT.reshape(-1, seq_len),
        micro.positions_BT.reshape(-1, seq_len),
        documents,
        micro.targets_BT.reshape(-1, seq_len),
    )
