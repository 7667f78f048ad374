"""What a parametrization multiplies by leaves with the weights: the same logits in a process that has never imported Surefoot."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.config.model import (
    CompleteP,
    GroupedQueryAttention,
    InitConfig,
    ModelConfig,
    MuP,
    RMSNorm,
    Standard,
    SwiGLU,
)
from surefoot.interop.huggingface import folded, to_config, to_state
from surefoot.model.parametrization import initialise
from surefoot.model.role_scaling import multipliers
from surefoot.model.transformer import Transformer
from tolerances import HUGGING_FACE

PARAMETRIZATIONS = {
    "standard": Standard(),
    "mup": MuP(base_d_model=16, base_d_head=5),
    "completep": CompleteP(base_d_model=24, base_num_layers=3, base_d_head=20, alpha=0.7),
}
READER = """
import sys, json, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
assert not any(name.split(".")[0] == "surefoot" for name in sys.modules)
for folder in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kept = torch.load(folder / "kept.pt", weights_only=True)
    with torch.no_grad():
        logits = model(input_ids=kept["tokens"], use_cache=False).logits
    far = float((logits - kept["logits"]).norm() / kept["logits"].norm())
    assert not any(name.split(".")[0] == "surefoot" for name in sys.modules)
    print(json.dumps({"name": folder.name, "far": far, "kind": type(model).__name__, "tied": model.config.tie_word_embeddings}))
"""


def model_config(kind: str, *, qk_norm: bool, tied: bool, layers: int = 4) -> ModelConfig:
    """Weights large enough that attention is far from uniform."""
    return ModelConfig(
        vocab_size=97,
        d_model=48,
        num_layers=layers,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=20, qk_norm=qk_norm),
        feed_forward=SwiGLU(d_ff=80),
        norm=RMSNorm(eps=1e-6),
        tie_embeddings=tied,
        init=InitConfig(std=0.2),
        parametrization=PARAMETRIZATIONS[kind],
    )


def drawn(cfg: ModelConfig) -> Transformer:
    model = Transformer(cfg, torch.float32)
    initialise(model, cfg, seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.linspace(-0.4, 0.4, len(parameter))
    return model


def logits(model: Transformer) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 97, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(tokens, torch.arange(60).expand(2, 60), None)
    assert isinstance(found, Tensor)
    return tokens, found


def test_an_exported_model_gives_the_same_logits_in_a_process_that_never_imported_surefoot(tmp_path: Path) -> None:
    folders = []
    for kind in PARAMETRIZATIONS:
        for qk_norm, tied in ((False, True), (True, True), (True, False), (False, False)):
            cfg = model_config(kind, qk_norm=qk_norm, tied=tied)
            if kind == "completep":
                cfg = dataclasses.replace(cfg, embedding_multiplier=3.0)
            model = drawn(cfg)
            folder = tmp_path / f"{kind}-{'qk' if qk_norm else 'plain'}-{'tied' if tied else 'untied'}"
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(to_config(cfg, max_positions=64)))
            save_file(
                {name: w.contiguous().clone() for name, w in to_state(model.state_dict(), cfg).items()},
                folder / "model.safetensors",
                metadata={"format": "pt"},
            )
            tokens, expected = logits(model)
            torch.save({"tokens": tokens, "logits": expected}, folder / "kept.pt")
            folders.append(folder)
    command = [sys.executable, "-c", READER, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(found) == len(folders)
    assert {name: row["far"] for name, row in found.items() if not row["far"] <= HUGGING_FACE} == {}
    assert {name for name, row in found.items() if row["tied"]} == {"standard-plain-tied", "standard-qk-tied"}
    assert all(
        row["kind"] == ("Qwen3ForCausalLM" if "-qk-" in name else "LlamaForCausalLM") for name, row in found.items()
    )


@pytest.mark.parametrize("qk_norm", [False, True])
def test_folding_by_powers_of_two_changes_no_bit_of_the_logits(qk_norm: bool) -> None:
    parametrization = CompleteP(base_d_model=12, base_num_layers=2, base_d_head=5)
    cfg = dataclasses.replace(model_config("mup", qk_norm=qk_norm, tied=True), parametrization=parametrization)
    scales = multipliers(cfg)
    assert (scales.logits, scales.residual, scales.attention) == (0.25, 0.5, 0.5)
    model = drawn(cfg)
    plain_cfg, weights = folded(model.state_dict(), cfg)
    assert not plain_cfg.tie_embeddings
    plain = Transformer(plain_cfg, torch.float32)
    plain.load_state_dict(weights)
    assert multipliers(plain_cfg) == multipliers(model_config("standard", qk_norm=qk_norm, tied=False))
    assert torch.equal(logits(plain)[1], logits(model)[1])


def test_a_tied_model_whose_two_multipliers_agree_stays_tied_and_one_without_multipliers_is_left_alone() -> None:
    cfg = model_config("standard", qk_norm=False, tied=True)
    both = dataclasses.replace(cfg, embedding_multiplier=4.0, logit_multiplier=4.0)
    model = drawn(both)
    plain_cfg, weights = folded(model.state_dict(), both)
    assert plain_cfg == cfg
    assert "head.weight" not in weights
    assert torch.equal(weights["embedding.weight"], 4 * model.state_dict()["embedding.weight"])
    state = drawn(cfg).state_dict()
    same_cfg, same = folded(state, cfg)
    assert same_cfg == cfg
    assert all(same[name] is tensor for name, tensor in state.items())
