"""Matrices over tensor parallel ranks (arXiv:1909.08053), the residual stream over the same ranks by tokens (arXiv:2205.05198).

Between modules a rank has a contiguous piece of the tokens, (B, T / tp, D). Attention and feed-forward gather it once, compute with their
heads or columns, and give each rank its piece of the sum. What else a forward knows (positions, documents, mask, angles) is of all tokens.
What is gathered is kept for the backward; under recomputation, selective too, it is gathered again, as section 4.2.2 does always.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from surefoot.config.errors import ConfigError
from surefoot.config.model import Custom, ModelConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.model.attention import GroupedAttention
from surefoot.model.feed_forward import GatedFeedForward
from surefoot.model.norm import RootMeanSquareNorm
from surefoot.model.parts import Linear
from surefoot.model.transformer import Block, Transformer
from surefoot.parallel.mesh import World
from surefoot.parallel.tensor_loss import VocabularyLoss, VocabularyProduct, take_any_length
from surefoot.parallel.tensor_products import (
    cut_inputs,
    cut_outputs,
    cut_rows,
    give_all_tokens,
    read_whole,
    repeat_whole,
)
from surefoot.parallel.tensor_tokens import TensorRanks

Placed = tuple[nn.Module, Placement]
"""A module, and how all parameters inside it lie over the ranks."""


def cut_matrices(model: Transformer, config: ParallelConfig, world: World) -> None:
    """Place every parameter of a model on the meta device over the ``tp`` axis, in place, as DTensors, and have modules compute with what
    this rank holds.

    Embedding and head are cut by vocabulary, projections by heads, the feed-forward by columns; norms are whole, and so are parts built by
    the user, which every rank computes for all tokens. Raises ConfigError naming a parameter that no rule covers.
    """
    assert world.mesh is not None
    ranks = TensorRanks.of(world)
    placed: list[Placed] = []
    for block in model.blocks.children():
        assert isinstance(block, Block)
        placed += _cut_block(block, model.cfg, ranks)
    if model.norm is not None:
        placed += _cut_norm(model.norm, model.cfg, ranks)
    if model.embedding is not None:
        cut_rows(model.embedding, ranks)
        placed.append((model.embedding, Shard(0)))
        take_any_length(model, ranks)
    if model.head is not None:
        placed.append((model.head, Shard(0)))
    model.loss, model.logits = VocabularyLoss(ranks), VocabularyProduct(ranks)
    _place(placed, world.mesh["tp"])
    loose = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if loose:
        raise ConfigError([f"{name}: no rule says how parallel.tp={config.tp} ranks share it out" for name in loose])


def _cut_block(block: Block, cfg: ModelConfig, ranks: TensorRanks) -> Iterator[Placed]:
    yield from _cut_norm(block.attention_norm, cfg, ranks)
    yield from _cut_norm(block.feed_forward_norm, cfg, ranks)
    attention, feed_forward = block.attention, block.feed_forward
    if isinstance(cfg.attention, Custom):
        yield from _repeat(attention, ranks)
    elif isinstance(attention, GroupedAttention):
        yield from _share_out((attention.query, attention.key, attention.value), attention.output, attention, ranks)
        for norm in (attention.query_norm, attention.key_norm):
            if norm is not None:
                read_whole(norm, ranks)
                yield norm, Replicate()
    if isinstance(cfg.feed_forward, Custom):
        yield from _repeat(feed_forward, ranks)
    elif isinstance(feed_forward, GatedFeedForward):
        yield from _share_out((feed_forward.gate, feed_forward.up), feed_forward.down, feed_forward, ranks)


def _cut_norm(norm: nn.Module, cfg: ModelConfig, ranks: TensorRanks) -> Iterator[Placed]:
    if isinstance(cfg.norm, Custom):
        yield from _repeat(norm, ranks)
    elif isinstance(norm, RootMeanSquareNorm):
        read_whole(norm, ranks)
        yield norm, Replicate()


def _share_out(into: tuple[Linear, ...], out: Linear, part: nn.Module, ranks: TensorRanks) -> Iterator[Placed]:
    """Columns in, rows out: one gathering and one sum for the whole part (arXiv:1909.08053 section 3)."""
    give_all_tokens(part, ranks)
    for linear in into:
        cut_outputs(linear)
        yield linear, Shard(0)
    cut_inputs(out, ranks)
    yield out, Shard(1)


def _repeat(part: nn.Module, ranks: TensorRanks) -> Iterator[Placed]:
    repeat_whole(part, ranks)
    yield part, Replicate()


def _place(placed: list[Placed], mesh: DeviceMesh) -> None:
    """Put DTensors in the place of parameters; one that several modules share stays one."""
    done: dict[int, nn.Parameter] = {}
    for root, placement in placed:
        for module in root.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                if id(parameter) not in done:
                    done[id(parameter)] = _on_mesh(parameter, placement, mesh)
                module._parameters[name] = done[id(parameter)]


def _on_mesh(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    shape = list(parameter.shape)
    if isinstance(placement, Shard):
        assert shape[placement.dim] % mesh.size() == 0, (shape, placement, mesh.size())
        shape[placement.dim] //= mesh.size()
    part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    whole = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)
