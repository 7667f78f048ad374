"""Faults put into a run on purpose, from outside, by wrapping what the step calls."""

import dataclasses
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from surefoot.model.loss import LossSums
from surefoot.parallel.forward_backward import ForwardBackward, MicroBatch
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState


class NaNGradients:
    """One NaN in the gradient of one parameter after the forward and backward of certain batches, on certain ranks.

    It comes after the reduction over ranks, as a flipped bit would: one replica or shard is poisoned, the others are not.
    """

    def __init__(
        self, inner: ForwardBackward, state: TrainState, batches: Collection[int], rank: int, ranks: Collection[int]
    ) -> None:
        self.inner, self.state, self.batches, self.here = inner, state, batches, rank in ranks

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> list[LossSums]:
        sums = self.inner(micro_batches, num_targets)
        if self.here and self.state.batch_index - 1 in self.batches:
            for parameter in self.state.parameters.values():
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter.grad.mul_(float("nan"))
                    break
        return sums


def with_nan_gradients(
    setup: Setup, state: TrainState, batches: Collection[int], ranks: Collection[int] = (0,)
) -> Setup:
    """The setup, with NaN gradients in these batches on these ranks."""
    faulty = NaNGradients(setup.forward_backward, state, batches, setup.world.rank, ranks)
    return dataclasses.replace(setup, forward_backward=faulty)


def with_nan_activations(
    setup: Setup, state: TrainState, batches: Collection[int], ranks: Collection[int] = (0,)
) -> None:
    """From now on the embedding's output is NaN in these batches on these ranks, so that loss and gradients are, by the model's own path."""

    def spoil(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        here = setup.world.rank in ranks and state.batch_index - 1 in batches and torch.is_grad_enabled()
        return output * math.nan if here else None

    state.model.get_submodule("embedding").register_forward_hook(spoil)
