"""The step-0 proof accepts what the loader makes and sees every planted error."""

import dataclasses

import numpy as np
import pytest

from surefoot.config.data import Exclusion
from surefoot.data.hashing import document_id, document_name
from surefoot.data.health import prove_batch, prove_shares
from surefoot.data.mixture import Mixture
from surefoot.data.pack import BLANK, IGNORE


def name_of(text: str) -> str:
    return document_name(document_id(text.encode()))


def planted(batch, **changes):
    """A copy of the batch with elements changed: name -> (index, value)."""
    arrays = {}
    for name, (index, value) in changes.items():
        arrays[name] = getattr(batch, name).copy()
        arrays[name][index] = value
    return dataclasses.replace(batch, **arrays)


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("seq_len", [1, 16, 100])
def test_what_the_loader_makes_is_proved(make_loader, texts, document_mask, seq_len):
    loader = make_loader([texts, texts[:9]], document_mask=document_mask, seq_len=seq_len, weights=[2.0, 1.0])
    exclusions = [Exclusion(document=name_of(texts[at])) for at in (1, 5, 8)]
    for batch_index in range(30):
        assert prove_batch(loader.batch(batch_index), loader) == []
        assert prove_batch(loader.batch(batch_index, exclusions), loader, exclusions) == []
        assert prove_batch(loader.batch(batch_index, rank=1, world=3), loader, rank=1, world=3) == []
    assert prove_shares(loader) == []


def row_with_end(batch):
    """Row and token of an end of a document inside a row."""
    at, token = np.argwhere((batch.targets_BT[:, :-1] == IGNORE) & (batch.documents_BT[:, 1:] != BLANK))[0]
    return int(at), int(token)


def sentence(mistakes) -> str:
    assert len(mistakes) >= 1
    return "\n".join(mistakes)


def test_targets_that_are_not_shifted_are_seen(make_loader, texts):
    loader = make_loader([texts])
    batch = loader.batch(0)
    unshifted = dataclasses.replace(batch, targets_BT=np.where(batch.targets_BT == IGNORE, IGNORE, batch.tokens_BT))
    assert "a target is not the next token" in sentence(prove_batch(unshifted, loader))
    rolled = dataclasses.replace(batch, targets_BT=np.roll(batch.targets_BT, 1, axis=1))
    assert "row 0 (source 's0', row" in sentence(prove_batch(rolled, loader))


def test_a_single_wrong_target_is_seen_with_its_place(make_loader, texts):
    loader = make_loader([texts])
    batch = loader.batch(0)
    at, token = (int(x) for x in np.argwhere(batch.targets_BT != IGNORE)[20])
    wrong = planted(batch, targets_BT=((at, token), (batch.targets_BT[at, token] + 1) % 256))
    (mistake,) = prove_batch(wrong, loader)
    assert mistake.startswith(f"row {at} (source 's0', row {batch.samples_B3[at, 2]}): a target is not the next token")
    assert mistake.endswith(f"(1 places, first at token {token})")


def test_a_prediction_across_a_boundary_is_seen(make_loader, texts):
    for document_mask in (True, False):
        loader = make_loader([texts], document_mask=document_mask)
        batch = loader.batch(0)
        at, token = row_with_end(batch)
        crossing = planted(batch, targets_BT=((at, token), batch.tokens_BT[at, token + 1]))
        assert f"a target crosses the end of a document (1 places, first at token {token})" in sentence(
            prove_batch(crossing, loader)
        )


def test_positions_that_run_on_into_the_next_document_are_seen(make_loader, texts):
    loader = make_loader([texts])
    batch = loader.batch(0)
    running = dataclasses.replace(batch, positions_BT=np.tile(np.arange(16, dtype=np.int32), (len(batch.tokens_BT), 1)))
    assert "a position does not restart with its document" in sentence(prove_batch(running, loader))
    unmasked = make_loader([texts], document_mask=False)
    restarting = dataclasses.replace(unmasked.batch(0), positions_BT=batch.positions_BT)
    assert "a position does not count across the row" in sentence(prove_batch(restarting, unmasked))


def test_documents_that_are_merged_are_seen(make_loader, texts):
    loader = make_loader([texts])
    batch = loader.batch(0)
    merged = dataclasses.replace(batch, documents_BT=np.where(batch.documents_BT == BLANK, BLANK, 0).astype(np.int32))
    assert "a document number does not follow the ends of documents" in sentence(prove_batch(merged, loader))


def test_a_token_that_is_not_in_the_file_is_seen(make_loader, texts):
    loader = make_loader([texts])
    batch = loader.batch(0)
    wrong = planted(batch, tokens_BT=((1, 3), (batch.tokens_BT[1, 3] + 1) % 256))
    assert "a token is not the one in the file (1 places, first at token 3)" in sentence(prove_batch(wrong, loader))
    other_rows = dataclasses.replace(batch, samples_B3=loader.sample_ids(1))
    assert "a token is not the one in the file" in sentence(prove_batch(other_rows, loader))


def test_an_id_beyond_the_vocabulary_is_seen(make_loader, texts):
    loader = make_loader([texts])
    wrong = planted(loader.batch(0), tokens_BT=((0, 0), 257), targets_BT=((1, 1), 300))
    found = sentence(prove_batch(wrong, loader))
    assert "an id is beyond the vocabulary of 257" in found
    assert "a target is beyond the vocabulary of 257" in found


def test_a_mask_that_is_not_shifted_with_the_targets_is_seen(make_loader, texts):
    loader = make_loader([texts])
    exclusions = [Exclusion(document=name_of(texts[at])) for at in range(0, 40, 3)]
    batch = loader.batch(0, exclusions)
    plain = loader.batch(0)
    assert batch.num_excluded
    leaking = dataclasses.replace(batch, targets_BT=plain.targets_BT)
    assert "a blank token has a target" in sentence(prove_batch(leaking, loader, exclusions))
    shown = dataclasses.replace(batch, tokens_BT=plain.tokens_BT)
    assert "a blank token is not the end-of-document id" in sentence(prove_batch(shown, loader, exclusions))
    assert "a token is blank though nothing is excluded" in sentence(prove_batch(batch, loader))


def test_wrong_counts_are_seen(make_loader, texts):
    loader = make_loader([texts])
    batch = loader.batch(0)
    wrong = dataclasses.replace(batch, num_targets=batch.num_targets + 1, num_excluded=2)
    assert prove_batch(wrong, loader) == [
        "0 tokens are blank without being padding, num_excluded says 2",
        f"{batch.num_targets} targets are predicted, num_targets says {batch.num_targets + 1}",
    ]


def test_unshown_padding_and_wrong_shapes_are_seen(make_loader):
    loader = make_loader([["a" * 20]], batch_size=2)
    batch = loader.batch(0)
    (last,) = np.flatnonzero(batch.samples_B3[:, 2] == 1)
    assert "padding is not blank" in sentence(prove_batch(planted(batch, documents_BT=((last, 9), 0)), loader))
    cut = dataclasses.replace(batch, positions_BT=batch.positions_BT[:, :-1])
    assert prove_batch(cut, loader) == [
        "batch 0: shapes (2, 16), (2, 16), (2, 16), (2, 15) where rank 0 of 1 has (2, 16)"
    ]


def test_a_source_with_another_share_than_its_weight_is_seen(make_loader, texts):
    loader = make_loader([texts, texts[:9]], weights=[3.0, 1.0])
    swapped = dataclasses.replace(loader.data, sources=loader.data.sources[::-1])
    loader.mixture = Mixture(swapped, loader.mixture.num_rows, 0)
    assert "source 's0' has 256 of the first 1024 rows, its weight asks for 768.00" in sentence(prove_shares(loader))


def test_a_sample_that_comes_twice_is_seen(make_loader, texts):
    loader = make_loader([texts])
    samples = loader.mixture.samples(0, 1024).copy()
    samples[17] = samples[3]
    loader.mixture.samples = lambda start, stop: samples
    assert "1 of the first 1024 samples come twice" in sentence(prove_shares(loader))
