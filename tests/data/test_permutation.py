import numpy as np
import pytest

from surefoot.data.hashing import derive_key, mix64, mix64_array
from surefoot.data.permutation import Permutation, permutation
from tolerances import NOISE_SIGMAS

LAGS = range(1, 65)


def largest_lag_correlation(values) -> float:
    """Largest |autocorrelation| over the lags, in standard deviations of independent values."""
    x = (values - values.mean()) / values.std()
    return max(abs(float((x[:-lag] * x[lag:]).mean())) for lag in LAGS) * np.sqrt(len(x))


def affine(indices, size, seed):
    """The cheap permutation that a Feistel network replaces: a i + b modulo the size."""
    a = derive_key("a", seed) % size | 1
    while np.gcd(a, size) != 1:
        a += 2
    return (a * indices + derive_key("b", seed) % size) % size


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000, 1024, 4097])
def test_it_is_a_bijection_and_its_inverse_undoes_it(size):
    order = Permutation(derive_key("test", size), size)
    images = order.of(np.arange(size))
    assert sorted(images.tolist()) == list(range(size))
    some = range(0, size, max(1, size // 50))
    assert [order(at) for at in some] == images[list(some)].tolist()
    assert [order.inverse(int(images[at])) for at in some] == list(some)


def test_it_reaches_beyond_32_bits():
    order = Permutation(7, 10**12 + 39)
    far = np.array([0, 1, 10**12 + 38, 123_456_789_012])
    images = order.of(far)
    assert ((images >= 0) & (images < order.size)).all()
    assert [order(int(at)) for at in far] == images.tolist()
    assert [order.inverse(int(image)) for image in images] == far.tolist()


def test_the_vector_form_of_the_mixer_is_the_scalar_one():
    values = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    assert mix64_array(np.array(values, dtype=np.uint64)).tolist() == [mix64(value) for value in values]
    # First outputs of the published splitmix64 generator seeded with 0: the mixer of multiples of the golden ratio.
    golden = 0x9E3779B97F4A7C15
    assert [mix64(golden * i % 2**64) for i in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("size", [1024, 5000, 2**14])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_neighbours_land_independently_where_an_affine_permutation_betrays_itself(size, seed):
    indices = np.arange(size)
    assert largest_lag_correlation(permutation(size, "test", seed).of(indices)) < NOISE_SIGMAS
    assert largest_lag_correlation(affine(indices, size, seed)) > 2 * NOISE_SIGMAS


def test_another_key_is_another_order():
    orders = [permutation(1000, "test", seed, epoch).of(np.arange(1000)) for seed in (0, 1) for epoch in (0, 1)]
    for at, order in enumerate(orders):
        for other in orders[:at]:
            assert (order == other).mean() < 0.01


def test_small_domains_take_every_order():
    orders = {tuple(permutation(3, seed).of(np.arange(3)).tolist()) for seed in range(200)}
    assert len(orders) == 6
