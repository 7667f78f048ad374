import numpy as np
import pytest

from surefoot.config.data import Exclusion
from surefoot.data.errors import DataError
from surefoot.data.hashing import document_id, document_name
from surefoot.data.loader import Loader
from surefoot.data.pack import BLANK, IGNORE

ARRAYS = ("tokens_BT", "targets_BT", "documents_BT", "positions_BT")


def name_of(text: str) -> str:
    return document_name(document_id(text.encode()))


def batches(loader, exclusions=(), num=40):
    return [loader.batch(at, exclusions) for at in range(num)]


def spans_of(loader, batch, names):
    """Boolean mask of the tokens that belong to the named documents, from the loader's own table of rows."""
    mask = np.zeros(batch.tokens_BT.shape, dtype=bool)
    for at, (source, _, row) in enumerate(batch.samples_B3.tolist()):
        for span in loader.row_documents(source, row):
            mask[at, span.offset : span.offset + span.stop - span.start] = span.document in names
    return mask


def test_exclusion_blanks_the_spans_of_a_document_and_moves_nothing_else(make_loader, texts):
    loader = make_loader([texts, texts[3:9]])
    names = {name_of(texts[5]), name_of(texts[30])}
    exclusions = [Exclusion(document=name) for name in names]
    seen = set()
    for plain, blanked in zip(batches(loader), batches(loader, exclusions), strict=True):
        mask = spans_of(loader, plain, names)
        assert (blanked.tokens_BT[mask] == 256).all()
        assert (blanked.targets_BT[mask] == IGNORE).all()
        assert (blanked.documents_BT[mask] == BLANK).all()
        for name in ARRAYS:
            assert (getattr(blanked, name)[~mask] == getattr(plain, name)[~mask]).all()
        assert (blanked.positions_BT == plain.positions_BT).all()
        assert (blanked.num_excluded, blanked.digest) == (mask.sum(), plain.digest)
        assert blanked.num_targets == (plain.targets_BT[~mask] != IGNORE).sum()
        here = {s.document for source, _, row in plain.samples_B3.tolist() for s in loader.row_documents(source, row)}
        assert blanked.excluded == tuple(sorted(names & here))
        assert loader.excluded_documents(plain.batch_index, exclusions) == blanked.excluded
        seen |= set(blanked.excluded)
    assert seen == names


def test_an_exclusion_applies_from_its_batch_on_and_the_earliest_wins(make_loader, texts):
    loader = make_loader([["b" * 200]], batch_size=1)
    document = name_of("b" * 200)
    late, early = Exclusion(document=document, from_batch=4), Exclusion(document=document, from_batch=2)
    assert [batch.num_targets > 0 for batch in batches(loader, [late], 6)] == [True] * 4 + [False] * 2
    assert [batch.num_targets > 0 for batch in batches(loader, [late, early], 6)] == [True] * 2 + [False] * 4


@pytest.mark.parametrize("document_mask", [True, False])
def test_what_is_excluded_has_no_influence_whatever_stands_there(make_loader, texts, document_mask):
    loader = make_loader([texts], document_mask=document_mask)
    exclusions = [Exclusion(document=name_of(texts[at])) for at in (5, 12, 13)]
    before = batches(loader, exclusions)
    path = loader.splits[0].folder / "tokens.bin"
    tokens = np.fromfile(path, "<u2")
    for at in (5, 12, 13):
        start, stop = loader.splits[0].document_span(at)
        tokens[start:stop] = 65_535
    path.write_bytes(tokens.tobytes())
    for one, other in zip(before, batches(loader, exclusions), strict=True):
        for name in ARRAYS:
            assert (getattr(one, name) == getattr(other, name)).all()
    with pytest.raises(DataError, match="id 65535"):
        batches(loader, exclusions[:2], num=40)


def test_where_documents_attend_to_each_other_whole_rows_go(make_loader, texts):
    loader = make_loader([texts], document_mask=False)
    name = name_of(texts[5])
    blank_rows = 0
    for plain, blanked in zip(batches(loader), batches(loader, [Exclusion(document=name)]), strict=True):
        touched = spans_of(loader, plain, {name}).any(axis=1)
        blank_rows += touched.sum()
        assert (blanked.documents_BT[touched] == BLANK).all()
        assert (blanked.tokens_BT[touched] == 256).all()
        assert (blanked.targets_BT[touched] == IGNORE).all()
        assert (blanked.tokens_BT[~touched] == plain.tokens_BT[~touched]).all()
        assert blanked.num_excluded == (plain.documents_BT[touched] != BLANK).sum()
    assert blank_rows


def test_a_document_that_ends_where_a_row_begins_is_not_in_it(make_loader):
    names = [name_of(letter * 15) for letter in "abc"]
    loader = make_loader([["a" * 15, "b" * 15, "c" * 15]], batch_size=1)
    for batch_index in range(3):
        row = int(loader.sample_ids(batch_index)[0, 2])
        batch = loader.batch(batch_index, [Exclusion(document=names[1])])
        assert (batch.excluded, batch.num_excluded) == (((names[1],), 16) if row == 1 else ((), 0))


def test_padding_is_not_counted_as_excluded(make_loader):
    for document_mask in (True, False):
        loader = make_loader([["a" * 20]], batch_size=2, document_mask=document_mask)
        assert loader.batch(0, [Exclusion(document=name_of("a" * 20))]).num_excluded == 21


def test_exclusions_of_the_config_and_of_the_ledger_add_up(make_loader, texts):
    one, two = (Exclusion(document=name_of(texts[at])) for at in (5, 30))
    chosen, ledger = make_loader([texts], exclude=(one,)), make_loader([texts])
    for at in range(8):
        assert (chosen.batch(at, [two]).tokens_BT == ledger.batch(at, [one, two]).tokens_BT).all()


def test_excluding_a_document_that_is_not_there_is_refused(make_loader, texts):
    with pytest.raises(
        DataError, match=r"excluded document 00000000000000ff: in no training split \(.*no effect; remove"
    ):
        make_loader([texts], exclude=(Exclusion(document="00000000000000ff"),))
    for wrong in ("xyz", "-000000000000001", "0x000000000000ff", "zz00000000000000"):
        with pytest.raises(DataError, match=rf"document '{wrong}': a document is named by 16 hex digits"):
            make_loader([texts]).batch(0, [Exclusion(document=wrong)])


def test_the_same_document_in_two_sources_is_blanked_in_both(make_loader, texts):
    loader = make_loader([texts, texts[::-1]])
    exclusion = [Exclusion(document=name_of(texts[5]))]
    assert isinstance(loader, Loader)
    hit = {
        int(batch.samples_B3[at, 0])
        for batch in batches(loader, exclusion, 30)
        for at in np.flatnonzero((batch.documents_BT == BLANK).any(axis=1))
        if batch.samples_B3[at, 2] != loader.mixture.num_rows[0] - 1  # the padded row
    }
    assert hit == {0, 1}
