"""The two figures behind the critical batch size are unbiased, and smoothed apart."""

import math
import random

import pytest

from surefoot.optim.noise_scale import BETA, Noise, NoiseState, noise_of


def drawn(draw: random.Random, true: list[float], std: float, sizes: list[int]) -> Noise:
    """A batch of independent gaussian gradients per target, in pieces of these sizes."""
    targets = [[g + draw.gauss(0, std) for g in true] for _ in range(sum(sizes))]
    squares, start = [], 0
    for size in sizes:
        piece = targets[start : start + size]
        squares.append(sum((sum(t[i] for t in piece) / size) ** 2 for i in range(len(true))))
        start += size
    whole = sum((sum(t[i] for t in targets) / len(targets)) ** 2 for i in range(len(true)))
    return noise_of(squares, sizes, whole, len(targets))


@pytest.mark.parametrize("sizes", [[4, 4], [2, 5, 3, 6], [1] * 8])
def test_both_figures_are_unbiased_whatever_the_sizes_of_the_pieces(sizes: list[int]) -> None:
    draw, true, std, num = random.Random(0), [0.3, -0.2, 0.1], 0.7, 4000
    found = [drawn(draw, true, std, sizes) for _ in range(num)]
    for name, expected in (("squared_norm", sum(g * g for g in true)), ("trace", len(true) * std**2)):
        values = [getattr(noise, name) for noise in found]
        mean = sum(values) / num
        error = math.sqrt(sum((v - mean) ** 2 for v in values)) / num
        assert abs(mean - expected) < 4 * error, name
        assert error < 0.1 * expected, name


def test_two_equal_pieces_give_the_equations_of_the_paper() -> None:
    """arXiv:1812.06162 eq. A.1 and A.2 for batches of 6 and 12."""
    small, big = (0.9 + 0.7) / 2, 0.5
    found = noise_of((0.9, 0.7), (6, 6), big, 12)
    assert found.squared_norm == pytest.approx((12 * big - 6 * small) / (12 - 6))
    assert found.trace == pytest.approx((small - big) / (1 / 6 - 1 / 12))


def test_means_are_corrected_for_their_start_and_the_ratio_is_of_means() -> None:
    state = NoiseState()
    assert math.isnan(state.critical_batch())
    assert math.isnan(state.smoothed().trace)
    seen = [Noise(squared_norm=a, trace=b) for a, b in ((0.5, 8.0), (-0.1, 12.0), (0.3, -1.0))]
    for noise in seen:
        state = state.after(noise)
    weights = [BETA**2, BETA, 1.0]
    signal = sum(w * n.squared_norm for w, n in zip(weights, seen, strict=True)) / sum(weights)
    trace = sum(w * n.trace for w, n in zip(weights, seen, strict=True)) / sum(weights)
    assert state.smoothed().squared_norm == pytest.approx(signal)
    assert state.smoothed().trace == pytest.approx(trace)
    assert state.critical_batch() == pytest.approx(trace / signal)
    assert NoiseState.from_dict(state.to_dict()) == state


def test_a_ratio_of_what_is_not_positive_is_not_told() -> None:
    assert math.isnan(NoiseState().after(Noise(squared_norm=-0.1, trace=2.0)).critical_batch())
    assert math.isnan(NoiseState().after(Noise(squared_norm=0.1, trace=-2.0)).critical_batch())
