import dataclasses

import pytest

from surefoot.config.data import Exclusion
from surefoot.data.audit import ConsumedBatch, audit
from surefoot.data.hashing import document_id, document_name
from surefoot.data.loader import Loader


def consumed(loader, num, exclusions=()):
    batches = [loader.batch(at, exclusions) for at in range(num)]
    return [ConsumedBatch(batch.batch_index, batch.digest, batch.excluded) for batch in batches]


@pytest.fixture
def loader(make_loader, texts):
    return make_loader([texts, texts[:9]], weights=[3.0, 1.0])


def test_a_whole_run_is_in_order(loader):
    report = audit(consumed(loader, 100), loader)
    assert report.ok
    assert (report.num_batches, report.num_samples) == (100, 400)
    assert sum(source.rows_consumed for source in report.sources) == 400
    assert [source.name for source in report.sources] == ["s0", "s1"]
    assert report.sources[0].epochs == report.sources[0].rows_consumed / loader.mixture.num_rows[0] > 3


def test_a_gap_is_named(loader):
    rows = consumed(loader, 60)
    assert audit(rows[:20] + rows[22:], loader).mistakes == (
        "batch 20 was never consumed, batch 22 comes in its place",
        "batch 21 was never consumed, batch 22 comes in its place",
    )


def test_a_window_that_was_left_out_on_purpose_is_no_gap_but_listed(loader):
    rows = consumed(loader, 60)
    report = audit(rows[:20] + rows[22:], loader, jumped=[20, 21])
    assert report.ok
    assert report.jumped_batches == (20, 21)
    assert report.num_samples == 58 * 4
    assert sum(source.rows_consumed for source in report.sources) == 58 * 4


def test_a_batch_consumed_twice_is_named_with_its_samples(loader):
    rows = consumed(loader, 10)
    mistakes = audit(rows[:6] + rows[5:], loader).mistakes
    assert mistakes[0] == "batch 5 comes again after batch 5"
    samples = loader.sample_ids(5).tolist()
    assert set(mistakes[1:]) == {
        f"batch 5 repeats row {row} of source 's{source}' in epoch {epoch}" for source, epoch, row in samples
    }


def test_a_digest_of_other_samples_is_named(loader):
    rows = consumed(loader, 4)
    rows[2] = dataclasses.replace(rows[2], digest="0" * 16)
    due = loader.digest(loader.sample_ids(2))
    assert audit(rows, loader).mistakes == (f"batch 2 has sample digest 0000000000000000, the config gives {due}",)
    assert len(audit(consumed(loader, 4), Loader(loader.data, loader.prepared, 1)).mistakes) >= 4


def test_an_order_that_repeats_or_loses_samples_is_seen_though_rows_and_config_agree(loader):
    stuck = loader.mixture.samples
    loader.mixture.samples = lambda start, stop: stuck(start % 100, start % 100 + stop - start)
    mistakes = audit(consumed(loader, 40), loader).mistakes
    assert any(mistake.startswith("batch 25 repeats row") for mistake in mistakes)
    loader.mixture.samples = lambda start, stop: stuck(start + 4 * (start >= 40), stop + 4 * (start >= 40))
    mistakes = audit(consumed(loader, 100), loader).mistakes
    lost = [mistake for mistake in mistakes if mistake.startswith("epoch 0 of source")]
    assert lost
    assert all(mistake.endswith(f"of its {loader.mixture.num_rows['s1' in mistake]} rows") for mistake in lost)


def test_skipped_batches_and_excluded_documents_are_listed_by_name(loader, texts):
    name = document_name(document_id(texts[5].encode()))
    exclusions = [Exclusion(document=name, from_batch=2)]
    rows = consumed(loader, 60, exclusions)
    rows[7] = dataclasses.replace(rows[7], skipped=True)
    report = audit(rows, loader, exclusions)
    assert report.ok
    assert report.skipped_batches == (7,)
    assert report.excluded_documents == (name,)
    wrong = audit(rows, loader).mistakes
    assert wrong[0].endswith(f"blanked {name}, the ledger asks for nothing")


def test_a_fork_begins_at_its_own_batch(loader):
    rows = consumed(loader, 40)[10:]
    assert audit(rows, loader, first_batch=10).ok
    assert len(audit(rows, loader).mistakes) == 10


def test_long_lists_are_cut_with_their_length(loader):
    rows = consumed(loader, 60)
    mistakes = audit(rows[50:], loader).mistakes
    assert len(mistakes) == 21
    assert mistakes[-1] == "and 30 more gaps"
