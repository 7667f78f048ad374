"""Causal attention inside documents: projections, QK-norm and RoPE around a kernel (``attention_backends``)."""

from torch import Tensor, nn

from surefoot.config.model import GroupedQueryAttention, ModelConfig, RMSNorm
from surefoot.model.norm import RootMeanSquareNorm
from surefoot.model.parts import AttendContext, Linear, build_custom
from surefoot.model.role_scaling import Role, multipliers
from surefoot.model.rope import rotate

QK_NORM_EPS = 1e-6


class GroupedAttention(nn.Module):
    """Causal self-attention whose query heads share key and value heads (arXiv:2305.13245), with RoPE and optional per-head QK-norm."""

    def __init__(
        self, d_model: int, cfg: GroupedQueryAttention, norm_eps: float, logit_multiplier: float = 1.0
    ) -> None:
        """``logit_multiplier``: of logits q k^T / sqrt(H)."""
        super().__init__()
        self.logit_multiplier = logit_multiplier
        self.d_head = cfg.d_head
        self.query = Linear(d_model, cfg.num_heads * cfg.d_head)
        self.key = Linear(d_model, cfg.num_kv_heads * cfg.d_head)
        self.value = Linear(d_model, cfg.num_kv_heads * cfg.d_head)
        self.output = Linear(cfg.num_heads * cfg.d_head, d_model)
        self.query_norm = RootMeanSquareNorm(cfg.d_head, norm_eps) if cfg.qk_norm else None
        self.key_norm = RootMeanSquareNorm(cfg.d_head, norm_eps) if cfg.qk_norm else None

    def forward(self, x_BTD: Tensor, context: AttendContext) -> Tensor:
        rows, tokens, _ = x_BTD.shape
        # by head width, never by head count: under tensor parallelism a rank holds fewer heads
        q_BTNH = self.query(x_BTD).view(rows, tokens, -1, self.d_head)
        k_BSKH = self.key(x_BTD).view(rows, tokens, -1, self.d_head)
        v_BSKH = self.value(x_BTD).view(rows, tokens, -1, self.d_head)
        if self.query_norm is not None and self.key_norm is not None:
            q_BTNH, k_BSKH = self.query_norm(q_BTNH), self.key_norm(k_BSKH)
        if context.rotation is not None:
            q_BTNH, k_BSKH = rotate(q_BTNH, context.rotation), rotate(k_BSKH, context.rotation)
        if self.logit_multiplier != 1.0:
            q_BTNH = q_BTNH * self.logit_multiplier
        if context.maxima is not None:
            context.maxima.see(q_BTNH, k_BSKH)
        o_BTNH = context.attend(q_BTNH, k_BSKH, v_BSKH, context.mask)
        out_BTD: Tensor = self.output(o_BTNH.reshape(rows, tokens, -1))
        return out_BTD

    def roles(self) -> dict[str, Role]:
        return {f"{name}.weight": "hidden" for name in ("query", "key", "value", "output")}

    def writes_residual(self) -> tuple[str, ...]:
        return ("output.weight",)


def build_attention(cfg: ModelConfig, layer: int) -> nn.Module:
    """The attention of ``cfg.attention`` for one layer."""
    if isinstance(cfg.attention, GroupedQueryAttention):
        eps = cfg.norm.eps if isinstance(cfg.norm, RMSNorm) else QK_NORM_EPS
        return GroupedAttention(cfg.d_model, cfg.attention, eps, multipliers(cfg).attention)
    return build_custom(cfg.attention, cfg, layer, place="model.attention")
