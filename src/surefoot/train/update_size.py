"""How far an update moved: a fixed sample of weights, the same under every layout, read before and after."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surefoot.model.role_scaling import Role
from surefoot.optim.clip import is_counted, local_part
from surefoot.parallel.boxes import box_of

SAMPLE = 4096
"""Weights in the sample, about."""


class WeightSample:
    """Every n-th weight of all tensors but embeddings, laid end to end in the order of the model; n is prime, so that it falls on all columns."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        roles: Mapping[str, Role],
        *,
        first_replica: bool,
        sizes: Sequence[int] = (),
    ) -> None:
        """``roles``, ``sizes`` (elements): of every parameter of the whole model, of which this rank may hold some."""
        self.parameters = [p for name, p in parameters.items() if roles[name] != "embedding"]
        self.first_replica = first_replica
        numel = dict(zip(roles, sizes, strict=True)) if sizes else {name: p.numel() for name, p in parameters.items()}
        sampled = {name: size for name, size in numel.items() if roles[name] != "embedding"}
        self.stride = _prime_from(sum(sampled.values()) // SAMPLE)
        starts, offset = {}, 0
        for name, size in sampled.items():
            starts[name] = -offset % self.stride
            offset += size
        self.starts = [starts[name] for name in parameters if name in starts]
        """First sampled element of every tensor."""
        self.count = -(-offset // self.stride)
        """Weights in the whole sample, all ranks."""
        self._parts: list[tuple[Tensor, Tensor | None]] = []
        self._addresses: list[int] = []

    def read(self) -> Tensor:
        """The values of the sampled weights that this rank counts, fp64, always in the same order."""
        addresses = [local_part(p).data_ptr() for p in self.parameters]
        if addresses != self._addresses:  # FSDP2 moves its shards when it first runs
            self._parts, self._addresses = self._locate(), addresses
        return torch.cat([held if places is None else held[places] for held, places in self._parts]).double()

    def _locate(self) -> list[tuple[Tensor, Tensor | None]]:
        """What this rank holds of every tensor's sample: a strided view, or places where columns are cut; either may be empty."""
        parts: list[tuple[Tensor, Tensor | None]] = []
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            local, box = local_part(parameter).view(-1), box_of(parameter)
            if not is_counted(parameter, first_replica=self.first_replica):
                local = local[:0]
            if len(local) == 0 or box.run == box.numel:
                before = box.first
                first = start - before if before <= start else (start - before) % self.stride
                parts.append((local[first :: self.stride], None))
            else:
                parts.append(
                    (local, box.held(torch.arange(start, parameter.numel(), self.stride, device=local.device)))
                )
        return parts


def _prime_from(number: int) -> int:
    """The smallest prime that is not below ``number``; 1 where that is below 2."""
    if number < 2:
        return 1
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
