"""The decoder: tokens in, logits or losses out. One page."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from surefoot.config.model import GroupedQueryAttention, ModelConfig
from surefoot.model.attention import build_attention
from surefoot.model.attention_backends import AttentionBackend, choose_backend
from surefoot.model.attention_maxima import AttentionMaxima
from surefoot.model.feed_forward import build_feed_forward
from surefoot.model.loss import LossSums, NextTokenLoss, next_token_loss
from surefoot.model.norm import build_norm
from surefoot.model.parts import AttendContext, Embedding, Linear, Product, plain_product
from surefoot.model.role_scaling import Role, multipliers
from surefoot.model.rope import rotation


class Block(nn.Module):
    """One layer: attention, then feed-forward, each reading a normed copy of the residual stream and adding to it."""

    def __init__(self, cfg: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(cfg, layer)
        self.attention = build_attention(cfg, layer)
        self.feed_forward_norm = build_norm(cfg, layer)
        self.feed_forward = build_feed_forward(cfg, layer)
        self.residual_multiplier = multipliers(cfg).residual

    def forward(self, x_BTD: Tensor, context: AttendContext) -> Tensor:
        x_BTD = self._add(x_BTD, self.attention(self.attention_norm(x_BTD), context))
        return self._add(x_BTD, self.feed_forward(self.feed_forward_norm(x_BTD), context))

    def _add(self, x_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        return torch.add(x_BTD, branch_BTD, alpha=self.residual_multiplier)


class Transformer(nn.Module):
    """A pre-norm decoder. Parameters are in ``weights_dtype`` (fp32, or fp64 when computing in fp64, unless given) and undrawn until
    ``parametrization.initialise``; the residual stream and every product are in ``compute_dtype``.

    A stretch of one is a Transformer too: ``embedding`` or ``norm`` (with ``head``) are None, some blocks are gone, the others keep their
    names. Without the embedding it takes the residual stream instead of tokens, without the norm it gives it back.
    """

    def __init__(self, cfg: ModelConfig, compute_dtype: torch.dtype, weights_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.compute_dtype = compute_dtype
        self.output_dtype: torch.dtype | None = None
        """Of the product with the output projection; None is ``compute_dtype``."""
        self.multipliers = multipliers(cfg)
        self.maxima: AttentionMaxima | None = None
        self.loss: NextTokenLoss = next_token_loss
        self.logits: Product = plain_product
        """The product with the output projection, where it is not folded into the loss."""
        self.around_kernel: Callable[[AttentionBackend], AttentionBackend] = bare_kernel
        """What is put around the attention kernel."""
        self.embedding: Embedding | None = Embedding(cfg.vocab_size, cfg.d_model, compute_dtype, cfg.embedding_gradient)
        self.blocks: nn.ModuleList | nn.ModuleDict = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.num_layers))
        self.norm: nn.Module | None = build_norm(cfg, cfg.num_layers)
        self.head = None if cfg.tie_embeddings else Linear(cfg.d_model, cfg.vocab_size)
        self.to(weights_dtype or torch.promote_types(compute_dtype, torch.float32))

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None, targets_BT: Tensor | None = None
    ) -> Tensor | LossSums:
        """Logits (B, T, V) in fp32, or with targets the sums of their losses, for which the logits never exist at once.

        ``documents_BT`` None means that every row is one document. The head is used here, not in a module of its own, so that a sharded
        model has it gathered. A stretch takes and gives (B, T, D) at its cut ends.
        """
        x_BTD = tokens_BT
        if self.embedding is not None:
            x_BTD = _scaled(self.embedding(tokens_BT), self.multipliers.embedding)
        context = self._context(x_BTD, positions_BT, documents_BT)
        for block in self.blocks.children():
            x_BTD = block(x_BTD, context)
        if context.maxima is not None:
            context.maxima.settle(documents_BT)
        if self.norm is None:
            return x_BTD
        x_BTD = _scaled(self.norm(x_BTD), self.multipliers.logits).to(self.output_dtype or x_BTD.dtype)
        weight_VD = self._output_weight()
        if targets_BT is None:
            return self.logits(x_BTD, weight_VD).to(torch.promote_types(x_BTD.dtype, torch.float32))
        loss = self.cfg.loss
        return self.loss(x_BTD, weight_VD, targets_BT, z_loss=loss.z_loss, chunk_tokens=loss.chunk_tokens)

    def _output_weight(self) -> Tensor:
        if self.head is not None:
            return self.head.weight
        assert self.embedding is not None
        return self.embedding.weight

    def _context(self, x_BTD: Tensor, positions_BT: Tensor, documents_BT: Tensor | None) -> AttendContext:
        """What all layers share, computed once: mask, kernel and angles."""
        kernel = choose_backend(self.cfg.attention_backend, x_BTD.device, x_BTD.dtype, documents_BT is not None)
        attend = self.around_kernel(kernel)
        mask, angles = None, None
        if isinstance(self.cfg.attention, GroupedQueryAttention):
            # as many tokens as attention sees, which may be more than the residual stream holds here
            mask = attend.prepare(documents_BT, x_BTD.new_empty(()).expand(*positions_BT.shape, 1))
            wide = torch.promote_types(x_BTD.dtype, torch.float32)
            angles = rotation(positions_BT, self.cfg.attention.d_head, self.cfg.attention.rope_theta, wide)
        maxima = self.maxima if self.maxima is not None and self.maxima.watching else None
        if maxima is not None:
            maxima.begin([int(name) for name, _ in self.blocks.named_children()], attend)
        return AttendContext(positions_BT, documents_BT, mask, attend, angles, maxima)

    def roles(self) -> dict[str, Role]:
        own: dict[str, Role] = {"embedding.weight": "embedding"}
        if self.head is not None:
            own["head.weight"] = "output"
        return own


def bare_kernel(kernel: AttentionBackend) -> AttentionBackend:
    """The kernel, with nothing around it."""
    return kernel


def _scaled(x: Tensor, multiplier: float) -> Tensor:
    """The same tensor where there is nothing to multiply by."""
    return x if multiplier == 1.0 else x * multiplier
