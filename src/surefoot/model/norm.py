"""Norms of the residual stream and of single heads."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.config.model import ModelConfig, RMSNorm
from surefoot.model.parts import build_custom
from surefoot.model.role_scaling import Role


def as_it_is(weight: Tensor) -> Tensor:
    """The weight."""
    return weight


class RootMeanSquareNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) times a learned gain, over the last dim (arXiv:1910.07467 eq. 4).

    torch computes statistics and product in fp32 (fp64 for fp64 inputs) and rounds once, to the dtype of x, forward and backward (tested);
    the gain enters in the dtype of x, as it does when FSDP2 casts it.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.read: Callable[[Tensor], Tensor] = as_it_is
        """How the gain is read."""

    def forward(self, x: Tensor) -> Tensor:
        gain = self.read(self.weight)
        return F.rms_norm(x, gain.shape, gain.to(x.dtype), self.eps)

    def roles(self) -> dict[str, Role]:
        return {"weight": "norm"}


def build_norm(cfg: ModelConfig, layer: int) -> nn.Module:
    """The norm of ``cfg.norm`` over d_model; ``layer`` is num_layers for the last one, before the output projection."""
    if isinstance(cfg.norm, RMSNorm):
        return RootMeanSquareNorm(cfg.d_model, cfg.norm.eps)
    return build_custom(cfg.norm, cfg, layer, place="model.norm")
