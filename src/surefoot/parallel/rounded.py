"""Products whose operands are rounded to eight or sixteen bits and multiplied in a wider type: what low precision does, on any processor.

What is lost is the operands' digits, forward and backward. Accumulation is not emulated: sums run in the type that multiplies, as wide as
tensor cores' own or wider.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from surefoot.model.parts import Product

TILE = 128
"""Elements of an activation or gradient that share a scale under ``blockwise``; of a weight, TILE x TILE (arXiv:2412.19437 section 3.3.2)."""
SMALLEST = 1e-12
"""Magnitude that a largest value is taken for at least, so that zeros have a scale."""

Recipe = Literal["tensorwise", "rowwise", "blockwise"]
Group = Literal["tensor", "line", "tile", "block"]
"""Elements with one scale: all; those that one sum runs over; TILE of those; TILE x TILE."""


@dataclass(frozen=True, kw_only=True)
class Fp8Rule:
    """What one recipe does to the operands of a product and of the two of its backward, each along the dim that is summed."""

    operands: Group
    """Of activations and gradients."""
    weights: Group
    gradients: torch.dtype
    """Of what comes back; inputs and weights are e4m3."""
    powers_of_2: bool
    """Scales are rounded down to powers of two, so that scaling itself rounds nothing."""


FP8_RULES: dict[Recipe, Fp8Rule] = {
    "tensorwise": Fp8Rule(operands="tensor", weights="tensor", gradients=torch.float8_e5m2, powers_of_2=False),
    "rowwise": Fp8Rule(operands="line", weights="line", gradients=torch.float8_e4m3fn, powers_of_2=True),
    "blockwise": Fp8Rule(operands="tile", weights="block", gradients=torch.float8_e4m3fn, powers_of_2=False),
}
"""The first two are torchao's recipes of these names (a test compares), the third is DeepSeek-V3's (arXiv:2412.19437 section 3.3)."""


def fp8_product(recipe: Recipe) -> Product:
    """y = q(x) q(w)^T with dx = q(g) q(w) and dw = q(g)^T q(x), q rounding to fp8 and back to the dtype of the input, which multiplies.

    A tensorwise scale is that of the rows at hand: it differs between layouts and micro-batch sizes, as it does on GPUs.
    """
    rule = FP8_RULES[recipe]

    def product(input: Tensor, weight: Tensor) -> Tensor:
        # rounded to the compute dtype first, as FSDP2 does when it gathers: no layout changes the operands
        out: Tensor = _Fp8Product.apply(input, weight.to(input.dtype), rule)  # type: ignore[no-untyped-call]
        return out

    # a block that is compiled goes around it: what follows is many small passes, which take the compiler minutes
    outside: Product = torch.compiler.disable(product)  # type: ignore[no-untyped-call]
    return outside


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, rule: Fp8Rule) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.rule = rule
        x = _e4m3(input.reshape(-1, input.shape[-1]), rule.operands, rule, dim=1)
        out = x @ _e4m3(weight, rule.weights, rule, dim=1).t()
        return out.view(*input.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rule: Fp8Rule = ctx.rule
        flat, rows = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            by_columns = fp8_rounded(flat, rule.gradients, rule.operands, dim=1, powers_of_2=rule.powers_of_2)
            grad_input = (by_columns @ _e4m3(weight, rule.weights, rule, dim=0)).view_as(input)
        if ctx.needs_input_grad[1]:
            by_rows = fp8_rounded(flat, rule.gradients, rule.operands, dim=0, powers_of_2=rule.powers_of_2)
            grad_weight = by_rows.t() @ _e4m3(rows, rule.operands, rule, dim=0)
        return grad_input, grad_weight, None


def _e4m3(matrix: Tensor, group: Group, rule: Fp8Rule, *, dim: int) -> Tensor:
    return fp8_rounded(matrix, torch.float8_e4m3fn, group, dim=dim, powers_of_2=rule.powers_of_2)


def fp8_rounded(matrix: Tensor, dtype: torch.dtype, group: Group, *, dim: int, powers_of_2: bool = False) -> Tensor:
    """A matrix as fp8 with scales holds it, in its own dtype again. ``dim`` is the one that is summed.

    The largest value of a group becomes the largest of the fp8 type. A group with a value that is not finite comes back without a finite one.
    """
    wide = torch.promote_types(matrix.dtype, torch.float32)
    top = _largest(matrix, group, dim).double().clamp(min=SMALLEST)
    scale = (torch.finfo(dtype).max / top).float()
    if powers_of_2:
        scale = torch.exp2(scale.log2().floor())
    narrow = (matrix.to(wide) * _spread(scale, matrix, group, dim)).to(dtype)
    return (_widened(narrow).to(wide) * _spread(_UNBIAS[dtype] / scale, matrix, group, dim)).to(matrix.dtype)


def _largest(matrix: Tensor, group: Group, dim: int) -> Tensor:
    """Largest magnitude of every group; a last group may be smaller than the others."""
    size = matrix.abs()
    if group == "tensor":
        return size.amax()
    if group == "line":
        return size.amax(dim, keepdim=True)
    rows, columns = _group_shape(group, dim)
    missing = (-size.shape[0] % rows, -size.shape[1] % columns)
    if any(missing):
        size = F.pad(size, (0, missing[1], 0, missing[0]))
    return size.reshape(size.shape[0] // rows, rows, size.shape[1] // columns, columns).amax((1, 3))


def _spread(scale: Tensor, matrix: Tensor, group: Group, dim: int) -> Tensor:
    """Scales so that they multiply the matrix element by element."""
    if group in ("tensor", "line"):
        return scale
    rows, columns = _group_shape(group, dim)
    if rows > 1:
        scale = scale.repeat_interleave(rows, 0)[: matrix.shape[0]]
    if columns > 1:
        scale = scale.repeat_interleave(columns, 1)[:, : matrix.shape[1]]
    return scale


def _group_shape(group: Group, dim: int) -> tuple[int, int]:
    if group == "block":
        return TILE, TILE
    return (1, TILE) if dim == 1 else (TILE, 1)


_UNBIAS = {torch.float8_e4m3fn: 2.0**8, torch.float8_e5m2: 1.0}
"""What bits moved into fp16 are multiplied by: the exponents of e4m3 are counted from 7, those of fp16 from 15."""


def _widened(narrow: Tensor) -> Tensor:
    """fp8 values as fp16, over ``_UNBIAS``: the bits moved, four times as fast on a CPU as torch's own conversion. The NaN of e4m3 does not
    survive it; the scale of its group, which is NaN or 0 then, keeps it."""
    bits = narrow.view(torch.int8).to(torch.int16) << 8
    if narrow.dtype == torch.float8_e4m3fn:
        bits = (bits >> 1) & ~0x4000
    return bits.view(torch.float16)


def fp16_product(input: Tensor, weight: Tensor) -> Tensor:
    """Operands rounded to fp16, multiplied in fp32, the result rounded to fp16, forward and backward: for CPUs, whose fp16 products are
    a hundred times slower. In an fp32 model the operands are as they are."""
    if input.dtype != torch.float16:
        return F.linear(input, weight.to(input.dtype))
    return F.linear(input.float(), weight.to(torch.float16).float()).to(torch.float16)
