import numpy as np
import pytest

from surefoot.config.data import BatchStage, DataConfig, MixtureStage, Shards, SourceConfig
from surefoot.data.errors import DataError
from surefoot.data.hashing import derive_key
from surefoot.data.mixture import BLOCK, BatchStarts, Mixture, counts_per_block
from tolerances import NOISE_SIGMAS


def config(weights=(3.0, 1.0), mixture_stages=(), batch_stages=(), batch_size=8):
    sources = [SourceConfig(name=f"s{at}", documents=Shards(path="x"), weight=w) for at, w in enumerate(weights)]
    return DataConfig(
        sources=tuple(sources),
        seq_len=8,
        batch_size=batch_size,
        mixture_stages=mixture_stages,
        batch_stages=batch_stages,
    )


def largest_lag_correlation(values) -> float:
    x = (values - values.mean()) / values.std()
    return max(abs(float((x[:-lag] * x[lag:]).mean())) for lag in range(1, 65)) * np.sqrt(len(x))


def test_shares_are_exact_in_every_block():
    samples = Mixture(config((3.0, 1.0, 4.0)), [1000, 70, 500], 0).samples(0, 20 * BLOCK)
    for block in samples[:, 0].reshape(20, BLOCK):
        assert np.bincount(block).tolist() == [384, 128, 512]


def test_largest_remainders_get_the_rows_that_are_left():
    assert counts_per_block([1.0, 1.0, 1.0], "abc") == [342, 341, 341]
    assert counts_per_block([5.6, 1017.7, 0.7], "abc") == [5, 1018, 1]  # remainders 0.6, 0.7, 0.7
    assert sum(counts_per_block([0.1, 0.7, 0.2, 13.0], "abcd")) == BLOCK


def test_each_row_comes_once_per_epoch_and_epochs_follow_each_other():
    mixture = Mixture(config((3.0, 1.0)), [1000, 70], 0)
    samples = mixture.samples(0, 6 * BLOCK)
    for source, num_rows in enumerate(mixture.num_rows):
        mine = samples[samples[:, 0] == source]
        assert (np.diff(mine[:, 1]) >= 0).all()
        for epoch in range(int(mine[-1, 1])):
            rows = mine[mine[:, 1] == epoch, 2]
            assert sorted(rows.tolist()) == list(range(num_rows))
        assert len(np.unique(mine, axis=0)) == len(mine)
    first, second = (samples[(samples[:, 0] == 1) & (samples[:, 1] == epoch), 2] for epoch in (0, 1))
    assert (first != second).any()


def test_any_stretch_is_the_same_wherever_reading_begins():
    stages = (MixtureStage(start_row=1500, weights=(1.0, 1.0)),)
    whole = Mixture(config(mixture_stages=stages), [300, 70], 5).samples(0, 8 * BLOCK)
    for start, stop in ((0, 1), (1023, 1025), (2000, 2100), (5000, 8 * BLOCK), (7, 7)):
        assert (Mixture(config(mixture_stages=stages), [300, 70], 5).samples(start, stop) == whole[start:stop]).all()


def test_the_way_back_from_a_sample_to_its_row_number():
    stages = (MixtureStage(start_row=1500, weights=(1.0, 2.0)),)
    mixture = Mixture(config(mixture_stages=stages), [300, 70], 5)
    samples = mixture.samples(0, 5 * BLOCK)
    for at in range(0, 5 * BLOCK, 97):
        assert mixture.global_row(*samples[at].tolist()) == at
        for source in (0, 1):
            assert mixture.rows_before(source, at) == (samples[:at, 0] == source).sum()


def test_a_stage_begins_with_the_next_block_and_replaces_the_weights():
    stages = (MixtureStage(start_row=1500, weights=(1.0, 3.0)), MixtureStage(start_row=4096, weights=(1.0, 1.0)))
    sources = Mixture(config((3.0, 1.0), stages), [300, 70], 5).samples(0, 6 * BLOCK)[:, 0].reshape(6, BLOCK)
    assert (sources == 0).sum(axis=1).tolist() == [768, 768, 256, 256, 512, 512]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sources_and_rows_follow_no_pattern_where_an_affine_order_does(seed):
    mixture = Mixture(config((3.0, 1.0)), [40_000, 30_000], seed)
    samples = mixture.samples(0, 32 * BLOCK)
    assert largest_lag_correlation(samples[:, 0].astype(float)) < NOISE_SIGMAS
    rows = samples[samples[:, 0] == 0, 2].astype(float)
    assert largest_lag_correlation(rows) < NOISE_SIGMAS
    slots = (derive_key("a", seed) % BLOCK | 1) * np.arange(32 * BLOCK) % BLOCK
    assert largest_lag_correlation((slots >= 768).astype(float)) > 2 * NOISE_SIGMAS


def test_another_seed_is_another_order():
    orders = [Mixture(config(), [4000, 700], seed).samples(0, BLOCK) for seed in (0, 1)]
    assert (orders[0] == orders[1]).all(axis=1).mean() < 0.01


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_above_zero_is_refused_by_name(weight):
    with pytest.raises(DataError, match=rf"data.sources\[b\]: weight {weight} must be above 0 and finite; remove"):
        counts_per_block([1.0, weight], "ab")


def test_a_source_without_a_row_in_a_block_is_refused_with_the_numbers():
    with pytest.raises(DataError) as caught:
        counts_per_block([1.0, 0.0003], ["much", "little"])
    assert str(caught.value) == (
        "data.sources[little]: weight 0.0003 of 1.0003 is 0.307 rows in a block of 1024, so the source would never be read; "
        "raise it to 0.000977 or more, or remove the source"
    )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((MixtureStage(start_row=5000, weights=(1.0,)),), r"mixture_stages\[0\]: 1 weights for 2 sources \(s0, s1\)"),
        ((MixtureStage(start_row=0, weights=(1.0, 1.0)),), r"mixture_stages\[0\].start_row=0: starts with block 0"),
        ((MixtureStage(start_row=5000, weights=(1.0, 0.0)),), r"mixture_stages\[0\].weights\[s1\]: weight 0.0 must be"),
    ],
)
def test_a_wrong_mixture_stage_is_refused_by_place(stages, message):
    with pytest.raises(DataError, match=message):
        Mixture(config(mixture_stages=stages), [10, 10], 0)


def test_batches_start_at_the_sum_of_the_sizes_before_them():
    stages = (BatchStage(start_batch=3, batch_size=16), BatchStage(start_batch=5, batch_size=4))
    starts = BatchStarts(config(batch_stages=stages))
    sizes = [8, 8, 8, 16, 16, 4, 4, 4]
    for at in range(len(sizes)):
        assert starts.rows_of(at) == (sum(sizes[:at]), sum(sizes[: at + 1]))
        assert {starts.batch_of(row) for row in range(*starts.rows_of(at))} == {at}


@pytest.mark.parametrize(
    ("batch_size", "stages", "message"),
    [
        (0, (), r"data.batch_size=0: must be at least 1 row"),
        (8, (BatchStage(start_batch=2, batch_size=0),), r"data.batch_stages\[0\].batch_size=0: must be at least 1 row"),
        (8, (BatchStage(start_batch=0, batch_size=2),), r"data.batch_stages\[0\].start_batch=0: must be above 0"),
    ],
)
def test_a_wrong_batch_size_is_refused_by_place(batch_size, stages, message):
    with pytest.raises(DataError, match=message):
        BatchStarts(config(batch_size=batch_size, batch_stages=stages))
