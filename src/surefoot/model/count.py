"""Parameters, floating-point operations and bytes of a model, from its config alone. No torch, so that planning answers at once.

Conventions. A multiply and an add are two operations. A training step costs forward plus backward, three times the forward. Counted are
matrix products only: projections, feed-forward, output projection and the two products of attention; norms, RoPE, softmax, the embedding
look-up and recomputation are not. Per token that is 6 operations per matmul parameter (2 forward, 4 backward; arXiv:2001.08361 section
2.1) plus 12 N H S per layer for attention over S keys (arXiv:2204.02311 appendix B).
"""

from dataclasses import dataclass

from surefoot.config.model import Custom, GroupedQueryAttention, ModelConfig, RMSNorm, SwiGLU


class CountError(Exception):
    """A count that the config alone cannot give."""


@dataclass(frozen=True)
class ParamCount:
    """Parameters by what they are."""

    total: int
    embedding: int
    """The input embedding table; under tied embeddings it is the output projection too."""
    output: int
    """The output projection of its own; 0 when tied."""

    @property
    def non_embedding(self) -> int:
        """All but the input table and an output projection of its own."""
        return self.total - self.embedding - self.output


@dataclass(frozen=True)
class FlopCount:
    """Forward plus backward, per token of a row of ``seq_len``."""

    matmul: float
    """6 per parameter that takes part in a product, the output projection included."""
    attention_causal: float
    """Scores and weighted values over the keys a causal token can see, (seq_len + 1) / 2 on average; document boundaries are not deducted."""
    attention_full: float
    """The same over all seq_len keys: the convention of PaLM and of most published MFU figures."""

    @property
    def causal(self) -> float:
        """What a step really needs; the figure behind ``perf/mfu``."""
        return self.matmul + self.attention_causal

    @property
    def full(self) -> float:
        """As published figures count."""
        return self.matmul + self.attention_full


@dataclass(frozen=True)
class CustomCount:
    """What parts built by the user add; the torch side measures it on the built model (``surefoot.model.parts.custom_count``)."""

    params: int
    flops_per_token: float
    """Forward plus backward, at the seq_len it was asked for."""


def num_params(cfg: ModelConfig, custom: CustomCount | None = None) -> ParamCount:
    """Parameters of the model ``cfg`` describes.

    Raises CountError for a model with Custom parts unless their count is passed.
    """
    _require_custom(cfg, custom)
    per_layer = _attention_params(cfg) + _feed_forward_params(cfg) + 2 * _norm_params(cfg)
    embedding = cfg.vocab_size * cfg.d_model
    output = 0 if cfg.tie_embeddings else embedding
    total = embedding + output + cfg.num_layers * per_layer + _norm_params(cfg) + (custom.params if custom else 0)
    return ParamCount(total=total, embedding=embedding, output=output)


def flops(cfg: ModelConfig, seq_len: int, custom: CustomCount | None = None) -> FlopCount:
    """Operations per token, forward plus backward; see the conventions above. Custom parts count as they say, under ``matmul``."""
    _require_custom(cfg, custom)
    matmul_params = cfg.vocab_size * cfg.d_model + cfg.num_layers * (
        _projection_params(cfg) + _feed_forward_params(cfg)
    )
    width = cfg.attention.num_heads * cfg.attention.d_head if isinstance(cfg.attention, GroupedQueryAttention) else 0
    return FlopCount(
        matmul=6.0 * matmul_params + (custom.flops_per_token if custom else 0.0),
        attention_causal=6.0 * cfg.num_layers * width * (seq_len + 1),
        attention_full=12.0 * cfg.num_layers * width * seq_len,
    )


def flops_per_token(cfg: ModelConfig, seq_len: int, custom: CustomCount | None = None) -> float:
    """Forward plus backward operations of one token of a row of ``seq_len``, causal half of attention counted."""
    return flops(cfg, seq_len, custom).causal


def activation_bytes(cfg: ModelConfig, rows: int, seq_len: int, element_bytes: int) -> int:
    """Estimate of what one forward of ``rows`` x ``seq_len`` tokens keeps for its backward, and of its largest chunk of logits, in bytes.

    As the CPU keeps it: the inputs of every product and gate, two fp32 copies for a norm, the weights of the eager attention (which keeps
    the keys a block of queries can see), the gradients of the loss. Built-in parts only: a Custom part counts as nothing.
    """
    tokens, wide = rows * seq_len, max(4, element_bytes)
    per_token = 2 * cfg.d_model * (2 * wide + element_bytes)
    if isinstance(cfg.attention, GroupedQueryAttention):
        part = cfg.attention
        queries_keys = part.d_head * (part.num_heads + part.num_kv_heads)
        visible = (seq_len + min(seq_len, max(64, seq_len // 8))) / 2
        per_token += 2 * queries_keys * element_bytes + round(part.num_heads * visible) * element_bytes
        per_token += 2 * queries_keys * wide if part.qk_norm else 0
    if isinstance(cfg.feed_forward, SwiGLU):
        per_token += 4 * cfg.feed_forward.d_ff * element_bytes
    layers = cfg.num_layers * tokens * per_token
    norm = tokens * cfg.d_model * 2 * wide
    loss = tokens * cfg.d_model * element_bytes + cfg.vocab_size * cfg.d_model * wide
    return layers + norm + loss + min(tokens, cfg.loss.chunk_tokens) * cfg.vocab_size * element_bytes


def state_bytes(cfg: ModelConfig, custom: CustomCount | None = None, *, element_bytes: int = 4) -> int:
    """Weights, gradients and the two moments of AdamW, in bytes: four numbers per parameter."""
    return 4 * element_bytes * num_params(cfg, custom).total


def _require_custom(cfg: ModelConfig, custom: CustomCount | None) -> None:
    for name in ("attention", "feed_forward", "norm"):
        part = getattr(cfg, name)
        if isinstance(part, Custom) and custom is None:
            raise CountError(
                f"model.{name} is built by {part.build!r}, whose size the config does not tell; "
                "build the model (meta device is enough) and pass surefoot.model.parts.custom_count(model, seq_len)"
            )


def _projection_params(cfg: ModelConfig) -> int:
    part = cfg.attention
    if not isinstance(part, GroupedQueryAttention):
        return 0
    return 2 * cfg.d_model * part.d_head * (part.num_heads + part.num_kv_heads)


def _attention_params(cfg: ModelConfig) -> int:
    qk_norms = (
        2 * cfg.attention.d_head if isinstance(cfg.attention, GroupedQueryAttention) and cfg.attention.qk_norm else 0
    )
    return _projection_params(cfg) + qk_norms


def _feed_forward_params(cfg: ModelConfig) -> int:
    return 3 * cfg.d_model * cfg.feed_forward.d_ff if isinstance(cfg.feed_forward, SwiGLU) else 0


def _norm_params(cfg: ModelConfig) -> int:
    return cfg.d_model if isinstance(cfg.norm, RMSNorm) else 0


@dataclass(frozen=True, kw_only=True)
class RankTokens:
    """What one rank computes of one micro-batch, and how."""

    rows: int
    seq_len: int
    """Of a whole row."""
    cp: int = 1
    tp: int = 1
    element_bytes: int
    """Of the compute dtype."""
    kernel: str = "eager"
    """``eager``, ``fused`` (sdpa, flex) or ``ring``."""
    recompute: str = "none"
    fused_norms: bool = False
    """One kernel that keeps its input and a number a token, as on a GPU; else what torch's CPU norm keeps."""
    document_mask: bool = False

    @property
    def positions(self) -> int:
        """Tokens that attention and feed-forward see here."""
        return self.rows * self.seq_len // self.cp

    @property
    def pieces(self) -> int:
        """Tokens of the residual stream here (sequence parallel)."""
        return self.positions // self.tp

    @property
    def wide(self) -> int:
        """Bytes of what stays in fp32 at least."""
        return max(4, self.element_bytes)


def block_bytes(cfg: ModelConfig, at: RankTokens) -> int:
    """What one block keeps from its forward to its backward, by the accounting of arXiv:2205.05198 section 4 for our own parts.

    Of each token: two norms (input and normalised input in fp32, and one number; a fused one keeps its input as it is), the input of the
    projections and of gate and up (gathered over tp), queries, keys, values, attention's own, the input of its output product, and four
    times d_ff. ``full`` keeps the block's input, ``selective`` also the results of its products with weights, and of fused attention with
    them. Built-in parts only.
    """
    part, element = cfg.attention, at.element_bytes
    heads, kv_heads, width = (part.num_heads, part.num_kv_heads, part.d_head) if _built_in(cfg) else (0, 0, 0)  # type: ignore[union-attr]
    queries, keys = heads * width // at.tp, kv_heads * width // at.tp
    d_ff = cfg.feed_forward.d_ff // at.tp if isinstance(cfg.feed_forward, SwiGLU) else 0
    stream = at.pieces * cfg.d_model * element
    if at.recompute == "full":
        return stream
    statistic = heads // at.tp * at.wide if at.kernel in ("fused", "ring") else 0
    if at.recompute == "selective":
        attended = queries * element + statistic if at.kernel in ("fused", "ring") else 0
        products = queries + 2 * keys + 2 * d_ff + 2 * cfg.d_model
        return stream + at.positions * (products * element + attended)
    norms = 2 * _norm_bytes(cfg, at) if isinstance(cfg.norm, RMSNorm) else 0
    kept = queries + 2 * keys + queries + 4 * d_ff + 2 * cfg.d_model
    per_position = kept * element + statistic
    if at.kernel == "eager":
        per_position += heads // at.tp * element * seen_keys(at.seq_len) // at.seq_len
    if _built_in(cfg) and part.qk_norm:  # type: ignore[union-attr]
        each = width * element if at.fused_norms else 2 * width * at.wide
        per_position += (heads + kv_heads) // at.tp * (each + at.wide)
    return norms + at.positions * per_position


def ends_bytes(cfg: ModelConfig, at: RankTokens, *, embeds: bool = True, predicts: bool = True) -> int:
    """What is kept of a micro-batch outside the blocks: angles, tokens, the eager kernel's mask where it is used again, the last norm, and the gradients of the loss, which are there as
    soon as the loss is (of the output projection in fp32)."""
    total = 0
    if _built_in(cfg):
        total += at.positions * cfg.attention.d_head * at.wide  # type: ignore[union-attr]
        if at.kernel == "eager" and at.recompute != "none":
            total += (at.rows if at.document_mask else 1) * at.seq_len**2 * at.element_bytes
    if embeds:
        total += at.positions * 8
    if predicts:
        last = _norm_bytes(cfg, at) if isinstance(cfg.norm, RMSNorm) else 0
        losses = at.positions * (2 * at.wide + 8)
        of_output = cfg.vocab_size // at.tp * cfg.d_model * at.wide
        total += last + losses + at.positions * cfg.d_model * at.element_bytes + of_output
    return total


def logits_bytes(cfg: ModelConfig, at: RankTokens) -> int:
    """The chunk of logits that exists while the loss is computed; over tp and on a GPU a copy in fp32 beside narrow ones."""
    width = at.element_bytes + (at.wide if at.element_bytes < 4 and (at.tp > 1 or at.fused_norms) else 0)
    return min(at.positions, cfg.loss.chunk_tokens) * (cfg.vocab_size // at.tp) * width


def seen_keys(seq_len: int) -> int:
    """Keys that all queries of a row meet in the eager kernel, which takes queries in at most 8 blocks of at least 64."""
    step = max(64, -(-seq_len // 8))
    return sum((min(start + step, seq_len) - start) * min(start + step, seq_len) for start in range(0, seq_len, step))


def _norm_bytes(cfg: ModelConfig, at: RankTokens) -> int:
    each = cfg.d_model * at.element_bytes if at.fused_norms else 2 * cfg.d_model * at.wide
    return at.pieces * (each + at.wide)


def _built_in(cfg: ModelConfig) -> bool:
    return isinstance(cfg.attention, GroupedQueryAttention)
