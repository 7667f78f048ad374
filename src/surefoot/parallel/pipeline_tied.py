"""A tied embedding that the first and the last stage both need: one parameter, and a copy that follows it."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.config.parallel import ParallelConfig
from surefoot.parallel.mesh import World
from surefoot.parallel.pipeline_stages import Stages, rank_of_stage


class TiedCopy:
    """What goes to and fro between the embedding's shards and those of the last stage's copy, pair by pair of ranks.

    The copy's value comes from the embedding before every pass and its gradient goes there after it, so that it has nothing of its own that
    could drift: no moments, no place in a checkpoint.
    """

    def __init__(self, stages: Stages, config: ParallelConfig, world: World) -> None:
        assert world.tokens is not None
        first, last = stages.first, stages.last
        self.weight = None if first is None or first.embedding is None else first.embedding.weight
        self.copy = None if last is None or last.head is None else last.head.weight
        self.mesh, self.device = world.tokens["pp"], world.device
        ranks = self.mesh.mesh.tolist()
        self.source = ranks[0]
        self.target = ranks[rank_of_stage(stages.num_stages - 1, config)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the copy the embedding's value. Collective over the two ranks."""
        if self.weight is not None and self.copy is not None:
            _local(self.copy).copy_(_local(self.weight))
        elif self.weight is not None:
            dist.send(self._here(_local(self.weight)), self.target, group=self.mesh.get_group())
        elif self.copy is not None:
            _local(self.copy).copy_(self._received(_local(self.copy), self.source))

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the copy's gradient to the embedding's and drop it. Collective over the two ranks."""
        if self.copy is not None:
            grad = self.copy.grad
            mine = torch.zeros_like(_local(self.copy)) if grad is None else _local(grad)
            self.copy.grad = None
            if self.weight is not None:
                _add(self.weight, mine)
            else:
                dist.send(self._here(mine), self.source, group=self.mesh.get_group())
        elif self.weight is not None:
            _add(self.weight, self._received(_local(self.weight), self.target))

    def _here(self, shard: Tensor) -> Tensor:
        """Where ranks meet: under offload shards lie in the host's memory."""
        return shard.to(self.device).contiguous()

    def _received(self, like: Tensor, peer: int) -> Tensor:
        theirs = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.recv(theirs, peer, group=self.mesh.get_group())
        return theirs.to(like.device)


def _add(weight: Tensor, grad: Tensor) -> None:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    _local(weight.grad).add_(grad)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
