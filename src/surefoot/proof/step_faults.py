"""Faults of one step: gradients, weights, the loss, and the update itself. Those of hardware fire once, and never again at a replay."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from surefoot.model.loss import LossSums
from surefoot.optim.optimizer import Update
from surefoot.parallel.forward_backward import ForwardBackward, MicroBatch
from surefoot.proof.faults import Bench, Dose
from surefoot.train.state import TrainState

Blow = Callable[[Tensor, Dose], None]
"""Changes a gradient or a weight in place."""


class StruckOnce:
    """One blow to a parameter drawn by the dose, in the first forward and backward of the onset: its weight before, or its gradient after."""

    def __init__(self, inner: ForwardBackward, state: TrainState, blow: Blow, dose: Dose, *, weight: bool) -> None:
        self.inner, self.state, self.blow, self.dose, self.weight = inner, state, blow, dose, weight
        self.fired = False

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        return self.inner.forward_only(micro_batches)

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        due = not self.fired and self.state.batch_index - 1 == self.dose.onset
        self.fired |= due
        if due and self.weight:
            self._strike(weight=True)
        sums = self.inner(micro_batches, num_targets)
        if due and not self.weight:
            self._strike(weight=False)
        return sums

    def _strike(self, *, weight: bool) -> None:
        matrices = [p for p in self.state.parameters.values() if p.dim() == 2]
        parameter = matrices[int(np.random.default_rng(self.dose.seed).integers(len(matrices)))]
        target = parameter if weight else parameter.grad
        assert target is not None
        with torch.no_grad():
            self.blow(target, self.dose)


def multiply(tensor: Tensor, dose: Dose) -> None:
    """The whole tensor times the magnitude."""
    tensor.mul_(dose.magnitude)


def spoil_one(tensor: Tensor, dose: Dose) -> None:
    """One element becomes NaN."""
    tensor.view(-1)[_element(tensor, dose)] = math.nan


def flip_bit(tensor: Tensor, dose: Dose) -> None:
    """Bit ``magnitude`` of one fp32 element, counted from the lowest: 23 to 30 are the exponent."""
    bits = tensor.view(-1).view(torch.int32)
    bits[_element(tensor, dose)] ^= 1 << int(dose.magnitude)


class StaleGradients:
    """The gradients of the batch before are still there in the first pass of the onset, and the new ones come on top."""

    def __init__(self, inner: ForwardBackward, state: TrainState, dose: Dose) -> None:
        self.inner, self.state, self.dose = inner, state, dose
        self.stale: dict[str, Tensor] = {}
        self.fired = False

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        return self.inner.forward_only(micro_batches)

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        sums = self.inner(micro_batches, num_targets)
        batch_index = self.state.batch_index - 1
        if self.fired:
            return sums
        gradients = {name: p.grad for name, p in self.state.parameters.items() if p.grad is not None}
        if batch_index == self.dose.onset - 1:
            self.stale = {name: gradient.detach().clone() for name, gradient in gradients.items()}
        if batch_index == self.dose.onset:
            self.fired = True
            for name, gradient in gradients.items():
                gradient.add_(self.stale[name])
        return sums


class Overflow:
    """The loss of one batch is infinite and its gradients are not numbers, whenever any of its rows is computed below fp32: numerics, no document."""

    def __init__(self, inner: ForwardBackward, state: TrainState, dose: Dose) -> None:
        self.inner, self.state, self.dose = inner, state, dose
        self.rows: set[bytes] = set()

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        return self.inner.forward_only(micro_batches)

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        sums = self.inner(micro_batches, num_targets)
        rows = {row.tobytes() for micro in micro_batches for row in micro.tokens_BT.cpu().numpy()}
        if not self.rows and self.state.batch_index - 1 == self.dose.onset:
            self.rows = rows
        if not rows & self.rows or getattr(self.state.model, "compute_dtype", None) == torch.float32:
            return sums
        for parameter in self.state.parameters.values():
            if parameter.grad is not None:
                parameter.grad.fill_(math.nan)
        return [s._replace(objective=s.objective * math.inf, ce_sum=s.ce_sum * math.inf) for s in sums]


def strike_gradient(blow: Blow, bench: Bench, dose: Dose) -> Bench:
    """One gradient is struck once."""
    return _around(bench, StruckOnce(bench.setup.forward_backward, bench.state, blow, dose, weight=False))


def strike_weight(blow: Blow, bench: Bench, dose: Dose) -> Bench:
    """One weight is struck once, before the forward of the onset."""
    return _around(bench, StruckOnce(bench.setup.forward_backward, bench.state, blow, dose, weight=True))


def keep_gradients(bench: Bench, dose: Dose) -> Bench:
    """Gradients are not zeroed once."""
    return _around(bench, StaleGradients(bench.setup.forward_backward, bench.state, dose))


def overflow(bench: Bench, dose: Dose) -> Bench:
    """The loss of one batch is infinite."""
    return _around(bench, Overflow(bench.setup.forward_backward, bench.state, dose))


def update_twice(bench: Bench, dose: Dose) -> Bench:
    """The optimiser applies the update of the onset a second time, once ever."""
    state, fired = bench.state, [False]

    def again(update: Update) -> None:
        apply(update)
        if not fired[0] and state.batch_index - 1 == dose.onset:
            fired[0] = True
            apply(update)

    apply = state.optimizer.apply
    state.optimizer.apply = again  # type: ignore[method-assign]
    return bench


def raise_rate(bench: Bench, dose: Dose) -> Bench:
    """The rate of the window's updates is multiplied on its way into the optimiser: a bad schedule, the same at every replay."""
    state = bench.state

    def raised(update: Update) -> None:
        factor = dose.magnitude if state.step in dose.window else 1.0
        apply(dataclasses.replace(update, lr=update.lr * factor))

    apply = state.optimizer.apply
    state.optimizer.apply = raised  # type: ignore[method-assign]
    return bench


def forget_step_count(bench: Bench) -> None:
    """The optimiser's own count of updates is 0 again, its moments are not."""
    bench.state.optimizer.set_step_count(0)


def _around(bench: Bench, forward_backward: ForwardBackward) -> Bench:
    return dataclasses.replace(bench, setup=dataclasses.replace(bench.setup, forward_backward=forward_backward))


def _element(tensor: Tensor, dose: Dose) -> int:
    return int(np.random.default_rng([dose.seed, 1]).integers(tensor.numel()))
