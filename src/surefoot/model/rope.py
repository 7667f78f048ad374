"""Rotary positions: a head is turned by an angle proportional to its token's position (arXiv:2104.09864 eq. 34)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosine and sine of every angle, (B, T, 1, H/2), fp32 (fp64 in an fp64 model); shared by all layers of a forward."""

    cos: Tensor
    sin: Tensor


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
    first, second = x_BTNH.chunk(2, dim=-1)
    first, second = first.to(by.cos.dtype), second.to(by.cos.dtype)
    turned = torch.cat((first * by.cos - second * by.sin, second * by.cos + first * by.sin), dim=-1)
    return turned.to(x_BTNH.dtype)
