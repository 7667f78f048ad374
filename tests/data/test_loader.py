import numpy as np
import pytest

from surefoot.config.data import BatchStage, Exclusion
from surefoot.data.errors import DataError
from surefoot.data.hashing import document_id, document_name
from surefoot.data.loader import EvalRows, Loader
from surefoot.data.pack import BLANK, IGNORE

ARRAYS = ("tokens_BT", "targets_BT", "documents_BT", "positions_BT")


def name_of(text: str) -> str:
    return document_name(document_id(text.encode()))


def same(one, other, names=ARRAYS) -> bool:
    return all((getattr(one, name) == getattr(other, name)).all() for name in names)


def test_a_batch_is_a_function_of_its_number_alone(make_loader, texts):
    loader = make_loader([texts, texts[::2]], weights=[3.0, 1.0])
    again = Loader(loader.data, loader.prepared, 0)
    for batch_index in (7, 0, 300, 7):
        one, other = loader.batch(batch_index), again.batch(batch_index)
        assert same(one, other, (*ARRAYS, "samples_B3"))
        assert one.digest == other.digest == loader.digest(loader.sample_ids(batch_index))
        assert one.num_targets == (one.targets_BT != IGNORE).sum() > 0
        assert (one.batch_index, one.num_excluded, one.excluded) == (batch_index, 0, ())


def test_another_seed_is_another_batch(make_loader, texts):
    loader = make_loader([texts])
    assert loader.batch(0).digest != Loader(loader.data, loader.prepared, 1).batch(0).digest
    assert loader.batch(0).digest != loader.batch(1).digest


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_share_the_rows_of_one_rank_in_order(make_loader, texts, world):
    loader = make_loader([texts, texts[::2]], batch_size=7, exclude=(Exclusion(document=name_of(texts[9])),))
    whole = loader.batch(3)
    parts = [loader.batch(3, rank=rank, world=world) for rank in range(world)]
    for name in ARRAYS:
        assert (np.concatenate([getattr(part, name) for part in parts]) == getattr(whole, name)).all()
    assert {part.digest for part in parts} == {whole.digest}
    assert all((part.samples_B3 == whole.samples_B3).all() for part in parts)
    assert {part.excluded for part in parts} == {whole.excluded}
    assert sum(part.num_targets for part in parts) == whole.num_targets
    assert sum(part.num_excluded for part in parts) == whole.num_excluded


def test_a_rank_without_a_row_gets_an_empty_batch(make_loader, texts):
    loader = make_loader([texts], batch_size=2)
    parts = [loader.batch(0, rank=rank, world=3) for rank in range(3)]
    assert [len(part.tokens_BT) for part in parts] == [0, 1, 1]
    assert parts[0].positions_BT.shape == parts[0].documents_BT.shape == (0, 16)
    assert (parts[0].num_targets, parts[0].digest) == (0, parts[1].digest)


def test_a_ramp_of_the_batch_size_reads_on_without_a_gap(make_loader, texts):
    ramped = make_loader([texts], batch_stages=(BatchStage(start_batch=2, batch_size=8),))
    plain = make_loader([texts])
    assert [len(ramped.sample_ids(at)) for at in range(4)] == [4, 4, 8, 8]
    joined = np.concatenate([ramped.sample_ids(at) for at in range(4)])
    assert (joined == np.concatenate([plain.sample_ids(at) for at in range(6)])).all()


def test_every_row_is_read_once_in_an_epoch(make_loader, texts):
    loader = make_loader([texts], batch_size=1)
    num_rows = loader.mixture.num_rows[0]
    rows = [int(loader.batch(at).samples_B3[0, 2]) for at in range(num_rows)]
    assert sorted(rows) == list(range(num_rows))


def test_the_rows_of_a_document_say_when_it_is_read(make_loader, texts):
    loader = make_loader([texts, texts[:7]], weights=[1.0, 2.0], seq_len=8)
    document = name_of(texts[5])
    read = []
    for batch_index in range(60):
        samples = loader.sample_ids(batch_index).tolist()
        read.append(
            sum(s.document == document for source, _, row in samples for s in loader.row_documents(source, row))
        )
    first = next(at for at, count in enumerate(read) if count)
    assert loader.first_batch_with(document) == first
    for batch_index in (0, 1, first, first + 1, 17, 40, 59):
        assert loader.spans_read_before(document, batch_index) == sum(read[:batch_index])


def test_a_source_shorter_than_a_row_is_refused_with_the_numbers(make_loader):
    with pytest.raises(DataError) as caught:
        make_loader([["x" * 100], ["short"]], seq_len=16)
    assert "tokens.bin: source 's1' has 6 training tokens, too few for one row of data.seq_len=16" in str(caught.value)
    assert "lower data.seq_len to 5 or add documents" in str(caught.value)


@pytest.mark.parametrize(("at", "offset"), [(5, 10), (16, 32), (40, 80)])
def test_a_token_beyond_the_vocabulary_stops_the_batch_with_file_and_offset(make_loader, at, offset):
    loader = make_loader([["a" * 60]], seq_len=16, batch_size=4)
    path = loader.splits[0].folder / "tokens.bin"
    data = np.fromfile(path, "<u2")
    data[at] = 999
    path.write_bytes(data.tobytes())
    with pytest.raises(DataError, match=rf"tokens.bin: id 999 at byte offset {offset} is beyond the vocabulary of 257"):
        loader.batch(0)


def test_a_last_target_beyond_the_vocabulary_is_seen_where_it_is_no_token_of_the_batch(make_loader):
    loader = make_loader([["a" * 60]], seq_len=16, batch_size=1)
    path = loader.splits[0].folder / "tokens.bin"
    data = np.fromfile(path, "<u2")
    data[16] = 999
    path.write_bytes(data.tobytes())
    (first,) = (at for at in range(4) if loader.sample_ids(at)[0, 2] == 0)
    with pytest.raises(DataError, match=r"tokens.bin: id 999 at byte offset 32 is beyond the vocabulary of 257"):
        loader.batch(first)


def test_held_out_rows_come_in_order_and_count_every_byte(make_loader, write_split, texts):
    loader = make_loader([texts])
    rows = ["été " + text for text in texts]
    val = write_split(rows, loader.prepared.sources[0].val.parent / "val")
    source = loader.prepared.sources[0].__class__("s0", loader.prepared.sources[0].train, val)
    prepared = loader.prepared.__class__((source,), None, "", 257, 256, "")
    held_out = EvalRows(loader.data, prepared, 0)
    assert held_out.num_bytes == sum(len(row.encode()) for row in rows)
    parts = [held_out.rows(start, start + 7) for start in range(0, held_out.num_rows, 7)]
    assert sum(len(part.batch.tokens_BT) for part in parts) == held_out.num_rows
    assert sum(int(part.text_bytes_B.sum()) for part in parts) == held_out.num_bytes
    assert sum(int(part.first_tokens_B.sum()) for part in parts) == held_out.num_documents == len(rows)
    num_targets = sum(part.batch.num_targets for part in parts)
    assert num_targets + held_out.num_documents == held_out.split.num_tokens
    stream = np.concatenate([part.batch.tokens_BT.reshape(-1) for part in parts])
    assert stream[: held_out.split.num_tokens - 1].tolist() == held_out.split.tokens[:-1].tolist()
    for part in parts:
        for row, size in zip(part.batch.targets_BT, part.predicted_bytes_B, strict=True):
            assert size == ((row != IGNORE) & (row != 256)).sum()


def test_padding_is_blank_and_predicts_nothing(make_loader):
    loader = make_loader([["a" * 20]], seq_len=16, batch_size=2)
    batch = loader.batch(0)
    (last,) = np.flatnonzero(batch.samples_B3[:, 2] == 1)
    assert batch.documents_BT[last].tolist() == [0] * 5 + [BLANK] * 11
    assert batch.targets_BT[last].tolist() == [97] * 3 + [256] + [IGNORE] * 12
    assert (batch.tokens_BT[last, 5:] == 256).all()
