"""A model whose matrices are cut: what is placed, what is compiled, and what it says when it is asked for text."""

import dataclasses
import functools
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from surefoot.config.errors import ConfigError
from surefoot.config.model import SwiGLU
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.transformer import Transformer
from surefoot.optim.clip import local_part
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.parallel.tensor import cut_matrices
from surefoot.train.generate import continue_tokens
from surefoot.train.setup import set_up
from surefoot.train.step import split
from tolerances import COMPILED

Vary = Callable[..., RunConfig]


@pytest.fixture
def model(config: RunConfig, vary: Vary) -> RunConfig:
    """In fp64, with a vocabulary that two ranks can share."""
    return vary(config, model=dataclasses.replace(config.model, vocab_size=260), **{"parallel.precision": "fp64"})


def texts(rank: int, world: int, config: RunConfig) -> list[list[int]]:
    here = join_world(config.parallel)
    _, state = set_up(config, here)
    return [continue_tokens(state.model, prompt, 5, seq_len=64, eos_id=256) for prompt in ([72, 101], [65] * 7)]


def test_generation_draws_from_whole_logits_at_any_length(model: RunConfig, vary: Vary) -> None:
    [alone] = run_ranks(1, texts, model)
    assert run_ranks(2, texts, vary(model, **{"parallel.tp": 2})) == [alone, alone]


def unplaced(rank: int, world: int, config: RunConfig) -> str:
    here = join_world(config.parallel)
    with torch.device("meta"):
        model = Transformer(config.model, torch.float32)
        model.blocks[1].attention.bias = nn.Parameter(torch.empty(4))
    with pytest.raises(ConfigError) as error:
        cut_matrices(model, config.parallel, here)
    return str(error.value)


def test_a_parameter_that_no_rule_covers_is_named(model: RunConfig, vary: Vary) -> None:
    for text in run_ranks(2, unplaced, vary(model, **{"parallel.tp": 2})):
        assert "blocks.1.attention.bias: no rule says how parallel.tp=2 ranks share it out" in text
        assert "query" not in text


def tied_and_kept(rank: int, world: int, config: RunConfig) -> tuple[int, bool, list[int]]:
    here = join_world(config.parallel)
    with torch.device("meta"):
        model = Transformer(config.model, torch.float32)
        frozen = model.blocks[0].feed_forward.down.weight.requires_grad_(False)
        model.blocks[1].feed_forward.down.weight = frozen
    cut_matrices(model, config.parallel, here)
    one, other = (model.blocks[i].feed_forward.down.weight for i in (0, 1))
    return len(list(model.parameters())), one is other and not one.requires_grad, list(one.to_local().shape)


def test_a_shared_parameter_stays_one_and_a_frozen_one_frozen(model: RunConfig, vary: Vary) -> None:
    config = vary(model, **{"parallel.tp": 2, "model.feed_forward": SwiGLU(d_ff=48)})
    count = 1 + 2 * (2 + 4 + 3) + 1 - 1
    assert run_ranks(2, tied_and_kept, config) == [(count, True, [32, 24])] * 2


def compiled(rank: int, world: int, config: RunConfig, backend: str) -> tuple[dict[str, Tensor], dict[str, int]]:
    nn.Module.compile = functools.partialmethod(nn.Module.compile, backend=backend)
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    batch = Loader(config.data, prepare(config.data), config.seed).batch(0)
    setup.forward_backward(split(batch, setup), batch.num_targets)
    gradients = {n: local_part(p.grad).clone() for n, p in state.parameters.items() if p.grad is not None}
    return gradients, dict(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.skipif(shutil.which("c++") is None, reason="compiled blocks need a C++ compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.proof)])
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_hold_their_collectives(model: RunConfig, vary: Vary, backend: str) -> None:
    config = vary(model, **{"parallel.tp": 2, "model.num_layers": 1, "parallel.precision": "fp32"})
    eager = run_ranks(2, compiled, config, backend)
    traced = run_ranks(2, compiled, vary(config, **{"parallel.compile": "on"}), backend, timeout_s=240)
    for (found, breaks), (expected, _) in zip(traced, eager, strict=True):
        assert not breaks
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() < COMPILED[torch.float32] * gradient.norm(), name
