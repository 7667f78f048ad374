"""The norm against its definition, and its promise to compute in fp32."""

import pytest
import torch
from torch import Tensor

from surefoot.model.norm import RootMeanSquareNorm
from tolerances import ONE_ROUNDING


def defined(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


@pytest.mark.parametrize("dtype", ONE_ROUNDING)
def test_the_result_and_its_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(4, 50, 320, generator=draw, dtype=torch.float64)).to(dtype).requires_grad_()
    grad = torch.randn(4, 50, 320, generator=draw, dtype=torch.float64).to(dtype)
    norm = RootMeanSquareNorm(320, 1e-3)
    with torch.no_grad():
        norm.weight.copy_((1 + 0.3 * torch.randn(320, generator=draw)).bfloat16())
    norm.to(torch.promote_types(dtype, torch.float32))
    out = norm(x)
    out.backward(grad)
    exact_x, exact_gain = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = defined(exact_x, exact_gain, 1e-3)
    exact.backward(grad.double())
    assert out.dtype == dtype
    for ours, theirs in ((out, exact), (x.grad, exact_x.grad), (norm.weight.grad, exact_gain.grad)):
        assert ours is not None
        assert theirs is not None
        assert float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm()) <= ONE_ROUNDING[dtype]


def test_a_row_of_zeros_stays_finite() -> None:
    norm = RootMeanSquareNorm(8, 1e-5)
    torch.nn.init.ones_(norm.weight)
    x = torch.zeros(1, 8, requires_grad=True)
    norm(x).sum().backward()
    assert norm(x).eq(0).all()
    assert torch.isfinite(x.grad).all()
