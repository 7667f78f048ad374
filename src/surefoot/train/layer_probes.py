"""Figures of attention and of the residual stream, layer by layer, from a forward that is watched. Exact under every layout."""

import dataclasses
import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.guard.signals import MISSING, LayerProbe
from surefoot.model.attention import GroupedAttention
from surefoot.model.attention_backends import AttentionBackend, visible
from surefoot.model.parts import AttendContext
from surefoot.parallel.apply import compiles
from surefoot.parallel.context import whole_heads
from surefoot.parallel.forward_backward import MicroBatch, tokens_held
from surefoot.parallel.reduce import gather_over_ranks, sum_over_ranks
from surefoot.train.setup import Setup

MIN_KEYS = 16
"""Queries that see fewer keys are left out of the entropy: over few keys it says little."""
QUERIES = 128
"""Queries whose logits exist at once."""


def probe_layers(setup: Setup, rows: MicroBatch) -> tuple[LayerProbe, ...]:
    """A forward over the rows with every block watched. Collective; every rank passes the same rows."""
    world, num_layers = setup.world, setup.config.model.num_layers
    held_T = tokens_held(setup.rows, world, rows)
    watches = {}
    with ExitStack() as stack:
        if compiles(setup.config.parallel):  # hooks would have every block compiled anew
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer, block in setup.blocks.items():
            watch = watches[layer] = _LayerWatch(block, held_T)
            stack.callback(block.register_forward_pre_hook(watch.before).remove)
            stack.callback(block.register_forward_hook(watch.after).remove)
        setup.forward_backward.forward_only([rows])
    sums_L4 = torch.zeros(num_layers, 4, dtype=torch.float64, device=world.device)
    tops_L2 = torch.full((num_layers, 2), -math.inf, dtype=torch.float64, device=world.device)
    _, data, cp, _ = world.place
    for layer, watch in watches.items():
        tops_L2[layer] = watch.tops
        if data == 0:  # all data ranks have seen the same
            sums_L4[layer] = watch.sums
            if cp > 0:  # and all context ranks whole rows of queries
                sums_L4[layer, :2] = 0.0
    total_L4 = sum_over_ranks([sums_L4], world).view(-1, 4)
    highest_L2 = gather_over_ranks([tops_L2], world).amax(0).view(-1, 2)
    return tuple(
        _layer(layer, sums, tops)
        for layer, (sums, tops) in enumerate(zip(total_L4.tolist(), highest_L2.tolist(), strict=True))
    )


def _layer(layer: int, sums: list[float], tops: list[float]) -> LayerProbe:
    share, queries, squares, elements = sums
    logit, activation = (MISSING if top == -math.inf else top for top in tops)
    return LayerProbe(
        layer=layer,
        attention_logit_max=logit,
        attention_entropy=share / queries if queries else MISSING,
        activation_rms=math.sqrt(squares / elements) if elements else MISSING,
        activation_max=activation,
    )


class _LayerWatch:
    """Looks on while one block runs: at the queries and keys its attention hands to the kernel, and at what comes out."""

    def __init__(self, block: nn.Module, held_T: Tensor) -> None:
        self.has_logits = isinstance(getattr(block, "attention", None), GroupedAttention)
        self.held_T = held_T
        self.sums = torch.zeros(4, dtype=torch.float64)
        """Shares of the largest entropy and how many; squares of activations and how many."""
        self.tops = torch.full((2,), -math.inf, dtype=torch.float64)
        """Largest logit and activation."""
        self.documents_BT: Tensor | None = None

    def before(self, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pre-hook: the same inputs, the kernel watched."""
        x_BTD, context = inputs
        self.sums, self.tops = self.sums.to(x_BTD.device), self.tops.to(x_BTD.device)
        self.documents_BT = context.documents_BT
        if not self.has_logits:
            return inputs
        return x_BTD, dataclasses.replace(context, attend=_WatchedKernel(context, self))

    def after(self, block: nn.Module, inputs: tuple[Any, ...], out_BTD: Tensor) -> None:
        """Hook: the residual stream, blanked tokens left out."""
        kept = out_BTD if self.documents_BT is None else out_BTD[self.documents_BT[:, self.held_T] >= 0]
        if kept.numel():
            self.sums[2], self.sums[3] = kept.double().square().sum(), kept.numel()
            self.tops[1] = kept.abs().max().double()


class _WatchedKernel:
    """An attention kernel that gives the same result, and tells about its logits."""

    def __init__(self, context: AttendContext, watch: _LayerWatch) -> None:
        self.kernel: AttentionBackend = context.attend
        self.watch = watch

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Any:
        """The kernel's own mask."""
        return self.kernel.prepare(documents_BT, like_BTD)

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Any) -> Tensor:
        q, k = (whole_heads(self.kernel, x) for x in (q_BTNH, k_BSKH))
        top, share, queries = attention_figures(q, k, self.watch.documents_BT)
        self.watch.tops[0], self.watch.sums[0], self.watch.sums[1] = top, share, queries
        return self.kernel(q_BTNH, k_BSKH, v_BSKH, mask)


def attention_figures(q_BTNH: Tensor, k_BSKH: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Largest logit that a query may see; of queries with at least MIN_KEYS keys the sum of entropies, each over that of the uniform
    distribution, and their number.

    fp64 (3,); logits and weights in fp32 at least. Blanked queries are left out; the largest is -inf where no query is left.
    """
    wide = torch.promote_types(q_BTNH.dtype, torch.float32)
    q, k = (x.to(wide).transpose(1, 2) for x in (q_BTNH, k_BSKH))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1) * q.shape[-1] ** -0.5
    seen = visible(documents_BT, q_BTNH).expand(len(q), 1, -1, -1)
    if documents_BT is not None:
        seen = seen & (documents_BT >= 0)[:, None, :, None]
    keys = seen.sum(-1)
    top = q.new_full((), -math.inf)
    total, count = q.new_zeros((2,), dtype=torch.float64)
    for start in range(0, q.shape[2], QUERIES):
        block = slice(start, start + QUERIES)
        logits = (q[:, :, block] @ k.transpose(2, 3)).masked_fill(~seen[:, :, block], -math.inf)
        top = torch.maximum(top, logits.max())
        weights = torch.softmax(logits, dim=-1)
        expected = torch.where(seen[:, :, block], weights * logits, 0.0).sum(-1)
        share = (torch.logsumexp(logits, dim=-1) - expected).double() / keys[:, :, block].double().log()
        enough = (keys[:, :, block] >= MIN_KEYS).expand_as(share)
        total = total + torch.where(enough, share, 0.0).sum()
        count = count + enough.sum()
    return torch.stack([top.double(), total, count])
