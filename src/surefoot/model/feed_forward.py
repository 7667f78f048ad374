"""The position-wise part of a block."""

import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.config.model import ModelConfig, SwiGLU
from surefoot.model.parts import AttendContext, Linear, build_custom
from surefoot.model.role_scaling import Role


class GatedFeedForward(nn.Module):
    """down(silu(gate x) * up x) (arXiv:2002.05202 eq. 6)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = Linear(d_model, d_ff)
        self.up = Linear(d_model, d_ff)
        self.down = Linear(d_ff, d_model)

    def forward(self, x_BTD: Tensor, context: AttendContext) -> Tensor:
        out_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD

    def roles(self) -> dict[str, Role]:
        return {"gate.weight": "hidden", "up.weight": "hidden", "down.weight": "hidden"}

    def writes_residual(self) -> tuple[str, ...]:
        return ("down.weight",)


def build_feed_forward(cfg: ModelConfig, layer: int) -> nn.Module:
    """The feed-forward of ``cfg.feed_forward`` for one layer."""
    if isinstance(cfg.feed_forward, SwiGLU):
        return GatedFeedForward(cfg.d_model, cfg.feed_forward.d_ff)
    return build_custom(cfg.feed_forward, cfg, layer, place="model.feed_forward")
