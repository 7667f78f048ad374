from itertools import pairwise

import numpy as np
import pytest

from surefoot.data.hashing import document_id, document_name
from surefoot.data.pack import BLANK, IGNORE, num_rows, read_rows, row_documents, rows_of_document
from surefoot.data.shards import Split

SEQ_LEN = 16


def by_hand(texts, seq_len, document_mask):
    """Rows built token by token from the texts, the slow and obvious way."""
    stream = [
        (token, number, place) for number, text in enumerate(texts) for place, token in enumerate([*text.encode(), 256])
    ]
    rows = []
    for start in range(0, max(len(stream) - 1, 1), seq_len):
        row = []
        for at in range(start, start + seq_len):
            if at >= len(stream):
                row.append((256, IGNORE, BLANK, None))
                continue
            token, number, place = stream[at]
            following = stream[at + 1] if at + 1 < len(stream) else None
            target = following[0] if following and following[1] == number else IGNORE
            first_number = stream[start][1]
            position = min(place, at - start) if document_mask else at - start
            row.append((token, target, number - first_number, position))
        rows.append(row)
    return rows


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("seq_len", [1, 5, 16, 64, 5000])
def test_rows_are_the_documents_cut_by_hand(write_split, texts, seq_len, document_mask):
    split = Split.open(write_split(texts))
    expected = by_hand(texts, seq_len, document_mask)
    assert num_rows(split, seq_len) == len(expected)
    rows = read_rows([(split, row) for row in range(len(expected))], seq_len, document_mask)
    for at, row in enumerate(expected):
        assert rows.tokens_BT[at].tolist() == [token for token, _, _, _ in row]
        assert rows.targets_BT[at].tolist() == [target for _, target, _, _ in row]
        assert rows.documents_BT[at].tolist() == [document for _, _, document, _ in row]
        real = [
            (position, rows.positions_BT[at, t]) for t, (_, _, _, position) in enumerate(row) if position is not None
        ]
        assert all(expected == actual for expected, actual in real)


@pytest.mark.parametrize("lengths", [(15,), (16,), (17,), (14, 15), (15, 15, 15), (1, 1, 1), (15, 16), (31, 1)])
def test_rows_that_end_at_or_beside_the_end_of_a_document_are_right(write_split, lengths):
    texts = [chr(97 + at) * length for at, length in enumerate(lengths)]
    split = Split.open(write_split(texts))
    expected = by_hand(texts, SEQ_LEN, True)
    assert num_rows(split, SEQ_LEN) == len(expected)
    rows = read_rows([(split, row) for row in range(len(expected))], SEQ_LEN, True)
    assert rows.targets_BT.tolist() == [[target for _, target, _, _ in row] for row in expected]
    assert rows.documents_BT.tolist() == [[document for _, _, document, _ in row] for row in expected]


def test_every_token_is_a_target_once_or_begins_a_document(write_split, texts):
    split = Split.open(write_split(texts))
    rows = read_rows([(split, row) for row in range(num_rows(split, SEQ_LEN))], SEQ_LEN, True)
    targets = rows.targets_BT[rows.targets_BT != IGNORE]
    expected = [token for text in texts for token in [*text.encode(), 256][1:]]
    assert targets.tolist() == expected


def test_rows_of_several_splits_and_dtypes_mix(write_split, texts):
    small, wide = Split.open(write_split(texts)), Split.open(write_split(texts[::-1], vocab_size=70_000))
    mixed = read_rows([(small, 3), (wide, 2), (small, 0)], SEQ_LEN, True)
    for at, (split, row) in enumerate([(small, 3), (wide, 2), (small, 0)]):
        alone = read_rows([(split, row)], SEQ_LEN, True)
        for name in ("tokens_BT", "targets_BT", "documents_BT", "positions_BT"):
            assert (getattr(mixed, name)[at] == getattr(alone, name)[0]).all()


def test_arrays_are_contiguous_and_of_the_contracts_types(write_split, texts):
    rows = read_rows([(Split.open(write_split(texts)), 0)], SEQ_LEN, True)
    for name, dtype in (("tokens_BT", "i8"), ("targets_BT", "i8"), ("documents_BT", "i4"), ("positions_BT", "i4")):
        array = getattr(rows, name)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.dtype == np.dtype(dtype)


def test_rows_and_documents_point_at_each_other(write_split, texts):
    split = Split.open(write_split(texts))
    held = {document_name(document_id(text.encode())): [] for text in texts}
    for row in range(num_rows(split, SEQ_LEN)):
        spans = row_documents(split, row, SEQ_LEN)
        offset = 0
        for span in spans:
            assert span.offset == offset
            offset += span.stop - span.start
            held[span.document].append((row, span.start, span.stop))
        assert offset == min(SEQ_LEN, split.num_tokens - row * SEQ_LEN)
    for number, text in enumerate(texts):
        pieces = held[document_name(document_id(text.encode()))]
        assert [row for row, _, _ in pieces] == list(rows_of_document(split, number, SEQ_LEN))
        assert pieces[0][1] == 0
        assert pieces[-1][2] == len(text.encode()) + 1
        assert all(before[2] == after[1] for before, after in pairwise(pieces))
