"""How large a model's activations are, and how far a few updates move them: the coordinate data of one model."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.config.run import RunConfig
from surefoot.data.loader import Batch
from surefoot.data.pack import IGNORE
from surefoot.model.parts import AttendContext
from surefoot.parallel.mesh import World
from surefoot.train.setup import set_up
from surefoot.train.step import on_device, train_step

QUANTITIES = ("embedding", "attention", "feed_forward", "residual", "attention_logits", "logits")
"""Outputs of the embedding, of the parts of a block and of the blocks, q k^T as the softmax gets it over visible pairs, and the output."""
_SEEDS = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of one activation over a batch."""

    mean_abs: float
    rms: float
    change: float
    """Mean absolute difference from the untrained model on the same batch."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """All activations after some updates, by name: ``embedding``, ``blocks.0.attention`` and so on, ``logits``."""

    step: int
    loss: float
    """Of the batch that this step trained on, before its update; NaN at step 0."""
    sizes: dict[str, Size]
    refused: int = 0
    """Updates so far that were left out: the changes are then of fewer steps."""

    def quantity(self, name: str) -> Size | None:
        """One of QUANTITIES: the last block's residual stream, the mean over blocks of what is in them; None for a part that has none."""
        if name == "residual":
            number = max(int(key.split(".")[1]) for key in self.sizes if key.endswith(".residual"))
            return self.sizes[f"blocks.{number}.residual"]
        found = [size for key, size in self.sizes.items() if key.rpartition(".")[2] == name]
        if not found:
            return None
        mean = {field.name: _mean([getattr(size, field.name) for size in found]) for field in dataclasses.fields(Size)}
        return Size(**mean)


def coordinates(config: RunConfig, world: World, steps: int) -> list[Coordinates]:
    """Train on one synthetic batch, through the step of every run, and look at the same batch before and after each update.

    Training on what is looked at is the worst case: all updates align with it.
    """
    batch = synthetic_batch(config)
    setup, state = set_up(config, world)
    micro = on_device(batch, setup)
    first = activations(state.model, micro.tokens_BT, micro.positions_BT)
    found = [Coordinates(step=0, loss=float("nan"), sizes=_sizes(first, first))]
    refused = 0
    for step in range(1, steps + 1):
        outcome = train_step(state, dataclasses.replace(batch, batch_index=step - 1), setup)
        state.optimizer.zero_grad()
        now = activations(state.model, micro.tokens_BT, micro.positions_BT)
        refused += outcome.skipped
        found.append(Coordinates(step=step, loss=outcome.signals.loss, sizes=_sizes(now, first), refused=refused))
    return found


def activations(model: nn.Module, tokens_BT: Tensor, positions_BT: Tensor) -> dict[str, Tensor]:
    """What QUANTITIES are read off, by name, of one forward without gradients."""
    kept: dict[str, Tensor] = {}
    with _recording(model, kept), torch.no_grad():
        kept["logits"] = model(tokens_BT, positions_BT, None)
    return kept


@contextmanager
def _recording(model: Any, kept: dict[str, Tensor]) -> Iterator[None]:
    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            kept[name] = out.detach()

        return hook

    handles = [model.embedding.register_forward_hook(keep("embedding"))]
    for number, block in enumerate(model.blocks):
        handles += [
            block.register_forward_hook(keep(f"blocks.{number}.residual")),
            block.attention.register_forward_hook(keep(f"blocks.{number}.attention")),
            block.attention.register_forward_pre_hook(_spy(f"blocks.{number}.attention_logits", kept)),
            block.feed_forward.register_forward_hook(keep(f"blocks.{number}.feed_forward")),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _spy(name: str, kept: dict[str, Tensor]) -> Callable[..., tuple[Any, ...]]:
    """A hook that lets the attention call its kernel through one that keeps the logits."""

    def hook(module: nn.Module, args: tuple[Tensor, AttendContext]) -> tuple[Tensor, AttendContext]:
        x_BTD, context = args
        kernel = context.attend

        class Kept:
            prepare = kernel.prepare

            def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Any) -> Tensor:
                kept[name] = _visible_logits(q_BTNH, k_BSKH)
                return kernel(q_BTNH, k_BSKH, v_BSKH, mask)

        return x_BTD, dataclasses.replace(context, attend=Kept())

    return hook


def _visible_logits(q_BTNH: Tensor, k_BSKH: Tensor) -> Tensor:
    """q k^T / sqrt(H) of every token with itself and those before it, flat."""
    tokens, heads, width = q_BTNH.shape[1:]
    k_BSNH = k_BSKH.repeat_interleave(heads // k_BSKH.shape[2], dim=2)
    scores_BNTS = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * width**-0.5
    at = torch.tril_indices(tokens, tokens, device=scores_BNTS.device)
    visible: Tensor = scores_BNTS[:, :, at[0], at[1]]
    return visible.detach()


def _sizes(now: dict[str, Tensor], first: dict[str, Tensor]) -> dict[str, Size]:
    return {
        name: Size(
            mean_abs=float(x.abs().mean()),
            rms=float(x.square().mean().sqrt()),
            change=float((x - first[name]).abs().mean()),
        )
        for name, x in now.items()
    }


def synthetic_batch(config: RunConfig) -> Batch:
    """``data.batch_size`` rows of ids drawn by Zipf's law from (seed), one document each: no data are needed to see how sizes grow."""
    rows, length, vocab = config.data.batch_size, config.data.seq_len, config.model.vocab_size
    weights = 1.0 / (np.arange(vocab) + 3.0)
    draw = np.random.default_rng([config.seed % _SEEDS, vocab])
    ids = draw.choice(vocab, size=(rows, length + 1), p=weights / weights.sum()).astype(np.int64)
    return Batch(
        batch_index=0,
        tokens_BT=np.ascontiguousarray(ids[:, :-1]),
        targets_BT=np.ascontiguousarray(ids[:, 1:]),
        documents_BT=np.zeros((rows, length), dtype=np.int32),
        positions_BT=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        samples_B3=np.array([[0, 0, row] for row in range(rows)], dtype=np.int64),
        digest=hashlib.sha256(ids.tobytes()).hexdigest()[:16],
        num_targets=int((ids[:, 1:] != IGNORE).sum()),
        num_excluded=0,
        excluded=(),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
