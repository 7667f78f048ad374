"""A config whose every size is small and none is the same as another, for what is counted."""

import dataclasses

import pytest

from surefoot.config.model import GroupedQueryAttention, LossConfig, ModelConfig, SwiGLU
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.recipes.tiny import tiny


@pytest.fixture
def small() -> RunConfig:
    """Four rows, one a micro-batch, on a model of four layers; the data is never read."""
    recipe = tiny()
    model = ModelConfig(
        vocab_size=64,
        d_model=24,
        num_layers=4,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8),
        feed_forward=SwiGLU(d_ff=40),
        loss=LossConfig(chunk_tokens=24),
    )
    return dataclasses.replace(
        recipe,
        model=model,
        parallel=ParallelConfig(device="cpu", precision="fp32", micro_batch_size=1),
        data=dataclasses.replace(recipe.data, seq_len=32, batch_size=4),
    )
