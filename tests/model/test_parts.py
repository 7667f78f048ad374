"""A part of one's own, without a fork: built, trained, counted, and refused with a remedy."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from surefoot.config.model import Custom, GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.model.count import flops, num_params
from surefoot.model.parametrization import RoleError, initialise, residual_writers, roles
from surefoot.model.parts import PartError, build_custom, custom_count
from surefoot.model.transformer import Transformer

MODULE = "surefoot_tests_out_of_tree"


@pytest.fixture(autouse=True)
def _importable() -> object:
    """The user's file becomes importable, as with PYTHONPATH."""
    spec = importlib.util.spec_from_file_location(MODULE, Path(__file__).with_name("out_of_tree.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[MODULE])
    yield
    del sys.modules[MODULE]


def config(build: str = "build", **kwargs: object) -> ModelConfig:
    return ModelConfig(
        vocab_size=40,
        d_model=16,
        num_layers=2,
        attention=Custom(build=f"{MODULE}:{build}", kwargs=kwargs),
        feed_forward=SwiGLU(d_ff=24),
    )


def test_an_attention_of_ones_own_trains() -> None:
    cfg = config(width=12)
    model = Transformer(cfg, torch.float64)
    initialise(model, cfg, 0)
    assert model.blocks[0].attention.value.out_features == 12
    assert model.blocks[1].attention.value.out_features == 13, "the builder is told its layer"
    tokens = torch.randint(0, 40, (3, 20), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(20) // 8).int().expand(3, 20)
    positions = (torch.arange(20) % 8).expand(3, 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        sums = model(tokens, positions, documents, tokens.roll(-1, 1))
        (sums.objective / tokens.numel()).backward()
        assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
        optimizer.step()
        losses.append(float(sums.ce_sum.detach()) / tokens.numel())
    assert losses[-1] < 0.75 * losses[0]


def test_its_parameters_have_the_roles_it_says_and_start_by_them() -> None:
    cfg = config(width=12)
    model = Transformer(cfg, torch.float32)
    initialise(model, cfg, 0)
    table = roles(model)
    assert table["blocks.1.attention.gate.bias"] == "bias"
    assert table["blocks.1.attention.value.weight"] == "hidden"
    assert "blocks.1.attention.out.weight" in residual_writers(model)
    assert model.blocks[1].attention.gate.bias.eq(0).all()
    assert 0 < model.blocks[1].attention.value.weight.detach().abs().max() <= 3 * cfg.init.std * (1 + 1e-6)


def test_it_is_counted_on_the_built_model() -> None:
    cfg = config(width=12)
    with torch.device("meta"):
        model = Transformer(cfg, torch.float32)
    custom = custom_count(model, seq_len=10)
    assert num_params(cfg, custom).total == sum(p.numel() for p in model.parameters())
    products = 6 * (40 * 16 + 2 * 3 * 16 * 24 + 3 * 16 * (12 + 13))
    assert flops(cfg, 10, custom).causal == products + 6 * 10 * (12 + 13)
    built_in = Transformer(
        ModelConfig(
            vocab_size=9,
            d_model=8,
            num_layers=1,
            attention=GroupedQueryAttention(num_heads=2, num_kv_heads=1, d_head=4),
            feed_forward=SwiGLU(d_ff=8),
        ),
        torch.float32,
    )
    assert custom_count(built_in, seq_len=10).params == 0


def test_a_parameter_it_does_not_declare_is_an_error_that_names_it() -> None:
    cfg = config("build_undeclared")
    with pytest.raises(
        RoleError, match=r"^blocks\.0\.attention\.gate\.bias has no role; name one of embedding, hidden"
    ):
        initialise(Transformer(cfg, torch.float32), cfg, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("no_colon", r"^model\.attention\.build='no_colon' is not of the form package\.module:function$"),
        (
            "not_there_at_all:build",
            r"cannot be imported \(No module named 'not_there_at_all'\); is its folder on PYTHONPATH\?$",
        ),
        (f"{MODULE}:absent", r"cannot be imported \(module 'surefoot_tests_out_of_tree' has no attribute 'absent'\)"),
        (f"{MODULE}:build_nothing", r"returned str; a part is a torch\.nn\.Module$"),
        (f"{MODULE}:build_mute", r"returned Mute without roles\(\), to name the role of every parameter$"),
    ],
)
def test_a_builder_that_cannot_be_used_is_refused_with_the_reason(build: str, message: str) -> None:
    cfg = config()
    with pytest.raises(PartError, match=message):
        build_custom(Custom(build=build), cfg, 0, place="model.attention")
