"""A model in stages: which layers lie on which rank, and the stretches of the model that come of it."""

import copy
from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from surefoot.config.layout_rules import stages_per_rank
from surefoot.config.parallel import ParallelConfig
from surefoot.model.parts import Linear
from surefoot.model.transformer import Transformer
from surefoot.parallel.mesh import World

COPY = "head.weight"
"""Name of the last stage's copy of a tied embedding."""


@dataclass(frozen=True)
class Stages:
    """This rank's stages."""

    modules: tuple[Transformer, ...]
    numbers: tuple[int, ...]
    """Of each, from 0 at the embedding to ``num_stages`` - 1 at the loss."""
    num_stages: int
    names: tuple[str, ...]
    """Parameters of the whole model, in its order."""
    tied: bool
    """The last stage's head is a copy of the first one's embedding, which no optimiser knows."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """By their name in the whole model, in its order, without the copy of a tied embedding."""
        here = {name: p for stage in self.modules for name, p in stage.named_parameters()}
        return {name: here[name] for name in self.names if name in here}

    def blocks(self) -> dict[int, nn.Module]:
        """By layer."""
        here = {int(n): block for stage in self.modules for n, block in stage.blocks.named_children()}
        return dict(sorted(here.items()))

    @property
    def first(self) -> Transformer | None:
        """The stage with the embedding, where this rank has it."""
        return next((stage for stage in self.modules if stage.embedding is not None), None)

    @property
    def last(self) -> Transformer | None:
        """The stage with the loss, where this rank has it."""
        return next((stage for stage in self.modules if stage.norm is not None), None)


def cut_stages(model: Transformer, config: ParallelConfig, world: World) -> Stages:
    """This rank's stages of a model on the meta device. Modules move into their stage as they are, with all that was set up on them."""
    names = tuple(name for name, _ in model.named_parameters())
    numbers = stages_of_rank(world.place.pp, config)
    num_stages = config.pp * stages_per_rank(config.pipeline)
    layers = layers_of_stages(model.cfg.num_layers, num_stages, config.pipeline.layers)
    return Stages(
        modules=tuple(_stretch(model, layers[number], number, num_stages) for number in numbers),
        numbers=numbers,
        num_stages=num_stages,
        names=names,
        tied=model.head is None,
    )


def stages_of_rank(rank: int, config: ParallelConfig) -> tuple[int, ...]:
    """The stages on a pipeline rank: every ``pp``-th, or under a V schedule one from the front and its mirror image."""
    each = stages_per_rank(config.pipeline)
    if config.pipeline.schedule in ("zbv", "dualpipev"):
        return rank, 2 * config.pp - 1 - rank
    return tuple(rank + config.pp * n for n in range(each))


def rank_of_stage(stage: int, config: ParallelConfig) -> int:
    """The pipeline rank that has a stage."""
    return next(rank for rank in range(config.pp) if stage in stages_of_rank(rank, config))


def layers_of_stages(num_layers: int, num_stages: int, sizes: tuple[int, ...]) -> list[range]:
    """The layers of every stage: ``sizes`` of them, or evenly, the first stages taking what is left over."""
    counts = sizes or tuple(num_layers // num_stages + (n < num_layers % num_stages) for n in range(num_stages))
    ends = [sum(counts[: n + 1]) for n in range(num_stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _stretch(model: Transformer, layers: range, number: int, num_stages: int) -> Transformer:
    """A Transformer of some of the model's modules; whatever else was set on the model is set on it."""
    stage = copy.copy(model)
    for own in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        stage.__dict__[own] = copy.copy(model.__dict__[own])
    for kwargs_of in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
        stage.__dict__[kwargs_of] = OrderedDict(model.__dict__[kwargs_of])
    by_layer = {int(name): block for name, block in model.blocks.named_children()}
    stage.blocks = nn.ModuleDict({str(layer): by_layer[layer] for layer in layers})
    if number > 0:
        stage.embedding = None
    if number < num_stages - 1:
        stage.norm, stage.head = None, None
    elif model.head is None:
        assert model.embedding is not None
        like = model.embedding.weight
        stage.head = Linear(like.shape[1], like.shape[0])
        # placed as the embedding is, so that the shards of both correspond
        stage.head.weight = nn.Parameter(like.detach().clone())
    return stage
