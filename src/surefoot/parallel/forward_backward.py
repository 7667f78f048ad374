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
from surefoot.parallel.mesh import World


class MicroBatch(NamedTuple):
    """Rows of one forward and backward, on the device, in the order the model takes them. All (B, T) integers."""

    tokens_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor | None
    """None where tokens attend across documents."""
    targets_BT: Tensor


class ForwardBackward(Protocol):
    """Passes over micro-batches of whole rows. The sums that come back are those of the whole rows, and the same on all ranks that share
    these rows (pp, cp and tp peers)."""

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        """Leave the gradient of sum(objective) / ``num_targets``, summed over micro-batches and ranks, in every ``.grad``; the named sums
        of every micro-batch, detached. Collective."""

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        """The same sums without gradients; gathered weights are let go. Collective."""


class Rows(Protocol):
    """How the tokens of rows lie over the ranks that share them."""

    def mine(self, micro: MicroBatch) -> MicroBatch:
        """This rank's tokens, positions and targets, in the order in which they lie here; documents stay whole."""

    def whole(self, sums: Sequence[LossSums]) -> list[LossSums]:
        """Sums of the whole rows from those of every rank's tokens, token losses in the order of the row; detached. Collective."""


def tokens_held(rows: Rows, world: World, micro: MicroBatch) -> Tensor:
    """Places in the row of the tokens of the residual stream on this rank, (tokens,), in the order in which they lie here."""
    num = micro.tokens_BT.shape[1]
    places_1T = torch.arange(num, device=micro.tokens_BT.device)[None]
    mine = rows.mine(MicroBatch(places_1T, places_1T, None, places_1T)).tokens_BT[0]
    # tensor parallel ranks hold contiguous pieces of it
    return mine.chunk(world.layout.tp)[world.place.tp]


class WholeRows:
    """Every rank has its rows whole."""

    def mine(self, micro: MicroBatch) -> MicroBatch:
        return micro

    def whole(self, sums: Sequence[LossSums]) -> list[LossSums]:
        return list(sums)


class PlainForwardBackward:
    """One micro-batch after the other; gradients cross ranks with the last one, or with each."""

    def __init__(
        self,
        model: nn.Module,
        rows: Rows,
        *,
        wrapped: nn.Module | None = None,
        reduce_each: bool = False,
        keep_weights: bool = False,
    ) -> None:
        """``wrapped``: the model's DDP wrapper, where it has one. Of FSDP2 between micro-batches: ``reduce_each`` keeps no whole gradients,
        ``keep_weights`` gathers weights once for all of them."""
        self.model, self.rows, self.forward = model, rows, wrapped or model
        self.reduce_each, self.keep_weights = reduce_each, keep_weights

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        sums: list[LossSums] = []
        for index, micro in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with _reducing(self.forward, last=last, each=self.reduce_each, keep=self.keep_weights):
                parts: LossSums = self.forward(*self.rows.mine(micro))
                torch.autograd.backward(parts.objective / num_targets)
            sums.append(parts)
        return self.rows.whole(sums)

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        with torch.no_grad():
            sums = [self.model(*self.rows.mine(micro)) for micro in micro_batches]
        reshard(self.model)
        return self.rows.whole(sums)


class WideForwardBackward:
    """Gradients of weights narrower than fp32, each rank with all of them: added up over micro-batches and ranks in fp32, rounded once.

    DDP would add in the dtype of the weights. Its overlap of reduction and backward is given up.
    """

    def __init__(self, model: nn.Module, rows: Rows, num_ranks: int) -> None:
        self.model, self.rows, self.num_ranks = model, rows, num_ranks

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        with torch.no_grad():
            return self.rows.whole([self.model(*self.rows.mine(micro)) for micro in micro_batches])

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        parameters = list(self.model.parameters())
        sums: list[LossSums] = []
        total: Tensor | None = None
        for micro in micro_batches:
            parts: LossSums = self.model(*self.rows.mine(micro))
            torch.autograd.backward(parts.objective / num_targets)
            sums.append(parts)
            if len(micro_batches) == self.num_ranks == 1:
                return self.rows.whole(sums)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            there = grads[0].new_tensor([float(p.grad is not None) for p in parameters], dtype=torch.float32)
            flat = torch.cat([*(grad.reshape(-1).float() for grad in grads), there])
            total = flat if total is None else total.add_(flat)
            for parameter in parameters:
                parameter.grad = None
        assert total is not None
        if self.num_ranks > 1:
            torch.distributed.all_reduce(total)
        *shares, there = torch.split_with_sizes(total, [*(p.numel() for p in parameters), len(parameters)])
        for parameter, grad, times in zip(parameters, shares, there.tolist(), strict=True):
            # one that nothing used has none, here as anywhere: a zero would still be decayed
            parameter.grad = grad.view_as(parameter).to(parameter.dtype) if times else None
        return self.rows.whole(sums)


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights. After a forward without backward FSDP2 keeps the root's, and would go on using them after a restore."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reducing(forward: nn.Module, *, last: bool, each: bool, keep: bool) -> AbstractContextManager[None]:
    """Hold back the gradient reduction for all but the last micro-batch, or let ``each`` be reduced, over replicas still with the last;
    ``keep`` gathered weights for the next."""
    if isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    if isinstance(forward, FSDPModule):
        forward.set_is_last_backward(last)
        forward.set_requires_gradient_sync(last or each)
        forward.set_requires_all_reduce(last)
        forward.set_reshard_after_backward(last or not keep)
    return nullcontext()


def sum_hook(group: torch.distributed.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's reduction as a plain sum: every loss is already divided by its global count, so an average would be wrong."""
    work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])
