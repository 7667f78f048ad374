"""The decoder: tokens in, logits or losses out. One page."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.config.model import GroupedQueryAttention, ModelConfig
from surefoot.model.attention import build_attention
from surefoot.model.attention_backends import choose_backend
from surefoot.model.feed_forward import build_feed_forward
from surefoot.model.loss import LossSums, next_token_loss
from surefoot.model.norm import build_norm
from surefoot.model.parametrization import Role
from surefoot.model.parts import AttendContext, Embedding, Linear
from surefoot.model.rope import rotation


class Block(nn.Module):
    """One layer: attention, then feed-forward, each reading a normed copy of the residual stream and adding to it."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(cfg, layer)
        self.attention = build_attention(cfg, layer)
        self.feed_forward_norm = build_norm(cfg, layer)
        self.feed_forward = build_feed_forward(cfg, layer)

    def forward(self, x_BTD: Tensor, context: AttendContext) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), context)
        out_BTD: Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD), context)
        return out_BTD


class Transformer(nn.Module):
    """A pre-norm decoder. Parameters are fp32 (fp64 when computing in fp64) and undrawn until ``parametrization.initialise``;
    the residual stream and every product are in ``compute_dtype``."""

    def __init__(self, cfg: ModelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.cfg = cfg
        self.compute_dtype = compute_dtype
        self.embedding = Embedding(cfg.vocab_size, cfg.d_model, compute_dtype, cfg.embedding_gradient)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.num_layers))
        self.norm = build_norm(cfg, cfg.num_layers)
        self.head = None if cfg.tie_embeddings else Linear(cfg.d_model, cfg.vocab_size)
        self.to(torch.promote_types(compute_dtype, torch.float32))

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None, targets_BT: Tensor | None = None
    ) -> Tensor | LossSums:
        """Logits (B, T, V) in fp32, or with targets the sums of their losses, for which the logits never exist at once.

        ``documents_BT`` None means that every row is one document. The head is used here, not in a module of its own, so that a sharded
        model has it gathered.
        """
        x_BTD = self.embedding(tokens_BT)
        context = self._context(x_BTD, positions_BT, documents_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, context)
        x_BTD = self.norm(x_BTD)
        weight_VD = self.embedding.weight if self.head is None else self.head.weight
        if targets_BT is None:
            return F.linear(x_BTD, weight_VD.to(x_BTD.dtype)).to(torch.promote_types(x_BTD.dtype, torch.float32))
        loss = self.cfg.loss
        return next_token_loss(x_BTD, weight_VD, targets_BT, z_loss=loss.z_loss, chunk_tokens=loss.chunk_tokens)

    def _context(self, x_BTD: Tensor, positions_BT: Tensor, documents_BT: Tensor | None) -> AttendContext:
        """What all layers share, computed once: mask, kernel and angles."""
        attend = choose_backend(self.cfg.attention_backend, x_BTD.device, x_BTD.dtype, documents_BT is not None)
        mask, angles = None, None
        if isinstance(self.cfg.attention, GroupedQueryAttention):
            mask = attend.prepare(documents_BT, x_BTD)
            wide = torch.promote_types(x_BTD.dtype, torch.float32)
            angles = rotation(positions_BT, self.cfg.attention.d_head, self.cfg.attention.rope_theta, wide)
        return AttendContext(positions_BT, documents_BT, mask, attend, angles)

    def roles(self) -> dict[str, Role]:
        own: dict[str, Role] = {"embedding.weight": "embedding"}
        if self.head is not None:
            own["head.weight"] = "output"
        return own
