"""Matrices over tensor parallel ranks (arXiv:1909.08053), the residual stream over the same ranks by tokens (arXiv:2205.05198)."""

from surefoot.config.errors import ConfigError
from surefoot.config.parallel import ParallelConfig
from surefoot.model.transformer import Transformer
from surefoot.parallel.mesh import World


def cut_matrices(model: Transformer, config: ParallelConfig, world: World) -> None:
    """Place every parameter of a model on the meta device over the ``tp`` axis, in place, as DTensors, and have modules compute with what
    this rank holds."""
    raise ConfigError(["parallel.tp is not there yet"])
