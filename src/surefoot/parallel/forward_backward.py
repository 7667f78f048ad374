"""How a batch becomes gradients: the seam where pipelines will plug in."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from surefoot.model.loss import LossSums


class MicroBatch(NamedTuple):
    """Rows of one forward and backward, on the device, in the order the model takes them. All (B, T) integers."""

    tokens_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None
    """None where tokens attend across documents."""
    targets_BT: Tensor


class ForwardBackward(Protocol):
    """Leaves the gradient of sum(objective) / ``num_targets`` in every ``.grad``, summed over micro-batches and ranks."""

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> list[LossSums]:
        """The named sums of every micro-batch of this rank, detached."""


class PlainForwardBackward:
    """One micro-batch after the other; gradients cross ranks with the last one."""

    def __init__(self, forward: nn.Module) -> None:
        self.forward = forward
        """The model as it is called: itself, its DDP wrapper, or sharded in place."""

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        sums: list[LossSums] = []
        for index, micro in enumerate(micro_batches):
            with _reducing(self.forward, last=index == len(micro_batches) - 1):
                parts: LossSums = self.forward(*micro)
                torch.autograd.backward(parts.objective / num_targets)
            sums.append(parts)
        return sums


class WideForwardBackward:
    """Gradients of weights narrower than fp32, each rank with all of them: added up over micro-batches and ranks in fp32, rounded once.

    DDP would add in the dtype of the weights. Its overlap of reduction and backward is given up.
    """

    def __init__(self, model: nn.Module, num_ranks: int) -> None:
        self.model, self.num_ranks = model, num_ranks

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        parameters = list(self.model.parameters())
        sums: list[LossSums] = []
        total: Tensor | None = None
        for micro in micro_batches:
            parts: LossSums = self.model(*micro)
            torch.autograd.backward(parts.objective / num_targets)
            sums.append(parts)
            if len(micro_batches) == self.num_ranks == 1:
                return sums
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat([grad.reshape(-1).float() for grad in grads])
            total = flat if total is None else total.add_(flat)
            for parameter in parameters:
                parameter.grad = None
        assert total is not None
        if self.num_ranks > 1:
            torch.distributed.all_reduce(total)
        shares = torch.split_with_sizes(total, [p.numel() for p in parameters])
        for parameter, grad in zip(parameters, shares, strict=True):
            parameter.grad = grad.view_as(parameter).to(parameter.dtype)
        return sums


def _reducing(forward: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Hold back the gradient reduction for all but the last micro-batch."""
    if isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    if isinstance(forward, FSDPModule):
        forward.set_is_last_backward(last)
        forward.set_requires_gradient_sync(last)
    return nullcontext()


def sum_hook(group: torch.distributed.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's reduction as a plain sum: every loss is already divided by its global count, so an average would be wrong."""
    work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])
