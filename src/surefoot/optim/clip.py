"""The global gradient norm, exact under every layout, and the scale that clipping folds into the update."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def squared_norm_share(parameters: Iterable[Tensor], *, first_replica: bool) -> Tensor:
    """This rank's share of the squared global gradient norm, an fp64 scalar; the sum over ranks is the whole.

    Per-tensor norms are taken in the gradient's own precision (fp32 or fp64) and summed in fp64. An element that several ranks
    hold is counted on one of them only: a plain gradient where ``first_replica`` is set, a DTensor where its coordinate is 0 on
    every axis that replicates it. Parameters without a gradient add nothing.
    """
    counted: list[Tensor] = []
    device: torch.device | None = None
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        device = grad.device
        if isinstance(grad, DTensor):
            if _is_first_replica(grad):
                counted.append(grad.to_local())
        elif first_replica:
            counted.append(grad)
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(list(torch._foreach_norm(counted)))
    return norms.double().square().sum()


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
