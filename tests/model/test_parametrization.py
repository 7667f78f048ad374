"""Roles, and starting values that depend on nothing but seed and name."""

import math

import pytest
import torch
from torch import nn

from surefoot.config.model import GroupedQueryAttention, InitConfig, ModelConfig, SwiGLU
from surefoot.config.optim import RolesConfig
from surefoot.model.parametrization import ROLES, RoleError, draw_parameter, initialise, residual_writers, roles
from surefoot.model.transformer import Transformer


def config(**changes: object) -> ModelConfig:
    fields: dict[str, object] = {
        "vocab_size": 200,
        "d_model": 64,
        "num_layers": 8,
        "attention": GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=16, qk_norm=True),
        "feed_forward": SwiGLU(d_ff=96),
        "tie_embeddings": False,
    }
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


def drawn(cfg: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(cfg, dtype)
    initialise(model, cfg, seed)
    return model


def test_every_parameter_has_one_role() -> None:
    table = roles(Transformer(config(), torch.float32))
    assert table["embedding.weight"] == "embedding"
    assert table["head.weight"] == "output"
    assert table["norm.weight"] == "norm"
    layer = {name.removeprefix("blocks.3."): role for name, role in table.items() if name.startswith("blocks.3.")}
    norms = ("attention_norm", "feed_forward_norm", "attention.query_norm", "attention.key_norm")
    matrices = ("attention.query", "attention.key", "attention.value", "attention.output")
    gates = ("feed_forward.gate", "feed_forward.up", "feed_forward.down")
    assert layer == {f"{n}.weight": "norm" for n in norms} | {f"{n}.weight": "hidden" for n in matrices + gates}


def test_a_tied_output_is_an_embedding_and_does_not_decay() -> None:
    table = roles(Transformer(config(tie_embeddings=True), torch.float32))
    assert "head.weight" not in table
    decays = {role: getattr(RolesConfig(), role).decay for role in ROLES}
    assert {role for role, decay in decays.items() if decay == 0} == {"embedding", "norm", "bias"}
    assert all(rule.source for rule in ROLES.values())


def test_matrices_start_as_truncated_normals_and_those_that_write_the_residual_smaller() -> None:
    cfg = config(init=InitConfig(std=0.05, truncate=2.0))
    model = drawn(cfg)
    writers = residual_writers(model)
    assert writers == {f"blocks.{i}.{n}.weight" for i in range(8) for n in ("attention.output", "feed_forward.down")}
    # std of a normal cut at 2: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1))
    shrink = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if roles(model)[name] == "norm":
            assert values.eq(1).all()
            continue
        std = 0.05 / math.sqrt(2 * 8) if name in writers else 0.05
        assert values.abs().max() <= 2 * std * (1 + 1e-6)
        assert float(values.std()) == pytest.approx(std * shrink, rel=5 / math.sqrt(2 * values.numel()))
        assert abs(float(values.mean())) < 5 * std / math.sqrt(values.numel())
    unscaled = drawn(config(init=InitConfig(depth_scaled=False, truncate=0.0)))
    down = unscaled.blocks[0].feed_forward.down.weight.detach()
    assert float(down.std()) == pytest.approx(0.02, rel=0.05)
    assert down.abs().max() > 3 * 0.02


def test_a_parameter_depends_on_seed_and_name_alone() -> None:
    cfg = config()
    whole, again, other = drawn(cfg, 1), drawn(cfg, 1), drawn(cfg, 2)
    for (name, a), b, c in zip(whole.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert a.equal(b)
        assert a.equal(c) == (roles(whole)[name] == "norm")
    deeper = drawn(config(num_layers=9, init=InitConfig(depth_scaled=False)), 1)
    shallow = drawn(config(init=InitConfig(depth_scaled=False)), 1)
    assert all(dict(deeper.named_parameters())[name].equal(p) for name, p in shallow.named_parameters())
    assert not whole.blocks[0].attention.query.weight.equal(whole.blocks[1].attention.query.weight)
    alone = draw_parameter("blocks.4.feed_forward.up.weight", (96, 64), "hidden", cfg, 1, torch.float32)
    assert alone.equal(whole.blocks[4].feed_forward.up.weight)


def test_drawing_touches_no_global_generator_and_fp64_starts_from_the_fp32_numbers() -> None:
    before = torch.get_rng_state()
    narrow, wide = drawn(config()), drawn(config(), dtype=torch.float64)
    assert torch.get_rng_state().equal(before)
    for a, b in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert b.dtype == torch.float64
        assert a.double().equal(b)


class Declares(nn.Module):
    def __init__(self, declared: dict[str, str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.declared = declared

    def roles(self) -> dict[str, str]:
        return self.declared


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {},
            r"^part\.weight has no role; name one of embedding, hidden, output, norm, bias, router, expert, latent in the roles\(\)",
        ),
        ({"weight": "matrix"}, r"^part\.weight has role 'matrix'; roles are embedding, hidden"),
        ({"weight": "hidden", "gone": "bias"}, r"^part\.gone has role 'bias' but the model has no such parameter"),
    ],
)
def test_a_wrong_declaration_is_an_error_with_the_parameters_name(declared: dict[str, str], message: str) -> None:
    with pytest.raises(RoleError, match=message):
        roles(nn.ModuleDict({"part": Declares(declared)}))


def test_a_parameter_declared_twice_is_an_error() -> None:
    outer = Declares({"weight": "hidden", "inner.weight": "bias"})
    outer.inner = Declares({"weight": "norm"})
    with pytest.raises(RoleError, match=r"^inner\.weight is declared twice: as bias and as norm by Declares"):
        roles(outer)
