"""Activation checkpointing of blocks (arXiv:1604.06174)."""

from surefoot.config.errors import ConfigError
from surefoot.config.parallel import ParallelConfig
from surefoot.model.transformer import Transformer


def recompute_blocks(model: Transformer, config: ParallelConfig) -> None:
    """Have every block compute again in the backward what it does not keep."""
    if config.recompute != "none":
        raise ConfigError(["parallel.recompute is not there yet"])
