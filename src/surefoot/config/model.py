"""What the network is made of. A variant is a union member, told apart by ``kind``."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Custom:
    """A part of your own: ``build`` names a function ``module:function`` that returns an nn.Module with ``roles()`` and ``flops_per_token()``."""

    kind: Literal["custom"] = "custom"
    build: str
    """Import path of the builder, ``package.module:function``."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the builder; TOML values only."""


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Causal attention whose query heads share key and value heads (arXiv:2305.13245); ``num_kv_heads = num_heads`` is plain multi-head."""

    kind: Literal["gqa"] = "gqa"
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides ``num_heads``."""
    d_head: int
    """Width of one head; even, for RoPE."""
    qk_norm: bool = False
    """RMS-normalise each query and key head before RoPE (arXiv:2302.05442; as in Qwen 3)."""
    rope_theta: float = 10000.0
    """Base of the rotary angles (arXiv:2104.09864 eq. 15)."""


@dataclass(frozen=True, kw_only=True)
class SwiGLU:
    """Gated feed-forward, down(silu(gate x) * up x) (arXiv:2002.05202 eq. 6)."""

    kind: Literal["swiglu"] = "swiglu"
    d_ff: int
    """Width of the gate and of the up projection."""


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """Root-mean-square norm with a learned gain, in fp32 (arXiv:1910.07467 eq. 4)."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = 1e-5
    """Added to the mean square."""


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """How parameters start. Each full tensor is drawn from (seed, name), so that no layout changes it."""

    std: float = 0.02
    """Standard deviation of embeddings and hidden matrices."""
    truncate: float = 3.0
    """Draws beyond this many standard deviations are redrawn (OLMo 2); 0 is an untruncated normal."""
    depth_scaled: bool = True
    """Divide the std of matrices that write to the residual stream by sqrt(2 num_layers) (GPT-2)."""


@dataclass(frozen=True, kw_only=True)
class Standard:
    """One rate and one init for all widths and depths."""

    kind: Literal["standard"] = "standard"


@dataclass(frozen=True, kw_only=True)
class MuP:
    """Maximal update parametrization (arXiv:2203.03466 table 8, in the form of multipliers): rates tuned at the base width hold at all.

    At the base width it is the standard parametrization.
    """

    kind: Literal["mup"] = "mup"
    base_d_model: int = 256
    """Width at which hyper-parameters were tuned; all widths of the model grow with ``d_model``."""
    base_d_head: int = 0
    """Head width there, where heads grow too: logits are then scaled by sqrt(base_d_head) / d_head; 0: heads keep their width."""


@dataclass(frozen=True, kw_only=True)
class CompleteP:
    """muP, and residual branches scaled by (base_num_layers / num_layers)^alpha (arXiv:2505.01618 table 1): holds over depth too."""

    kind: Literal["completep"] = "completep"
    base_d_model: int = 256
    """Width at which hyper-parameters were tuned."""
    base_d_head: int = 0
    """Head width there, as for mup; 0: heads keep their width."""
    base_num_layers: int = 4
    """Depth at which hyper-parameters were tuned."""
    alpha: float = 1.0
    """Exponent of the residual scale; the published one is 1, and 0.5 is depth-muP."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Next-token cross-entropy in nats, computed over chunks of tokens so that all logits never exist at once."""

    z_loss: float = 0.0
    """Weight of mean(logsumexp^2), which holds the logits' normaliser near 0 (PaLM, arXiv:2204.02311 section 5); 0 is off."""
    chunk_tokens: int = 2048
    """Tokens whose logits are held at once."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder of ``num_layers`` blocks, each an attention and a feed-forward part on the residual stream."""

    vocab_size: int
    """Rows of the embedding; at least the tokenizer's size."""
    d_model: int
    """Width of the residual stream."""
    num_layers: int
    """Blocks."""
    attention: GroupedQueryAttention | Custom
    """How tokens of a document look at each other."""
    feed_forward: SwiGLU | Custom
    """What each token does by itself."""
    norm: RMSNorm | Custom = RMSNorm()
    """Before each part, and before the output projection."""
    tie_embeddings: bool = True
    """The output projection is the embedding matrix itself."""
    embedding_gradient: float = 1.0
    """Share of its gradient that the embedding gets as an input (GLM-130B, arXiv:2210.02414 section 3.1, takes 0.1); values are
    untouched, and so is the gradient of a tied output. 1 is off."""
    embedding_multiplier: float = 1.0
    """Of the embedding as an input."""
    logit_multiplier: float = 1.0
    """Of the logits, besides what the parametrization asks for."""
    parametrization: Standard | MuP | CompleteP = Standard()
    """How init, multipliers, rates, decay and epsilon follow width and depth."""
    init: InitConfig = InitConfig()
    loss: LossConfig = LossConfig()
    attention_backend: Literal["auto", "eager", "sdpa", "flex"] = "auto"
    """Kernel of the built-in attention: eager is batched products and a softmax (fastest in bf16 on CPU), flex needs a GPU."""
