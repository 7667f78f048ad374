"""A model in stages, run by a schedule of torch.distributed.pipelining."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from surefoot.config.errors import ConfigError
from surefoot.config.parallel import ParallelConfig
from surefoot.model.loss import LossSums
from surefoot.model.transformer import Transformer
from surefoot.parallel.forward_backward import MicroBatch, Rows
from surefoot.parallel.mesh import World


@dataclass(frozen=True)
class Stages:
    """This rank's stages."""

    modules: tuple[Transformer, ...]
    numbers: tuple[int, ...]
    """Of each, from 0 at the embedding to ``num_stages`` - 1 at the loss."""
    num_stages: int

    def parameters(self, *, with_copies: bool = False) -> dict[str, nn.Parameter]:
        """By their name in the whole model, in its order; the last stage's copy of a tied embedding only where asked for, as
        ``head.weight``."""
        raise NotImplementedError

    def blocks(self) -> dict[int, nn.Module]:
        """By layer."""
        raise NotImplementedError


def cut_stages(model: Transformer, config: ParallelConfig, world: World) -> Stages:
    """This rank's stages of a model on the meta device."""
    raise ConfigError(["parallel.pp is not there yet"])


class PipelineForwardBackward:
    """Micro-batches through the stages."""

    def __init__(self, stages: Stages, config: ParallelConfig, world: World, rows: Rows) -> None:
        raise NotImplementedError

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        raise NotImplementedError

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        raise NotImplementedError
