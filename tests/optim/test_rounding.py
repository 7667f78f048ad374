"""Stochastic rounding: right on average, the same under any sharding, and a stranger to every other draw."""

import math

import pytest
import torch
from torch import Tensor

from surefoot.optim.rounding import round_stochastically
from surefoot.parallel.boxes import Box
from tolerances import NOISE_SIGMAS

COUNT = 1 << 16
BELOW, ABOVE = 1.0, 1.0 + 2**-7


def rounded(values: Tensor, **changed: object) -> Tensor:
    into = torch.empty(values.shape, dtype=torch.bfloat16)
    told: dict[str, object] = {"seed": 3, "batch_index": 11, "purpose": "exp_avg", "name": "blocks.0.w"}
    round_stochastically(values, into, **(told | changed))  # type: ignore[arg-type]
    return into


def ups(share: float = 0.5, **changed: object) -> Tensor:
    """Which of many equal numbers were rounded up, as +-1 for chances of a half."""
    found = rounded(torch.full((COUNT,), BELOW + share * 2**-7), **changed).double()
    return (found == ABOVE).double()


@pytest.mark.parametrize("share", [1 / 65536, 0.01, 0.25, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**100])
def test_a_number_becomes_the_upper_neighbour_as_often_as_it_lies_towards_it(
    share: float, sign: float, size: float
) -> None:
    value = sign * size * (BELOW + share * 2**-7)
    found = rounded(torch.full((COUNT,), value)).double() / (sign * size)
    assert set(found.unique().tolist()) <= {BELOW, ABOVE}
    noise = math.sqrt(share * (1 - share) / COUNT)
    exact = (torch.tensor(value).double() / (sign * size) - BELOW) / 2**-7
    assert abs(float((found == ABOVE).double().mean() - exact)) < NOISE_SIGMAS * noise


def test_the_mean_error_over_numbers_of_all_sizes_is_none() -> None:
    """Also across the powers of two, where the neighbours above are twice as far as those below."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(COUNT, generator=draw) * torch.exp2(torch.randint(-30, 30, (COUNT,), generator=draw).float())
    close = torch.exp2(torch.randint(-20, 20, (COUNT,), generator=draw).float())
    close = close * (1 + 2**-7 * (2 * torch.rand(COUNT, generator=draw) - 1))
    for numbers in (values, close):
        errors = ((rounded(numbers).double() - numbers.double()) / numbers.double()).numpy()
        assert abs(errors.mean()) < NOISE_SIGMAS * errors.std() / math.sqrt(COUNT)
        assert abs(errors).max() < 2**-7


def test_what_bf16_can_say_and_what_is_not_finite_come_out_as_they_are() -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = patterns.view(torch.bfloat16)
    found = rounded(every.float())
    nan = every.isnan()
    assert torch.equal(found[~nan].view(torch.int16), patterns[~nan])
    assert found[nan].isnan().all()
    # NaN whose payload lies in the bits that are dropped, and in all bits
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert odd.isnan().all()
    assert rounded(odd).isnan().all()


def test_a_finite_number_never_becomes_infinite() -> None:
    top = torch.finfo(torch.bfloat16).max
    values = torch.full((COUNT,), torch.finfo(torch.float32).max)
    assert (rounded(values) == top).all()
    assert (rounded(-values) == -top).all()


def test_the_smallest_numbers_are_unbiased_too() -> None:
    """Below the smallest that bf16 can say: half of it becomes it half of the time, and 0 otherwise."""
    least = 2.0**-133
    found = rounded(torch.full((COUNT,), least / 2)).double()
    assert set(found.unique().tolist()) == {0.0, least}
    assert abs(float(found.mean() / least) - 0.5) < NOISE_SIGMAS * 0.5 / math.sqrt(COUNT)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 4096, 65537, 131072])
def test_any_sharding_rounds_each_element_as_the_whole_tensor_does(cut: int) -> None:
    values = torch.randn(150_001, generator=torch.Generator().manual_seed(1))
    whole = rounded(values)
    parts = [rounded(values[:cut]), rounded(values[cut:], start=cut)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(rounded(values[cut:]), whole[cut:])


@pytest.mark.parametrize(
    "box",
    [
        Box((60, 96), (12, 32), (30, 48)),  # hashes whole
        Box((60, 96), (12, 30), (30, 48)),  # begins inside of one
        Box((60, 96), (12, 32), (30, 47)),
        Box((60, 95), (12, 32), (30, 48)),
        Box((60, 96), (20, 0), (7, 96)),  # unbroken
        Box((6, 10, 96), (1, 5, 0), (4, 5, 96)),
        Box((60, 96), (7, 0), (0, 96)),
    ],
)
@pytest.mark.parametrize("cut", [0, 3, 64])
def test_any_box_of_a_tensor_is_rounded_as_the_whole_tensor_is(box: Box, cut: int) -> None:
    values = torch.randn(box.whole, generator=torch.Generator().manual_seed(1))
    mine = values[box.slices].flatten()
    found = torch.cat([rounded(mine[:cut], box=box), rounded(mine[cut:], box=box, start=cut)])
    assert torch.equal(found, rounded(values)[box.slices].flatten())


@pytest.mark.parametrize(
    "other", [{"seed": 4}, {"batch_index": 12}, {"purpose": "weights"}, {"name": "blocks.1.w"}, {"start": 1}]
)
def test_another_seed_batch_purpose_name_or_place_draws_anew(other: dict[str, object]) -> None:
    signs, others = 2 * ups() - 1, 2 * ups(**other) - 1
    assert abs(float((signs * others).mean())) < NOISE_SIGMAS / math.sqrt(COUNT)
    assert torch.equal(ups(), ups())


def test_neighbouring_elements_and_batches_know_nothing_of_each_other() -> None:
    signs = 2 * ups() - 1
    for lag in range(1, 65):
        assert abs(float((signs[lag:] * signs[:-lag]).mean())) < NOISE_SIGMAS / math.sqrt(COUNT - lag), lag
    total = sum(2 * ups(batch_index=index)[:4096] - 1 for index in range(100))
    assert isinstance(total, Tensor)
    # the sums of a hundred draws spread as a hundred independent ones do
    assert abs(float(total.square().mean()) / 100 - 1) < NOISE_SIGMAS * math.sqrt(2 / 4096)


def test_all_sixteen_bits_that_are_dropped_count() -> None:
    """Each bit of the draw is a fair coin: the share rounded up is right for every power of two."""
    for bit in range(16):
        share = 2.0 ** -(bit + 1)
        noise = math.sqrt(share * (1 - share) / COUNT)
        assert abs(float(ups(share).mean()) - share) < NOISE_SIGMAS * noise, bit


def test_no_generator_is_read_or_moved() -> None:
    before = torch.get_rng_state()
    rounded(torch.ones(1000) / 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_other_dtypes_and_shapes_are_refused() -> None:
    told = {"seed": 0, "batch_index": 0, "purpose": "p", "name": "n"}
    with pytest.raises(ValueError, match=r"takes fp32 to bf16 of the same shape, not torch\.float64 \(3,\) to"):
        round_stochastically(torch.ones(3).double(), torch.ones(3).bfloat16(), **told)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"to torch\.float16"):
        round_stochastically(torch.ones(3), torch.ones(3).half(), **told)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(4,\)"):
        round_stochastically(torch.ones(3), torch.ones(4).bfloat16(), **told)  # type: ignore[arg-type]
