"""Faults put into a run on purpose, from outside, by wrapping what the step calls."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surefoot.model.loss import LossSums
from surefoot.model.parts import Embedding
from surefoot.parallel.forward_backward import ForwardBackward, MicroBatch
from surefoot.train.evaluate import TrainingData
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Dose:
    """How much of a fault one run gets, and when."""

    onset: int
    """First batch that has it."""
    length: int
    """Batches, or applied steps for a fault of the optimiser, that have it."""
    magnitude: float
    """In the fault's own unit."""
    share: float = 1.0
    """Of the batch's tokens, for faults of the data."""
    seed: int = 0
    """Of every draw inside the fault: rows, elements, letters."""

    @property
    def window(self) -> range:
        """The batches that have it."""
        return range(self.onset, self.onset + self.length)


@dataclass(frozen=True)
class Bench:
    """What a fault may take hold of: everything the loop is handed."""

    setup: Setup
    state: TrainState
    data: TrainingData


class NaNGradients:
    """NaN in the gradient of one parameter after the first forward and backward of certain batches, on certain ranks.

    It comes after the reduction over ranks, as a flipped bit would: one replica or shard is poisoned, the others are not. And it comes
    once: the same batch computed again is well.
    """

    def __init__(
        self, inner: ForwardBackward, state: TrainState, batches: Collection[int], rank: int, ranks: Collection[int]
    ) -> None:
        self.inner, self.state, self.batches, self.here = inner, state, batches, rank in ranks
        self.last = -1

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        return self.inner.forward_only(micro_batches)

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        sums = self.inner(micro_batches, num_targets)
        batch_index, again = self.state.batch_index - 1, self.state.batch_index - 1 == self.last
        self.last = batch_index
        if self.here and batch_index in self.batches and not again:
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
    """From now on the embedding's output is NaN in the first forward of these batches on these ranks, so that loss and gradients are, by
    the model's own path; the same batch computed again is well."""
    last = -1

    def spoil(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        nonlocal last
        if not torch.is_grad_enabled():
            return None
        batch_index, again = state.batch_index - 1, state.batch_index - 1 == last
        last = batch_index
        here = setup.world.rank in ranks and batch_index in batches and not again
        return output * math.nan if here else None

    for module in state.model.modules():
        if isinstance(module, Embedding):  # of a pipeline, one stage has it
            module.register_forward_hook(spoil)
