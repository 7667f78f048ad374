"""The global gradient norm, exact under every layout, and the scale that clipping folds into the update."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def squared_norm_share(parameters: Iterable[Tensor], *, first_replica: bool) -> tuple[Tensor, Tensor]:
    """This rank's share of the squared global gradient norm, an fp64 scalar whose sum over ranks is the whole; and 1 where any
    gradient it holds, counted or not, is not finite (else 0): replicas may break apart, and each must say so.

    Per-tensor norms are taken in the gradient's own precision (fp32 or fp64) and summed in fp64. An element that several ranks
    hold is counted on one of them only: a plain gradient where ``first_replica`` is set, a DTensor where its coordinate is 0 on
    every axis that replicates it. Parameters without a gradient add nothing.
    """
    held: list[Tensor] = []
    counts: list[float] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            held.append(grad.to_local())
            counts.append(float(_is_first_replica(grad)))
        else:
            held.append(grad)
            counts.append(float(first_replica))
    if not held:
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    squares = torch.stack(list(torch._foreach_norm(held))).double().square()
    finite = torch.isfinite(squares)
    counted = torch.tensor(counts, dtype=torch.float64, device=squares.device) > 0
    return torch.where(counted, squares, 0.0).sum(), (~finite).any().double()


def clip_scale(norm: Tensor, clip_norm: float) -> Tensor:
    """What gradients are divided by so that their norm is at most ``clip_norm``: max(1, norm / clip_norm), 1 when clipping is off (0)."""
    if clip_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(norm / clip_norm, min=1.0)


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )
