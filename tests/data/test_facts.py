"""What tokens say by themselves, against loops over them."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from surefoot.config.run import RunConfig
from surefoot.data.facts import FactCounts, fact_counts, in_flood
from surefoot.data.loader import Batch, Loader

Ids = npt.NDArray[np.int64]


def batch_of(tokens: Ids, targets: Ids | None = None, documents: Ids | None = None) -> Batch:
    """A batch of these rows, one document each, targets shifted by one."""
    shifted = np.concatenate([tokens[:, 1:], np.full((len(tokens), 1), -100)], axis=1)
    targets = shifted if targets is None else targets
    documents = np.zeros(tokens.shape, dtype=np.int32) if documents is None else documents.astype(np.int32)
    return Batch(0, tokens, targets, documents, documents, np.zeros((len(tokens), 3), np.int64), "", 0, 0, ())


def random_tokens(rows: int, tokens: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 50, (rows, tokens))


def flood_by_hand(row: list[int], period: int) -> set[int]:
    """Tokens of a row inside at least 32 repetitions of this period."""
    inside: set[int] = set()
    for start in range(len(row)):
        stop = start + period
        while stop < len(row) and row[stop] == row[stop - period]:
            stop += 1
        if stop - start >= 32 * period:
            inside |= set(range(start, stop))
    return inside


def test_a_sound_batch_has_no_target_out_of_place(loader: Loader) -> None:
    for index in range(5):
        batch = loader.batch(index)
        counts = fact_counts(batch)
        assert (counts.misaligned, counts.repeated) == (0, 0)
        assert counts.checked == (batch.targets_BT[:, :-1] != -100).sum()
        assert counts.copied == sum(a == b for a, b in zip(batch.tokens_BT.flat, batch.targets_BT.flat, strict=True))
        assert 0 < counts.copied < 0.1 * batch.num_targets


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_shifted_targets_are_out_of_place_and_those_shifted_back_are_copies(loader: Loader, shift: int) -> None:
    batch = loader.batch(0)
    shifted = dataclasses.replace(batch, targets_BT=np.roll(batch.targets_BT, shift, axis=1))
    counts = fact_counts(shifted)
    assert counts.misaligned > 0.8 * counts.checked
    if shift == 1:
        assert counts.copied > 0.9 * batch.num_targets


def test_every_wrong_target_is_counted_but_what_cannot_be_checked_is_not() -> None:
    tokens = random_tokens(3, 40)
    targets = np.concatenate([tokens[:, 1:], np.zeros((3, 1), dtype=np.int64)], axis=1)
    targets[1, 7] += 1
    targets[2, 39] = 999
    targets[0, 5:9] = -100
    counts = fact_counts(batch_of(tokens, targets))
    assert (counts.misaligned, counts.checked) == (1, 3 * 39 - 4)


@pytest.mark.parametrize("period", range(1, 15))
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("offset", [0, 5, 83])
def test_a_flood_is_thirty_two_repetitions_of_up_to_thirteen_tokens(period: int, short: int, offset: int) -> None:
    tokens = random_tokens(4, 600, seed=period)
    piece = np.arange(100, 100 + period)
    length = 32 * period - short
    tokens[2, offset : offset + length] = np.tile(piece, 33)[:length]
    tokens[3] = np.arange(600)
    flood = in_flood(batch_of(tokens))
    if short or period > 13:
        assert not flood.any()
    else:
        assert np.flatnonzero(flood[2]).tolist() == list(range(offset, offset + length))
        assert flood.sum() == length


def test_random_rows_of_few_letters_agree_with_a_search_by_hand() -> None:
    draw = np.random.default_rng(3)
    rows = draw.integers(0, 2, (30, 300))
    for row in range(30):
        period, length = int(draw.integers(1, 9)), int(draw.integers(20, 250))
        rows[row, 40 : 40 + length] = np.tile(draw.integers(0, 2, period), 300)[:length]
    flood = in_flood(batch_of(rows))
    assert flood.any()
    for row in range(30):
        by_hand = set().union(*(flood_by_hand(rows[row].tolist(), period) for period in range(1, 14)))
        assert set(np.flatnonzero(flood[row]).tolist()) == by_hand, row


def test_blanked_and_unpredicted_tokens_are_left_out() -> None:
    tokens = np.full((2, 100), 7)
    whole = fact_counts(batch_of(tokens))
    assert whole == FactCounts(checked=198, misaligned=0, copied=198, repeated=198)
    documents, targets = np.zeros((2, 100)), np.full((2, 100), 7)
    documents[0], targets[0] = -1, -100
    assert fact_counts(batch_of(tokens, targets, documents)) == FactCounts(99, 0, 100, 100)


def test_ranks_add_up(config: RunConfig, loader: Loader, vary: Callable[..., RunConfig]) -> None:
    whole = fact_counts(loader.batch(2))
    parts = [fact_counts(loader.batch(2, (), rank, 2)) for rank in range(2)]
    assert tuple(a + b for a, b in zip(*parts, strict=True)) == tuple(whole)


def test_eight_thousand_tokens_take_well_under_two_milliseconds() -> None:
    batch = batch_of(np.random.default_rng(0).zipf(1.3, (32, 256)).clip(0, 4096))
    took = []
    for _ in range(20):
        begun = time.perf_counter()
        fact_counts(batch)
        took.append(time.perf_counter() - begun)
    assert min(took) < 2e-3
