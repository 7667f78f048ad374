"""Activation checkpointing of blocks (arXiv:1604.06174): the backward computes again what the forward did not keep."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from surefoot.config.parallel import ParallelConfig
from surefoot.model.transformer import Transformer
from surefoot.parallel.ring import RING

_aten = torch.ops.aten
KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_mm.default,
        _aten._grouped_mm.default,
        _aten._scaled_grouped_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.higher_order.flex_attention,
        RING,
    }
)
"""Operators whose results selective recomputation keeps: products with weights, and fused attention, whose results are as large as its
inputs. Batched products are not among them: they are the scores of unfused attention, which are the first thing worth computing again
(arXiv:2205.05198 section 5)."""


def recompute_blocks(model: Transformer, config: ParallelConfig) -> None:
    """Have every block compute again in its backward: everything from its input (full), or what is not KEPT (selective).

    In place: parameters keep their names. To be called before blocks are compiled or sharded: what is gathered for a block's backward is
    there when it computes again. A forward without gradients is what it was.
    """
    if config.recompute == "none":
        return
    again: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if config.recompute == "selective":
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, _policy))
    for block in model.blocks.children():
        _recompute(block, again)


def _recompute(block: nn.Module, again: Callable[..., Any]) -> None:
    inner = block.forward

    # a function of our own, which torch.compile looks into: it leaves a partial of torch's code alone, and would compile nothing
    def forward(*args: Any) -> Any:
        return again(inner, *args)

    # an attribute of the object goes before the method of its class, also after FSDP2 has given it another class
    block.forward = forward


def _policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
