"""Rotary positions: a head is turned by an angle proportional to its token's position (arXiv:2104.09864 eq. 34)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Rotation:
    """Cosine and sine of every angle, (B, T, 1, H/2), fp32 (fp64 in an fp64 model); shared by all layers of a forward.

    No tuple and no dataclass: FSDP2 looks for tensors in those, whatever holds them, and would round the angles to the compute dtype.
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin


def rotation(positions_BT: Tensor, d_head: int, theta: float, dtype: torch.dtype = torch.float32) -> Rotation:
    """The rotation of each token; frequency i is theta^(-2i/H) (arXiv:2104.09864 eq. 15).

    Computed at every forward, not kept in a buffer, so that a model built on the meta device needs no rebuilding.
    """
    exponents = torch.arange(0, d_head, 2, device=positions_BT.device, dtype=dtype) / d_head
    frequencies = 1.0 / theta**exponents
    angles = positions_BT.to(dtype)[:, :, None, None] * frequencies
    return Rotation(angles.cos(), angles.sin())


def rotate(x_BTNH: Tensor, by: Rotation) -> Tensor:
    """Turns every head. Feature i is paired with i + H/2, the layout of Hugging Face Llama, so weights carry over unchanged.

    Products in fp32, rounded once to the dtype of x.
    """
    turned: Tensor = _Turn.apply(x_BTNH, by.cos, by.sin)  # type: ignore[no-untyped-call]
    return turned


class _Turn(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, so nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x_BTNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_BTNH, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grad_BTNH, cos, sin, -1), None, None


def _turned(x_BTNH: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """x turned forwards (1) or back (-1)."""
    half = x_BTNH.shape[-1] // 2
    first, second = x_BTNH[..., :half].to(cos.dtype), x_BTNH[..., half:].to(cos.dtype)
    out = torch.empty_like(x_BTNH)
    out[..., :half] = torch.addcmul(first * cos, second, sin, value=-direction)
    out[..., half:] = torch.addcmul(second * cos, first, sin, value=direction)
    return out
