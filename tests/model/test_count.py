"""Figures from the config alone, against the real module and against torch's own counter of operations."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from surefoot.config.model import Custom, GroupedQueryAttention, LossConfig, ModelConfig, SwiGLU
from surefoot.model.count import CountError, activation_bytes, flops, flops_per_token, num_params, state_bytes
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from tolerances import ACTIVATION_FACTOR


def config(*, tied: bool = True, qk_norm: bool = False) -> ModelConfig:
    return ModelConfig(
        vocab_size=300,
        d_model=48,
        num_layers=3,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=20, qk_norm=qk_norm),
        feed_forward=SwiGLU(d_ff=80),
        tie_embeddings=tied,
        attention_backend="eager",
        loss=LossConfig(chunk_tokens=64),
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_parameters_are_those_of_the_module(tied: bool, qk_norm: bool) -> None:
    cfg = config(tied=tied, qk_norm=qk_norm)
    with torch.device("meta"):
        model = Transformer(cfg, torch.bfloat16)
    count = num_params(cfg)
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.embedding == model.embedding.weight.numel()
    assert count.output == (0 if tied else count.embedding)
    assert count.non_embedding == sum(p.numel() for p in model.blocks.parameters()) + 48
    assert state_bytes(cfg) == 16 * count.total


def test_operations_are_those_torch_counts() -> None:
    """Rows shorter than a block of queries, so that the eager kernel computes all scores: the full convention."""
    cfg, rows, seq_len = config(tied=False), 2, 32
    model = Transformer(cfg, torch.float32)
    initialise(model, cfg, 0)
    tokens = torch.randint(0, 300, (rows, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(seq_len).expand(rows, -1), None, tokens).objective.backward()
    assert counter.get_total_flops() == flops(cfg, seq_len).full * rows * seq_len


def test_the_causal_figure_counts_the_keys_a_token_can_see() -> None:
    cfg, seq_len = config(), 32
    count = flops(cfg, seq_len)
    assert count.attention_full == 12 * 3 * 4 * 20 * seq_len
    pairs = sum(position + 1 for position in range(seq_len))
    assert count.attention_causal * seq_len == 12 * 3 * 4 * 20 * pairs
    assert flops_per_token(cfg, seq_len) == count.causal == count.matmul + count.attention_causal
    assert count.matmul == 6 * (300 * 48 + 3 * (2 * 48 * 20 * 6 + 3 * 48 * 80))


@pytest.mark.parametrize("qk_norm", [True, False])
def test_activation_bytes_are_about_what_autograd_keeps(qk_norm: bool) -> None:
    cfg, rows, seq_len = config(qk_norm=qk_norm), 4, 128
    model = Transformer(cfg, torch.bfloat16)
    initialise(model, cfg, 0)
    tokens = torch.randint(0, 300, (rows, seq_len))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = model(tokens, torch.arange(seq_len).expand(rows, -1), None, tokens)
    assert sums.objective.isfinite()
    estimate = activation_bytes(cfg, rows, seq_len, 2) - 64 * 300 * 2  # the chunk of logits is not kept
    assert estimate / ACTIVATION_FACTOR < sum(kept.values()) < estimate * ACTIVATION_FACTOR


def test_a_custom_part_must_be_counted_on_the_built_model() -> None:
    cfg = ModelConfig(
        vocab_size=9, d_model=8, num_layers=1, attention=Custom(build="mine:build"), feed_forward=SwiGLU(d_ff=8)
    )
    with pytest.raises(
        CountError,
        match=r"^model\.attention is built by 'mine:build', whose size the config does not tell; build the model",
    ):
        num_params(cfg)


def test_counting_needs_no_torch() -> None:
    code = "import sys, surefoot.model.count; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
