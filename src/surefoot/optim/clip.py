"""The global gradient norm, exact under every layout, by role too; what is not finite in it; and the scale that clipping folds into the update."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


class NormShare(NamedTuple):
    """One rank's part of the squared gradient norm: fp64, summed over ranks it is the whole."""

    total: Tensor
    broken: Tensor
    """1 where any gradient that the rank holds, counted or not, is not finite (else 0): replicas may break apart, and each must say so."""
    by_group: Tensor
    """Of each group of parameters, (groups,)."""


def squared_norm_share(
    parameters: Iterable[Tensor], *, first_replica: bool, groups: Sequence[int] = (), num_groups: int = 0
) -> NormShare:
    """This rank's share of the squared global gradient norm; ``groups`` holds the number of every parameter's group.

    Per-tensor norms are taken in fp32 (fp64 for fp64 gradients) and summed in fp64. An element that several ranks
    hold is counted on one of them only: a plain gradient where ``first_replica`` is set, a DTensor where its coordinate is 0 on
    every axis that replicates it. Parameters without a gradient add nothing.
    """
    held: list[Tensor] = []
    counts: list[bool] = []
    members: list[int] = []
    for number, parameter in enumerate(parameters):
        grad = parameter.grad
        if grad is None:
            continue
        held.append(local_part(grad))
        counts.append(is_counted(grad, first_replica=first_replica))
        members.append(groups[number] if groups else 0)
    if not held:
        nothing = torch.zeros((), dtype=torch.float64)
        return NormShare(nothing, nothing, torch.zeros(num_groups, dtype=torch.float64))
    wide = torch.promote_types(held[0].dtype, torch.float32)
    squares = torch.stack(list(torch._foreach_norm(held, dtype=wide))).double().square()
    finite = torch.isfinite(squares)
    counted = torch.where(torch.tensor(counts, device=squares.device), squares, 0.0)
    # chosen, not multiplied by 0 or 1: a NaN stays in its own group
    mine_GP = torch.tensor(members, device=squares.device) == torch.arange(num_groups, device=squares.device)[:, None]
    return NormShare(counted.sum(), (~finite).any().double(), torch.where(mine_GP, counted, 0.0).sum(1))


def nonfinite_counts(parameters: Iterable[Tensor], *, first_replica: bool) -> tuple[Tensor, Tensor]:
    """Elements of every parameter's gradient that are not finite, fp64 (parameters,): those this rank counts, and all that it holds.

    The whole of a parameter is the larger of the sum over ranks of the first and the maximum over ranks of the second: a replica may be
    broken on a rank that counts nothing.
    """
    held: list[Tensor] = []
    counts: list[bool] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            held.append(torch.zeros((), dtype=torch.int64, device=local_part(parameter).device))
            counts.append(False)
            continue
        held.append((~torch.isfinite(local_part(grad))).sum())
        counts.append(is_counted(grad, first_replica=first_replica))
    numbers = torch.stack(held).double()
    return torch.where(torch.tensor(counts, device=numbers.device), numbers, 0.0), numbers


def clip_scale(norm: Tensor, clip_norm: float) -> Tensor:
    """What gradients are divided by so that their norm is at most ``clip_norm``: max(1, norm / clip_norm), 1 when clipping is off (0, infinite)."""
    if not 0 < clip_norm < math.inf:
        return torch.ones_like(norm)
    return torch.clamp(norm / clip_norm, min=1.0)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without a copy and without a gradient."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def is_counted(tensor: Tensor, *, first_replica: bool) -> bool:
    """Whether this rank is the one that counts the elements it holds."""
    return _is_first_replica(tensor) if isinstance(tensor, DTensor) else first_replica


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )
