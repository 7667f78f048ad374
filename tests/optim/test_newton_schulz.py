"""Newton-Schulz against the singular value decomposition, which the polynomial acts on value by value."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.optim.newton_schulz import COEFFICIENTS, FLOOR, orthogonalise
from tolerances import NEWTON_SCHULZ, ORTHOGONAL_RANGE, ORTHOGONAL_RMS

SHAPES = [(96, 96), (48, 160), (160, 48), (1, 7), (7, 1)]
DTYPES = list(NEWTON_SCHULZ)


def drawn(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conditioned(shape: tuple[int, int]) -> Tensor:
    """Singular values between 1 and 1/30."""
    left, _, right = torch.linalg.svd(drawn(shape), full_matrices=False)
    return left @ torch.diag(torch.logspace(0, -1.5, min(shape), dtype=torch.float64)) @ right


def polynomial(values: Tensor, steps: int = 5) -> Tensor:
    """What becomes of singular values."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return values


def expected(matrix: Tensor, steps: int = 5) -> Tensor:
    """U p(S / |S|) V^T."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ torch.diag(polynomial(values / torch.linalg.norm(values), steps)) @ right


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [drawn, conditioned])
def test_singular_values_follow_the_polynomial_and_singular_vectors_stay(
    make: Callable[[tuple[int, int]], Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix = make(shape).to(torch.promote_types(dtype, torch.float32))
    (found,) = orthogonalise([matrix], 5, dtype)
    assert found.dtype == dtype
    target = expected(matrix.double())
    assert torch.linalg.norm(found.double() - target) / torch.linalg.norm(target) < NEWTON_SCHULZ[dtype]


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_as_many_iterations_as_asked_for(steps: int) -> None:
    (found,) = orthogonalise([drawn((20, 30))], steps, torch.float64)
    target = expected(drawn((20, 30)), steps)
    assert torch.linalg.norm(found - target) / torch.linalg.norm(target) < NEWTON_SCHULZ[torch.float64]


@pytest.mark.parametrize("shape", [(96, 96), (48, 160), (160, 48)])
def test_in_bf16_all_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    (found,) = orthogonalise([conditioned(shape).float()], 5, torch.bfloat16)
    values = torch.linalg.svdvals(found.double())
    low, high = ORTHOGONAL_RANGE
    assert low < float(values.min()) <= float(values.max()) < high
    root_mean_square = float(found.double().square().mean().sqrt()) * math.sqrt(max(shape))
    exact = float(expected(conditioned(shape)).square().mean().sqrt()) * math.sqrt(max(shape))
    assert root_mean_square == pytest.approx(exact, rel=ORTHOGONAL_RMS)


def test_the_published_range_is_that_of_the_polynomial_itself() -> None:
    """All but the smallest values end between its local minimum and maximum: 0.682 and 1.202, published as 0.7 to 1.2."""
    values = polynomial(torch.linspace(0.0016, 1.0, 1_000_001, dtype=torch.float64), 5)
    assert (round(float(values.min()), 3), round(float(values.max()), 3)) == (0.682, 1.202)
    low, high = ORTHOGONAL_RANGE
    assert low < float(values.min()) < float(values.max()) < high


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_matrix_depends_on_its_company(dtype: torch.dtype) -> None:
    """Batches by shape, a shape too large for a batch, and rows of a larger matrix."""
    wide = torch.promote_types(dtype, torch.float32)
    stack = torch.stack([drawn((24, 40), seed) for seed in range(80)]).to(wide)
    large = drawn((300, 256)).to(wide)
    matrices = [*stack.unbind(), large, large[100:124, :40].contiguous(), large[40:]]
    together = orthogonalise(matrices, 5, dtype)
    for matrix, found in zip(matrices, together, strict=True):
        (alone,) = orthogonalise([matrix.clone()], 5, dtype)
        assert torch.equal(found, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_and_its_transpose_have_the_same_bits(dtype: torch.dtype) -> None:
    matrix = drawn((60, 20)).to(torch.promote_types(dtype, torch.float32))
    tall, wide = orthogonalise([matrix, matrix.mT.contiguous()], 5, dtype)
    assert torch.equal(tall.mT, wide)


def test_the_scale_of_a_matrix_is_lost_and_nothing_comes_of_nothing() -> None:
    matrix = drawn((6, 9)).float()
    whole, small, faded, none = orthogonalise([matrix, matrix * 2**-10, matrix * 1e-20, matrix * 0], 5, torch.float32)
    assert torch.equal(whole, small)
    bound = 2 * 3.4445**5 * 1e-20 * float(torch.linalg.norm(matrix)) / FLOOR
    assert 0 < float(torch.linalg.norm(faded)) < bound
    assert not none.any()


def test_a_nan_stays_in_its_own_matrix() -> None:
    broken = drawn((6, 9)).float()
    broken[2, 3] = math.nan
    healthy = drawn((6, 9), 1).float()
    first, second = orthogonalise([broken, healthy], 5, torch.float32)
    assert first.isnan().any()
    assert torch.equal(second, orthogonalise([healthy], 5, torch.float32)[0])


def test_no_matrices_are_no_work() -> None:
    assert orthogonalise([], 5, torch.float32) == []
