"""What width and depth do to each role: init, rate, decay and epsilon, and the multipliers of the forward. One table, each row with its source. No torch."""

import math
from dataclasses import dataclass
from typing import Literal

from surefoot.config.model import CompleteP, ModelConfig, MuP, Standard

Role = Literal["embedding", "hidden", "output", "norm", "bias", "router", "expert", "latent"]
Family = Literal["adam", "muon"]
"""Updates whose elements have a size of their own (Adam, AdamW, StableAdamW, Lion), and those whose matrices have a norm of their own."""


@dataclass(frozen=True)
class Scaling:
    """Multipliers of one role at one width and depth."""

    init: float = 1.0
    """Of the standard deviation."""
    lr: float = 1.0
    decay: float = 1.0
    """Of the decay coupled to the rate; the decay of a step, lr x decay, is the same at all widths."""
    eps: float = 1.0
    """As gradients do, so that it stays as far below them."""


@dataclass(frozen=True)
class Row:
    """Exponents of the width ratio m_d = d_model / base_d_model, as published, and their source.

    Depth enters for parameters of residual branches under completep only, whatever their role: rate m_L^(alpha - 1), epsilon m_L^(-alpha).
    """

    init: float
    lr: float
    decay: float
    eps: float
    source: str


_TENSOR_PROGRAMS_V = "arXiv:2203.03466 table 8 (multiplier form)"
_COMPLETEP = "arXiv:2505.01618 table 1"
_SPECTRAL = "arXiv:2310.17813 condition 1: |dW|_2 ~ sqrt(out/in), where 0.2 sqrt(max(out, in)) (arXiv:2502.16982 eq. 4) grows as m_d^1/2"
_EXPERTS = "arXiv:2601.20205 table 1"
_HIDDEN_ADAM = Row(-0.5, -1.0, 1.0, -1.0, f"{_TENSOR_PROGRAMS_V}: matrix-like; decay and epsilon {_COMPLETEP}")
_HIDDEN_MUON = Row(-0.5, -0.5, 0.5, 0.0, f"init {_TENSOR_PROGRAMS_V}; rate {_SPECTRAL}")
_VECTOR = Row(0.0, 0.0, 0.0, -1.0, f"{_TENSOR_PROGRAMS_V}: vector-like; epsilon {_COMPLETEP}")
_INPUT = Row(0.0, 0.0, 0.0, -1.0, f"{_TENSOR_PROGRAMS_V}: input weights; epsilon {_COMPLETEP}")
_OUTPUT = Row(
    0.0, 0.0, 0.0, -1.0, f"{_TENSOR_PROGRAMS_V}: output weights, with 1/m_d on the logits; epsilon {_COMPLETEP}"
)
_ROUTER = Row(-0.5, -1.0, 1.0, -1.0, f"{_EXPERTS}: router init n^-gamma with gamma = 1/2, rate n^-1")

ROWS: dict[tuple[Family, Role], Row] = {
    ("adam", "embedding"): _INPUT,
    ("adam", "hidden"): _HIDDEN_ADAM,
    ("adam", "output"): _OUTPUT,
    ("adam", "norm"): _VECTOR,
    ("adam", "bias"): _VECTOR,
    ("adam", "router"): _ROUTER,
    ("adam", "expert"): Row(
        -0.5, -1.0, 1.0, -1.0, f"{_EXPERTS}: up and down n^-1/2, rate n^-1, at a fixed share of active experts"
    ),
    ("adam", "latent"): Row(
        -0.5,
        -1.0,
        1.0,
        -1.0,
        f"a matrix like another where its inner width grows with d_model: {_TENSOR_PROGRAMS_V}",
    ),
    ("muon", "hidden"): _HIDDEN_MUON,
    ("muon", "expert"): Row(-0.5, -0.5, 0.5, 0.0, f"init {_EXPERTS}; rate {_SPECTRAL}"),
    ("muon", "latent"): Row(-0.5, -0.5, 0.5, 0.0, f"init {_TENSOR_PROGRAMS_V}; rate {_SPECTRAL}"),
}
"""Under mup and completep. Roles that Muon does not move follow the rows of Adam."""


def in_branch(name: str) -> bool:
    """Whether the parameter of this name stands in a residual branch: all of a block does, the embedding, the last norm and the output do not."""
    return name.startswith("blocks.")


def scaling(role: Role, family: Family, cfg: ModelConfig, *, branch: bool) -> Scaling:
    """Multipliers of a role at the width and depth of ``cfg``, inside a residual ``branch`` or outside; all 1 under ``standard`` and at
    the base sizes.

    Rate and epsilon follow depth, decay does not (arXiv:2505.01618 table 1): at alpha = 1 what a step takes off a weight is the same at
    all sizes.
    """
    if isinstance(cfg.parametrization, Standard):
        return Scaling()
    width, depth, alpha = ratios(cfg)
    row = ROWS[family, role]
    deeper = depth if branch else 1.0
    return Scaling(
        init=width**row.init,
        lr=width**row.lr * deeper ** (alpha - 1.0),
        decay=width**row.decay,
        eps=width**row.eps * deeper**-alpha,
    )


@dataclass(frozen=True)
class Multipliers:
    """What the forward multiplies by."""

    embedding: float
    """The embedding as an input."""
    residual: float
    """What every branch adds to the residual stream."""
    logits: float
    attention: float
    """q k^T of a head of width H, in place of 1/sqrt(H): as a multiple of it."""


def multipliers(cfg: ModelConfig) -> Multipliers:
    """Multipliers of the forward (arXiv:2203.03466 table 8: 1/m_d on logits, definition 4.1: 1/d attention; arXiv:2505.01618 eq. 1: m_L^-alpha)."""
    width, depth, alpha = ratios(cfg)
    attention = 1.0
    if (
        isinstance(cfg.parametrization, MuP | CompleteP)
        and cfg.parametrization.base_d_head
        and cfg.attention.kind == "gqa"
    ):
        attention = math.sqrt(cfg.parametrization.base_d_head / cfg.attention.d_head)
    return Multipliers(
        embedding=cfg.embedding_multiplier,
        residual=depth**-alpha,
        logits=cfg.logit_multiplier / width,
        attention=attention,
    )


def ratios(cfg: ModelConfig) -> tuple[float, float, float]:
    """Width over base width, depth over base depth, and the exponent of depth; 1, 1 and 1 where they do not count."""
    match cfg.parametrization:
        case Standard():
            return 1.0, 1.0, 1.0
        case MuP(base_d_model=base):
            return cfg.d_model / base, 1.0, 1.0
        case CompleteP(base_d_model=base, base_num_layers=layers, alpha=alpha):
            return cfg.d_model / base, cfg.num_layers / layers, alpha


def init_depth(cfg: ModelConfig) -> int:
    """Number of layers that scales the init of what writes to the residual stream: under completep the multiplier does it beyond the base."""
    return cfg.parametrization.base_num_layers if isinstance(cfg.parametrization, CompleteP) else cfg.num_layers
