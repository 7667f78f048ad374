"""How far an update moved: a fixed sample of weights, the same under every layout, read before and after."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.model.role_scaling import Role
from surefoot.optim.clip import is_counted, local_part
from surefoot.parallel.shard import elements_before

SAMPLE = 4096
"""Weights in the sample, about."""


class WeightSample:
    """Every n-th weight of all tensors but embeddings, laid end to end in the order of the model; n is prime, so that it falls on all columns."""

    def __init__(self, parameters: Mapping[str, Tensor], roles: Mapping[str, Role], *, first_replica: bool) -> None:
        self.parameters = [p for name, p in parameters.items() if roles[name] != "embedding"]
        self.first_replica = first_replica
        self.stride = _prime_from(sum(p.numel() for p in self.parameters) // SAMPLE)
        starts, offset = [], 0
        for parameter in self.parameters:
            starts.append(-offset % self.stride)
            offset += parameter.numel()
        self.starts = starts
        """First sampled element of every tensor."""
        self.count = -(-offset // self.stride)
        """Weights in the whole sample, all ranks."""
        self._views: list[Tensor] = []
        self._addresses: list[int] = []

    def read(self) -> Tensor:
        """The values of the sampled weights that this rank counts, fp64, always in the same order."""
        addresses = [local_part(p).data_ptr() for p in self.parameters]
        if addresses != self._addresses:  # FSDP2 moves its shards when it first runs
            self._views, self._addresses = self._locate(), addresses
        return torch.cat(self._views).double()

    def _locate(self) -> list[Tensor]:
        """Strided views into what this rank holds; one tensor of the sample may have none."""
        views = []
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            local = local_part(parameter)
            if not is_counted(parameter, first_replica=self.first_replica):
                local = local.view(-1)[:0]
            before = elements_before(parameter)
            first = start - before if before <= start else (start - before) % self.stride
            views.append(local.view(-1)[first :: self.stride])
        return views


def _prime_from(number: int) -> int:
    """The smallest prime that is not below ``number``; 1 where that is below 2."""
    if number < 2:
        return 1
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
