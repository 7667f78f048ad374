"""Llama and Qwen 3 of transformers: names, configs, and the same numbers from the same weights."""

import itertools
import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from surefoot.config.model import Custom, GroupedQueryAttention, InitConfig, LossConfig, ModelConfig, RMSNorm, SwiGLU
from surefoot.interop.huggingface import (
    HuggingFaceError,
    from_config,
    from_state,
    load_folder,
    to_config,
    to_name,
    to_state,
)
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from tolerances import HUGGING_FACE

CASES = {
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_embeddings": True, "qk_norm": False}),
    "llama-untied": (LlamaForCausalLM, LlamaConfig, {"tie_embeddings": False, "qk_norm": False}),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config, {"tie_embeddings": True, "qk_norm": True}),
    "qwen3-untied": (Qwen3ForCausalLM, Qwen3Config, {"tie_embeddings": False, "qk_norm": True}),
}


def config(tie_embeddings: bool, qk_norm: bool) -> ModelConfig:
    """Head width not d_model / num_heads, four query heads to two key heads, weights large enough that attention is far from uniform."""
    return ModelConfig(
        vocab_size=97,
        d_model=48,
        num_layers=3,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=20, qk_norm=qk_norm, rope_theta=5000.0),
        feed_forward=SwiGLU(d_ff=80),
        norm=RMSNorm(eps=1e-6),
        tie_embeddings=tie_embeddings,
        init=InitConfig(std=0.2),
        loss=LossConfig(chunk_tokens=50),
    )


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float((a - b).norm() / b.norm())


def pair(case: str, implementation: str) -> tuple[Transformer, Any]:
    """Our model and theirs with the same weights; norm gains are moved off 1 so that they matter."""
    cls, config_cls, kinds = CASES[case]
    cfg = config(**kinds)
    ours = Transformer(cfg, torch.float32)
    initialise(ours, cfg, seed=5)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" in name:
                parameter += torch.linspace(-0.4, 0.4, len(parameter))
    hf_config = config_cls(**to_config(cfg, max_positions=512), attn_implementation=implementation)
    theirs = cls(hf_config).eval()
    missing, unexpected = theirs.load_state_dict(to_state(ours.state_dict(), ours.cfg), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return ours, theirs


def tokens(rows: int = 3, length: int = 150) -> Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_those_of_transformers(case: str, implementation: str) -> None:
    ours, theirs = pair(case, implementation)
    ids = tokens()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]

    logits = ours(ids, positions, None)
    sums = ours(ids, positions, None, targets)
    loss = sums.objective / (targets != -100).sum()
    loss.backward()
    reference = theirs(input_ids=ids, labels=ids, use_cache=False)
    reference.loss.backward()

    assert relative(logits, reference.logits) <= HUGGING_FACE
    assert relative(loss, reference.loss) <= HUGGING_FACE
    their_grads = {name: p.grad for name, p in theirs.named_parameters()}
    grads = {to_name(name): p.grad for name, p in ours.named_parameters()}
    assert grads.keys() == their_grads.keys()
    far = {name: error for name in grads if (error := relative(grads[name], their_grads[name])) > HUGGING_FACE}
    assert not far


def test_documents_in_a_row_are_each_the_document_alone_in_transformers() -> None:
    ours, theirs = pair("qwen3-untied", "sdpa")
    ids = tokens(rows=1)
    cuts = [0, 41, 42, 107, 150]
    documents = torch.empty_like(ids)
    positions = torch.empty_like(ids)
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        documents[:, start:stop] = number
        positions[:, start:stop] = torch.arange(stop - start)
    logits = ours(ids, positions, documents)
    for start, stop in itertools.pairwise(cuts):
        alone = theirs(input_ids=ids[:, start:stop], use_cache=False).logits
        assert relative(logits[:, start:stop], alone) <= HUGGING_FACE


@pytest.mark.parametrize("case", CASES)
def test_names_and_config_go_to_transformers_and_back(case: str) -> None:
    ours, theirs = pair(case, "eager")
    state = ours.state_dict()
    back = from_state(theirs.state_dict(), tied=ours.cfg.tie_embeddings)
    assert back.keys() == state.keys()
    assert all(back[name].equal(state[name]) for name in state)
    written = from_config(json.loads(json.dumps(theirs.config.to_dict())))
    assert (written.attention, written.feed_forward, written.norm) == (
        ours.cfg.attention,
        ours.cfg.feed_forward,
        ours.cfg.norm,
    )
    assert (written.vocab_size, written.d_model, written.num_layers, written.tie_embeddings) == (
        97,
        48,
        3,
        ours.cfg.tie_embeddings,
    )


def test_a_folder_of_several_weight_files_loads(tmp_path: Any) -> None:
    ours, _ = pair("llama-untied", "eager")
    state = to_state(ours.state_dict(), ours.cfg)
    names = sorted(state)
    save_file({name: state[name] for name in names[:9]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: state[name] for name in names[9:]}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(to_config(ours.cfg, max_positions=64)))
    cfg, loaded = load_folder(tmp_path)
    assert cfg.attention == ours.cfg.attention
    model = Transformer(cfg, torch.float32)
    model.load_state_dict(loaded)
    ids = tokens(1, 9)
    positions = torch.arange(9)[None]
    assert model(ids, positions, None).equal(ours(ids, positions, None))


def test_what_our_parts_do_not_have_is_refused_by_name(tmp_path: Any) -> None:
    good = to_config(config(tie_embeddings=True, qk_norm=False), max_positions=64)
    for change, message in (
        ({"model_type": "gemma2"}, "model_type='gemma2' is not supported; supported are llama and qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported; it must be False"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_type='yarn' is not supported; it must be 'default'",
        ),
    ):
        with pytest.raises(HuggingFaceError) as error:
            from_config(good | change)
        assert str(error.value) == message
    with pytest.raises(HuggingFaceError, match=r"'blocks\.0\.attention\.gate' has no name in transformers"):
        to_name("blocks.0.attention.gate")
    with pytest.raises(HuggingFaceError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias' is not one of"):
        from_state({"model.layers.0.self_attn.q_proj.bias": torch.zeros(1)}, tied=False)
    with pytest.raises(HuggingFaceError, match="only built-in parts can be exported"):
        to_config(
            ModelConfig(
                vocab_size=9, d_model=8, num_layers=1, attention=Custom(build="a:b"), feed_forward=SwiGLU(d_ff=8)
            ),
            max_positions=8,
        )
    with pytest.raises(HuggingFaceError, match=r"config\.json is missing"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(good))
    with pytest.raises(HuggingFaceError, match=r"holds no \*\.safetensors"):
        load_folder(tmp_path)


def test_a_tied_checkpoint_with_another_output_projection_is_refused() -> None:
    embedding = torch.ones(4, 2)
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    assert from_state(state, tied=True).keys() == {"embedding.weight"}
    state["lm_head.weight"][1, 1] = 2
    with pytest.raises(HuggingFaceError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        from_state(state, tied=True)
