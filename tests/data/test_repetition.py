"""Stretches that repeat themselves are found by the published rule, blanked as an exclusion blanks, and counted apart."""

import dataclasses
import time

import numpy as np
import numpy.typing as npt
import pytest

from surefoot.config.data import Exclusion, NoRepetitionMask, RepetitionMask
from surefoot.data.hashing import document_id, document_name
from surefoot.data.health import prove_batch
from surefoot.data.pack import BLANK, IGNORE, Rows
from surefoot.data.repetition import mask_repetition, repeated_BT
from tolerances import MASKING_MS

EOS = 256


def rows_of(*rows: list[int]) -> Rows:
    tokens_BT = np.array(rows, dtype=np.int64)
    num, seq_len = tokens_BT.shape
    targets_BT = np.concatenate([tokens_BT[:, 1:], np.full((num, 1), 7, dtype=np.int64)], axis=1)
    positions_BT = np.tile(np.arange(seq_len, dtype=np.int32), (num, 1))
    return Rows(tokens_BT, targets_BT, np.zeros((num, seq_len), dtype=np.int32), positions_BT)


def by_the_rule(tokens: list[int], blank: list[bool], rule: RepetitionMask) -> npt.NDArray[np.bool_]:
    """Every window of ``count`` repetitions of every period, one by one."""
    inside = np.zeros(len(tokens), dtype=bool)
    for period in range(1, rule.max_period + 1):
        length = rule.count * period
        for start in range(len(tokens) - length + 1):
            window = tokens[start : start + length]
            if window == window[:period] * rule.count and not any(blank[start : start + length]):
                inside[start : start + length] = True
    return inside


@pytest.mark.parametrize("rule", [RepetitionMask(max_period=3, count=4), RepetitionMask(max_period=13, count=2)])
@pytest.mark.parametrize("vocabulary", [2, 3])
def test_what_repeats_is_what_a_plain_loop_over_all_windows_finds(rule: RepetitionMask, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    found = 0
    for _ in range(60):
        rows = rows_of(*rng.integers(0, vocabulary, (3, 40)).tolist())
        rows.documents_BT[rng.random((3, 40)) < 0.05] = BLANK
        got_BT = repeated_BT(rows, rule)
        for at in range(3):
            due = by_the_rule(rows.tokens_BT[at].tolist(), (rows.documents_BT[at] == BLANK).tolist(), rule)
            assert (got_BT[at] == due).all()
            found += due.sum()
    assert found > 100


@pytest.mark.parametrize("period", [1, 2, 7, 13])
@pytest.mark.parametrize("start", [0, 3, 84])
def test_thirty_two_repetitions_go_and_thirty_one_stay(period: int, start: int) -> None:
    length = 500
    for count, goes in ((31, False), (32, True)):
        row = [20 + at for at in range(length)]
        row[start : start + count * period] = (list(range(period)) * count)[: count * period]
        rows = rows_of(row)
        before = rows.tokens_BT.copy()
        num = mask_repetition(rows, RepetitionMask(), document_mask=True, eos_id=EOS)
        gone = np.zeros(length, dtype=bool)
        if goes:
            gone[start : start + count * period] = True
        assert num == gone.sum()
        assert (rows.tokens_BT[0, gone] == EOS).all()
        assert (rows.tokens_BT[0, ~gone] == before[0, ~gone]).all()
        assert (rows.targets_BT[0] == IGNORE).tolist() == (gone | np.append(gone[1:], False)).tolist()
        assert ((rows.documents_BT[0] == BLANK) == gone).all()


def test_a_period_of_fourteen_is_text_and_rows_do_not_run_into_each_other() -> None:
    rows = rows_of([at % 14 for at in range(490)], [at % 50 for at in range(490)])
    assert not repeated_BT(rows, RepetitionMask()).any()
    halves = rows_of([*range(20, 40), *[1] * 20], [*[1] * 20, *range(20, 40)])
    assert not repeated_BT(halves, RepetitionMask()).any()


def test_without_the_document_mask_the_whole_row_goes_but_for_its_padding() -> None:
    rows = rows_of([*[1] * 40, *range(20)], list(range(60)))
    rows.documents_BT[0, 55:] = BLANK
    assert mask_repetition(rows, RepetitionMask(), document_mask=False, eos_id=EOS) == 55
    assert (rows.tokens_BT[0, :55] == EOS).all()
    assert (rows.targets_BT[0, :55] == IGNORE).all()
    assert (rows.documents_BT[1] == 0).all()


def test_off_is_off() -> None:
    rows = rows_of([1] * 64)
    assert mask_repetition(rows, NoRepetitionMask(), document_mask=True, eos_id=EOS) == 0
    assert (rows.tokens_BT == 1).all()


TEXTS = [f"{at:03d} some words" + "ab" * (40 if at % 3 == 0 else 3) + f"and {at * 7919} more" for at in range(24)]


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("seq_len", [48, 100])
def test_masked_batches_are_proved_and_the_same_for_any_number_of_ranks(make_loader, document_mask, seq_len):
    loader = make_loader([TEXTS], document_mask=document_mask, seq_len=seq_len, repetition=RepetitionMask(count=20))
    plain = make_loader([TEXTS], document_mask=document_mask, seq_len=seq_len)
    exclusions = [Exclusion(document=document_name(document_id(TEXTS[at].encode()))) for at in (1, 3)]
    masked = 0
    for index in range(12):
        batch, bare = loader.batch(index), plain.batch(index)
        assert prove_batch(batch, loader) == []
        assert prove_batch(loader.batch(index, exclusions), loader, exclusions) == []
        assert batch.digest == bare.digest
        assert batch.num_excluded == 0
        gone = (batch.documents_BT == BLANK) & (bare.documents_BT != BLANK)
        assert batch.num_masked == gone.sum()
        parts = [loader.batch(index, rank=rank, world=2) for rank in range(2)]
        assert (np.concatenate([part.tokens_BT for part in parts]) == batch.tokens_BT).all()
        assert sum(part.num_masked for part in parts) == batch.num_masked
        masked += batch.num_masked
    assert masked > 0


def test_what_is_excluded_has_no_say_in_what_repeats(make_loader) -> None:
    texts = ["ab" * 30, "ab" * 30, "".join(f"{at * at} words that do not repeat, " for at in range(5))]
    loader = make_loader([texts], seq_len=200, batch_size=1, repetition=RepetitionMask(count=29))
    exclusion = [Exclusion(document=document_name(document_id(texts[0].encode())))]
    before = loader.batch(0, exclusion)
    path = loader.splits[0].folder / "tokens.bin"
    tokens = np.fromfile(path, "<u2")
    start, stop = loader.splits[0].document_span(0)
    tokens[start:stop] = 65_535
    path.write_bytes(tokens.tobytes())
    after = loader.batch(0, exclusion)
    for name in ("tokens_BT", "targets_BT", "documents_BT", "positions_BT"):
        assert (getattr(before, name) == getattr(after, name)).all()


def planted(batch, name, index, value):
    array = getattr(batch, name).copy()
    array[index] = value
    return dataclasses.replace(batch, **{name: array})


def num_beginnings(batch) -> int:
    """Masked stretches with a token before them in their row."""
    return int(((batch.documents_BT[:, :-1] != BLANK) & (batch.documents_BT[:, 1:] == BLANK)).sum())


def test_the_proof_sees_a_stretch_left_in_and_a_word_taken_out(make_loader) -> None:
    loader = make_loader([TEXTS], seq_len=100, repetition=RepetitionMask(count=20))
    plain = make_loader([TEXTS], seq_len=100)
    index = next(i for i in range(20) if num_beginnings(loader.batch(i)))
    batch, bare = loader.batch(index), plain.batch(index)
    assert "a stretch that repeats itself is not blank" in "\n".join(prove_batch(bare, loader))
    row, token = np.argwhere((batch.documents_BT != BLANK) & (batch.targets_BT != IGNORE))[-1]
    taken = planted(batch, "documents_BT", (row, token), BLANK)
    assert "a token is blank that does not repeat" in "\n".join(prove_batch(taken, loader))
    row, token = np.argwhere((batch.documents_BT[:, :-1] != BLANK) & (batch.documents_BT[:, 1:] == BLANK))[0]
    shown = planted(batch, "targets_BT", (row, token), bare.targets_BT[row, token])
    assert "a target is a blank token" in "\n".join(prove_batch(shown, loader))
    miscounted = dataclasses.replace(batch, num_masked=batch.num_masked + 1)
    assert f"num_excluded says 0 and num_masked {batch.num_masked + 1}" in "\n".join(prove_batch(miscounted, loader))


def test_eight_thousand_tokens_cost_less_than_two_milliseconds() -> None:
    rng = np.random.default_rng(0)
    rows = rows_of(*rng.choice(200, (8, 1024), p=rng.dirichlet(np.full(200, 0.3))).tolist())
    rows.tokens_BT[3, 100:400] = 5

    def once() -> float:
        begun = time.perf_counter()
        repeated_BT(rows, RepetitionMask())
        return 1e3 * (time.perf_counter() - begun)

    assert min(once() for _ in range(20)) < MASKING_MS
