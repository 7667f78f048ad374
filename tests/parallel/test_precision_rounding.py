"""Rounded operands: against plain loops, against torchao, and what must not get lost in them."""

import math

import pytest
import torch
from torch import Tensor

from surefoot.config.errors import ConfigError
from surefoot.parallel.fp8 import check_shapes, gpu_product
from surefoot.parallel.rounded import Recipe, fp8_product, fp8_rounded, fp16_product
from tolerances import FP8_LOOPS, FP8_TORCHAO

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operands(
    rows: int, columns: int, outputs: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Input with columns of very different size, weight, gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(columns, generator=generator).exp()
    # so far apart that a scale along the wrong dim loses rows or columns below the smallest fp8 number
    w = torch.randn(outputs, columns, generator=generator) * torch.randn(outputs, 1, generator=generator).mul(4).exp()
    g = torch.randn(rows, outputs, generator=generator) * torch.randn(rows, 1, generator=generator).mul(2).exp() * 1e-3
    return x.to(dtype), w, g.to(dtype)


def backward(product: object, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = product(x, w)  # type: ignore[operator]
    out.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return out.detach(), x.grad, w.grad


def distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.norm(a.double() - b.double()) / torch.linalg.norm(b.double()))


def by_loops(matrix: Tensor, rows: int, columns: int, *, powers_of_2: bool = False) -> Tensor:
    """Each block of ``rows`` x ``columns`` scaled to the largest e4m3, by torch's own conversions."""
    out = torch.empty_like(matrix)
    for i in range(0, matrix.shape[0], rows):
        for j in range(0, matrix.shape[1], columns):
            block = matrix[i : i + rows, j : j + columns]
            scale = 448.0 / float(block.abs().max())
            scale = 2.0 ** math.floor(math.log2(scale)) if powers_of_2 else scale
            out[i : i + rows, j : j + columns] = (block * scale).to(E4M3).float() / scale
    return out


def test_the_blockwise_recipe_is_a_scale_per_tile_of_the_summed_dim_and_per_block_of_weights() -> None:
    """200 x 300 and 150: every dim ends in a partial block."""
    x, w, g = operands(200, 300, 150)
    weights = by_loops(w, 128, 128)
    y = by_loops(x, 1, 128) @ weights.t()
    dx = by_loops(g, 1, 128) @ weights
    dw = by_loops(g, 128, 1).t() @ by_loops(x, 128, 1)
    for ours, reference in zip(backward(fp8_product("blockwise"), x, w, g), (y, dx, dw), strict=True):
        assert distance(ours, reference) < FP8_LOOPS


def test_the_rowwise_recipe_is_a_scale_per_line_of_the_summed_dim() -> None:
    x, w, g = operands(96, 64, 48)

    def lines(matrix: Tensor, dim: int) -> Tensor:
        rows, columns = (1, matrix.shape[1]) if dim == 1 else (matrix.shape[0], 1)
        return by_loops(matrix, rows, columns, powers_of_2=True)

    reference = (lines(x, 1) @ lines(w, 1).t(), lines(g, 1) @ lines(w, 0), lines(g, 0).t() @ lines(x, 0))
    for ours, expected in zip(backward(fp8_product("rowwise"), x, w, g), reference, strict=True):
        assert distance(ours, expected) < FP8_LOOPS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_is_emulated_is_what_torchao_computes(recipe: Recipe, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    x, w, g = operands(96, 64, 48, dtype)
    theirs = backward(gpu_product(recipe, emulate=True), x, w, g)
    for ours, reference in zip(backward(fp8_product(recipe), x, w, g), theirs, strict=True):
        assert distance(ours, reference) < FP8_TORCHAO[dtype]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_value_of_an_fp8_type_comes_back_as_it_is(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[torch.isfinite(values)][None]
    assert torch.equal(fp8_rounded(values, dtype, "tensor", dim=1), values)
    assert torch.equal(fp8_rounded(values, dtype, "line", dim=1, powers_of_2=True), values)


def test_rounding_down_to_powers_of_two_rounds_scales_and_nothing_twice() -> None:
    line = torch.tensor([[300.0, 1.0, 0.013, 2.0**-20]])
    rounded = fp8_rounded(line, E4M3, "line", dim=1, powers_of_2=True)
    assert torch.equal(rounded, line.to(E4M3).float())
    assert not torch.equal(fp8_rounded(line, E4M3, "line", dim=1), rounded)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(fp8_rounded(torch.zeros(4, 4), E4M3, "tile", dim=1), torch.zeros(4, 4))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group", ["tensor", "line", "tile", "block"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_not_finite_is_not_rounded_away(broken: float, group: str, dtype: torch.dtype) -> None:
    matrix = torch.ones(4, 4)
    matrix[1, 2] = broken
    for dim in (0, 1):
        for powers in (False, True):
            rounded = fp8_rounded(matrix, dtype, group, dim=dim, powers_of_2=powers)  # type: ignore[arg-type]
            assert not torch.isfinite(rounded[1, 2])


def test_gradients_are_e5m2_under_the_tensorwise_recipe_and_e4m3_under_the_others() -> None:
    """A gradient with one entry in a thousandth of the largest is zero in neither, but e4m3 has the digits and e5m2 the range."""
    g = torch.tensor([[1.0, 1.0 / 3.0], [2.0**-17, 0.0]])
    w = torch.eye(2)
    kept = {}
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        kept[recipe] = backward(fp8_product(recipe), torch.ones(2, 2), w, g)[1]  # type: ignore[arg-type]
    assert kept["tensorwise"][1, 0] > 0
    error = {recipe: abs(float(grad[0, 1]) - 1 / 3) for recipe, grad in kept.items()}
    assert error["tensorwise"] > 0.02 > max(error["rowwise"], error["blockwise"])


def test_fp16_operands_are_rounded_and_the_result_is_and_gradients_are() -> None:
    x, w, g = operands(8, 16, 4, torch.float16)
    out, grad_x, grad_w = backward(fp16_product, x, w, g)
    narrow = w.to(torch.float16).float()
    assert out.dtype == grad_x.dtype == torch.float16
    assert grad_w.dtype == torch.float32
    assert torch.equal(out, (x.float() @ narrow.t()).to(torch.float16))
    assert torch.equal(grad_x, (g.float() @ narrow).to(torch.float16))
    assert torch.equal(grad_w, (g.float().t() @ x.float()).to(torch.float16).float())
    large = torch.full((1, 16), 3e4, dtype=torch.float16)
    assert torch.isinf(fp16_product(large, torch.ones(4, 16))).all()


def test_matrices_that_kernels_cannot_take_are_refused_with_the_way_out() -> None:
    check_shapes("rowwise", {"blocks.0.feed_forward.up": (96, 64)})
    with pytest.raises(
        ConfigError, match=r"multiples of 128 on a GPU, and blocks.0.feed_forward.up is 96 x 64; .*parallel.fp8.high"
    ):
        check_shapes("blockwise", {"blocks.0.feed_forward.up": (96, 64)})
    with pytest.raises(ConfigError, match=r"rowwise takes matrices whose sides are multiples of 16"):
        check_shapes("rowwise", {"blocks.0.feed_forward.up": (40, 64)})


def test_without_torchao_a_gpu_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8.config", None)
    with pytest.raises(ImportError, match=r"needs torchao: pip install -e '.\[fp8\]'"):
        gpu_product("rowwise")
