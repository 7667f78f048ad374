"""A part nobody merged: attention over the running mean of values, with a learned gate. Imported by path, as a user's file would be."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.config.model import ModelConfig
from surefoot.model.parts import AttendContext
from surefoot.model.role_scaling import Role


class RunningMean(nn.Module):
    """gate(x) times the mean of value(x) over the document so far."""

    def __init__(self, cfg: ModelConfig, width: int) -> None:
        super().__init__()
        self.value = nn.Linear(cfg.d_model, width, bias=False)
        self.gate = nn.Linear(cfg.d_model, width)
        self.out = nn.Linear(width, cfg.d_model, bias=False)

    def forward(self, x_BTD: Tensor, context: AttendContext) -> Tensor:
        seen = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool).tril()[None]
        if context.documents_BT is not None:
            seen = seen & (context.documents_BT[:, :, None] == context.documents_BT[:, None, :])
        weights = seen.to(x_BTD.dtype) / seen.sum(-1, keepdim=True).to(x_BTD.dtype)
        values = F.linear(x_BTD, self.value.weight.to(x_BTD.dtype))
        gate = torch.sigmoid(F.linear(x_BTD, self.gate.weight.to(x_BTD.dtype), self.gate.bias.to(x_BTD.dtype)))
        return F.linear(gate * (weights @ values), self.out.weight.to(x_BTD.dtype))

    def roles(self) -> dict[str, Role]:
        return {"value.weight": "hidden", "gate.weight": "hidden", "gate.bias": "bias", "out.weight": "hidden"}

    def writes_residual(self) -> tuple[str, ...]:
        return ("out.weight",)

    def flops_per_token(self, seq_len: int) -> float:
        projections = 6.0 * (self.value.weight.numel() + self.gate.weight.numel() + self.out.weight.numel())
        return projections + 6.0 * seq_len * self.value.out_features


class Undeclared(RunningMean):
    """Forgets one of its parameters."""

    def roles(self) -> dict[str, Role]:
        return {name: role for name, role in super().roles().items() if name != "gate.bias"}


class Mute(nn.Module):
    """Says nothing about itself."""


def build(cfg: ModelConfig, layer: int, width: int) -> nn.Module:
    return RunningMean(cfg, width + layer)


def build_undeclared(cfg: ModelConfig, layer: int) -> nn.Module:
    return Undeclared(cfg, 8)


def build_mute(cfg: ModelConfig, layer: int) -> nn.Module:
    return Mute()


def build_nothing(cfg: ModelConfig, layer: int) -> str:
    return "nothing"
