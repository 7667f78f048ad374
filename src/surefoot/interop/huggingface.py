"""Weights and configs of Hugging Face transformers, for the families Llama and Qwen 3, by name in both directions."""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from surefoot.config.model import GroupedQueryAttention, ModelConfig, RMSNorm, Standard, SwiGLU
from surefoot.model.role_scaling import multipliers

Family = Literal["llama", "qwen3"]

_MODEL_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_FROM_MODEL = {theirs: ours for ours, theirs in _MODEL_NAMES.items()}
_FROM_LAYER = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}


class HuggingFaceError(Exception):
    """A folder, config or state dict of transformers that does not describe one of our models."""


def to_name(ours: str) -> str:
    """Name of one of our parameters in transformers. Raises HuggingFaceError."""
    layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", ours)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}"
    if ours in _MODEL_NAMES:
        return _MODEL_NAMES[ours]
    raise HuggingFaceError(
        f"parameter {ours!r} has no name in transformers' Llama or Qwen 3; only built-in parts can be exported"
    )


def from_name(theirs: str) -> str:
    """Name of one of their parameters in our model. Raises HuggingFaceError."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", theirs)
    if layer and layer[2] in _FROM_LAYER:
        return f"blocks.{layer[1]}.{_FROM_LAYER[layer[2]]}"
    if theirs in _FROM_MODEL:
        return _FROM_MODEL[theirs]
    raise HuggingFaceError(
        f"parameter {theirs!r} is not one of transformers' Llama or Qwen 3 without biases; this model is not supported"
    )


def to_state(state: Mapping[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Our state dict under their names, with everything that our forward multiplies by folded into the weights (``folded``).

    A tied output projection is not written, as transformers ties it again.
    """
    return {to_name(name): tensor for name, tensor in folded(state, cfg)[1].items()}


def folded(state: Mapping[str, Tensor], cfg: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The same function without multipliers, as other programs know it: a standard config and its weights, as ``folding`` says. Exact to the
    bit where a multiplier is a power of two. Raises HuggingFaceError."""
    plain, origins = folding(tuple(state), cfg)
    return plain, {name: _times(state[origin], scale) for name, (origin, scale) in origins.items()}


def folding(names: Collection[str], cfg: ModelConfig) -> tuple[ModelConfig, dict[str, tuple[str, float]]]:
    """A standard config of the same function, and of each of its weights which of ours it is, times what. Raises HuggingFaceError.

    The embedding takes its own multiplier, the output projection that of the logits, what writes to the residual stream that of residual
    branches, the query that of attention logits (under QK-norm its gain). A tied model whose two uses of the embedding differ comes out
    untied.
    """
    scales = multipliers(cfg)
    tied = cfg.tie_embeddings and scales.embedding == scales.logits
    plain = dataclasses.replace(
        cfg, tie_embeddings=tied, embedding_multiplier=1.0, logit_multiplier=1.0, parametrization=Standard()
    )
    origins = {name: name for name in names}
    if multipliers(cfg) == multipliers(plain):
        return plain, {name: (name, 1.0) for name in origins}
    _require_built_in(cfg)
    query = "query_norm" if isinstance(cfg.attention, GroupedQueryAttention) and cfg.attention.qk_norm else "query"
    by_part = {
        f"attention.{query}.weight": scales.attention,
        "attention.output.weight": scales.residual,
        "feed_forward.down.weight": scales.residual,
    }
    whole = {"embedding.weight": scales.embedding, "head.weight": scales.logits}
    if cfg.tie_embeddings and not tied:
        origins["head.weight"] = "embedding.weight"
    return plain, {
        name: (origin, whole.get(name, by_part.get(name.partition(".")[2].partition(".")[2], 1.0)))
        for name, origin in origins.items()
    }


def _times(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else tensor * scale


def from_state(state: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """Their state dict under our names.

    Old checkpoints hold rotary frequencies, which are computed here, and a tied model may hold its output projection again: both are left
    out, the second only if it equals the embedding (else HuggingFaceError).
    """
    kept = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
    if tied and "lm_head.weight" in kept:
        again = kept.pop("lm_head.weight")
        if not again.equal(kept["model.embed_tokens.weight"]):
            raise HuggingFaceError(
                "lm_head.weight differs from model.embed_tokens.weight though tie_word_embeddings is set; unset it"
            )
    return {from_name(name): tensor for name, tensor in kept.items()}


def from_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Our config of a ``config.json``. Raises HuggingFaceError for what our parts do not have, by name."""
    family = hf.get("model_type")
    if family not in ("llama", "qwen3"):
        raise HuggingFaceError(f"model_type={family!r} is not supported; supported are llama and qwen3")
    _refuse_unsupported(hf)
    heads = hf["num_attention_heads"]
    # Qwen 3 has a head width of 128 where the file is silent, Llama the width shared out among the heads
    d_head = hf.get("head_dim") or (128 if family == "qwen3" else hf["hidden_size"] // heads)
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        d_model=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        attention=GroupedQueryAttention(
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            d_head=d_head,
            qk_norm=family == "qwen3",
            rope_theta=float(_rope(hf).get("rope_theta", hf.get("rope_theta", 10000.0))),
        ),
        feed_forward=SwiGLU(d_ff=hf["intermediate_size"]),
        norm=RMSNorm(eps=hf.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def to_config(cfg: ModelConfig, *, max_positions: int) -> dict[str, Any]:
    """The ``config.json`` of our model with its multipliers folded: Qwen 3 with QK-norm, Llama without. Raises HuggingFaceError for Custom
    parts."""
    attention, feed_forward, norm = _require_built_in(cfg)
    scales = multipliers(cfg)
    family: Family = "qwen3" if attention.qk_norm else "llama"
    return {
        "model_type": family,
        "architectures": ["Qwen3ForCausalLM" if attention.qk_norm else "LlamaForCausalLM"],
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": feed_forward.d_ff,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.d_head,
        "hidden_act": "silu",
        "rms_norm_eps": norm.eps,
        "tie_word_embeddings": cfg.tie_embeddings and scales.embedding == scales.logits,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": max_positions,
        # transformers 4 reads the first, 5 the second
        "rope_theta": attention.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope_theta},
    }


def _require_built_in(cfg: ModelConfig) -> tuple[GroupedQueryAttention, SwiGLU, RMSNorm]:
    attention, feed_forward, norm = cfg.attention, cfg.feed_forward, cfg.norm
    if not (
        isinstance(attention, GroupedQueryAttention) and isinstance(feed_forward, SwiGLU) and isinstance(norm, RMSNorm)
    ):
        raise HuggingFaceError(
            "a model with Custom parts has no family in transformers; only built-in parts can be exported"
        )
    return attention, feed_forward, norm


def load_folder(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and weights, under our names, of a model folder with safetensors (one file or shards). Raises HuggingFaceError."""
    config_path = path / "config.json"
    if not config_path.is_file():
        raise HuggingFaceError(
            f"{config_path} is missing; a Hugging Face model folder holds config.json and *.safetensors"
        )
    cfg = from_config(json.loads(config_path.read_text(encoding="utf-8")))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise HuggingFaceError(
            f"{path} holds no *.safetensors; save the model with save_pretrained(safe_serialization=True)"
        )
    state: dict[str, Tensor] = {}
    for file in files:
        state |= load_file(file)
    return cfg, from_state(state, tied=cfg.tie_embeddings)


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of the rotary positions, wherever this version of transformers keeps them."""
    return hf.get("rope_parameters") or hf.get("rope_scaling") or {}


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    rope_type = _rope(hf).get("rope_type", _rope(hf).get("type", "default"))
    allowed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "hidden_act": (hf.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (hf.get("attention_bias", False), (False, None)),
        "mlp_bias": (hf.get("mlp_bias", False), (False, None)),
        "rope_type": (rope_type, ("default",)),
        "use_sliding_window": (hf.get("use_sliding_window", False), (False, None)),
    }
    for key, (value, good) in allowed.items():
        if value not in good:
            raise HuggingFaceError(f"{key}={value!r} is not supported; it must be {good[0]!r}")
