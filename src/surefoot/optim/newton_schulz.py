"""Orthogonalisation by matrix products alone: singular values go to about 1, singular vectors stay."""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: steepest at 0 among the quintics that then keep singular values between 0.7 and 1.2 (Jordan et al. 2024)."""
FLOOR = 1e-7
"""Smallest norm that is divided by, as published: a matrix that has faded away does not move weights."""
_BATCH = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements that are worked on in one batched product: on a CPU it pays up to 64 x 64 (a third faster in fp32, four times in bf16)
and beyond 128 x 352 no more."""


def orthogonalise(matrices: Sequence[Tensor], steps: int, dtype: torch.dtype) -> list[Tensor]:
    """U V^T of every matrix U S V^T, about: ``steps`` iterations of the quintic Newton-Schulz polynomial, computed and returned in ``dtype``.

    Each is first divided by its Frobenius norm, in fp32 at least. Matrices of one shape go through batched products, and none of them
    depends on its company.
    """
    if not matrices:
        return []
    norms = torch._foreach_clamp_min(torch._foreach_norm(list(matrices)), FLOOR)
    unit = torch._foreach_div(list(matrices), list(norms))
    done: dict[int, Tensor] = {}
    for places in _batches(matrices):
        # The products are then of the shorter side.
        tall = unit[places[0]].shape[0] > unit[places[0]].shape[1]
        x_BMN = torch.stack([unit[at].mT if tall else unit[at] for at in places]).to(dtype)
        x_BMN = _iterate(x_BMN, steps)
        done |= dict(zip(places, (x_BMN.mT if tall else x_BMN).unbind(), strict=True))
    return [done[at] for at in range(len(matrices))]


def product_cost(rows: int, columns: int) -> float:
    """Multiplications of one iteration."""
    short, long = sorted((rows, columns))
    return float(short * short * (2 * long + short))


def _iterate(x_BMN: Tensor, steps: int) -> Tensor:
    """x <- a x + (b x x^T + c (x x^T)^2) x."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram_BMM = x_BMN @ x_BMN.mT
        x_BMN = torch.baddbmm(x_BMN, torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c), x_BMN, beta=a)
    return x_BMN


def _batches(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Places of the matrices that are worked on together: of one shape, and not too many."""
    shapes: dict[torch.Size, list[int]] = {}
    for at, matrix in enumerate(matrices):
        shapes.setdefault(matrix.shape, []).append(at)
    batches = []
    for shape, places in shapes.items():
        limit = _BATCH.get(matrices[places[0]].device.type, _BATCH["cpu"])
        length = max(1, limit // max(1, shape.numel()))
        batches += [places[start : start + length] for start in range(0, len(places), length)]
    return batches
