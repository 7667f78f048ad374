"""Clipping that bends to the run's own gradient norms, below the hard cap of ``optim.clip_norm``.

What it remembers are tensors that rewind with the weights. They start at zero, change only with applied updates (decided on the
device), and are the same on every rank, since the norms are.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.config.optim import AdaGC, GlobalNorm, OptimConfig, ZClip
from surefoot.optim.clip import clip_scale, is_counted, local_part

Z_EPS = 1e-6
"""Added to the standard deviation under z, as the authors' program does."""


class Clipping(Protocol):
    """How the gradient of one update is scaled down."""

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers, by name: the live tensors."""

    def shares(self, *, first_replica: bool) -> Tensor:
        """This rank's shares of the numbers that ``divisor`` needs besides the global norm, fp64 (numbers,): it is given their sum over ranks."""

    def divisor(self, norm: Tensor, summed: Tensor, clip_norm: float, skip: Tensor) -> Tensor:
        """What the update divides all gradients by, at least 1; gradients that are scaled one by one are so already, in place.

        ``norm``: global norm of the gradient, fp64 scalar. ``clip_norm``: largest norm the update may see; 0 is off. ``skip``
        (scalar bool): the update is refused, so nothing is remembered and no gradient is touched; the divisor then means nothing.
        """


def build_clipping(
    config: OptimConfig,
    parameters: Mapping[str, nn.Parameter],
    names: Sequence[str] = (),
    *,
    device: torch.device | None = None,
) -> Clipping:
    """The clipping of the config for these parameters, having seen nothing yet. ``names``: of the whole model, where they are a part of it.
    ``device``: where norms are reduced; None is where the parameters lie, which in the host's memory it is not."""
    device = device or next(iter(parameters.values())).device
    match config.clipping:
        case GlobalNorm():
            return _Global()
        case ZClip():
            return _ZScore(config.clipping, device)
        case AdaGC():
            return _PerTensor(config.clipping, parameters, names or tuple(parameters), device)


class _Global:
    """The hard cap alone."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def shares(self, *, first_replica: bool) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def divisor(self, norm: Tensor, summed: Tensor, clip_norm: float, skip: Tensor) -> Tensor:
        return clip_scale(norm, clip_norm)


class _ZScore:
    """ZClip, reciprocal mode: a norm g with z = (g - mean) / (sigma + eps) above the threshold k is clipped to

        mean + k^2 sigma / z    (arXiv:2504.02507 eq. 8)

    and enters the mean, then the variance around the new mean, as clipped by that, the hard cap left out (as in the authors' program).
    """

    def __init__(self, config: ZClip, device: torch.device) -> None:
        self._config = config
        self._steps, self._mean, self._variance = (
            torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"clip/steps": self._steps, "clip/mean": self._mean, "clip/variance": self._variance}

    def shares(self, *, first_replica: bool) -> Tensor:
        return torch.zeros(0, dtype=torch.float64)

    def divisor(self, norm: Tensor, summed: Tensor, clip_norm: float, skip: Tensor) -> Tensor:
        alpha, threshold = self._config.alpha, self._config.z_threshold
        starting = self._steps < self._config.warmup_steps
        sigma = self._variance.sqrt()
        z = (norm - self._mean) / (sigma + Z_EPS)
        stands_out = ~starting & (z > threshold) & (self._mean > 0)
        held = torch.where(stands_out, self._mean + threshold**2 * sigma / z, norm)
        # Of the first norms the plain mean and variance, both brought up to date one by one; then the running ones.
        past = torch.where(starting, self._steps / (self._steps + 1.0), alpha)
        mean = past * self._mean + (1.0 - past) * held
        around = torch.where(starting, held - self._mean, held - mean)
        variance = past * self._variance + (1.0 - past) * (held - mean) * around
        self._steps.add_((~skip).double())
        self._mean.copy_(torch.where(skip, self._mean, mean))
        self._variance.copy_(torch.where(skip, self._variance, variance))
        return torch.where(stands_out, norm / held, 1.0) * clip_scale(held, clip_norm)


class _PerTensor:
    """AdaGC: tensor i with gradient norm g_i and running norm m_i is scaled by h_i = min(1, ratio m_i / g_i), and then

        m_i <- beta m_i + (1 - beta) c_i    (arXiv:2502.11034 algorithm 1)

    with c_i the norm that the update sees. During the warm-up h_i = 1 and m_i <- min(m_i, c_i). We differ in two things: what is left
    is still held to ``clip_norm`` after the warm-up; and a gradient of zero (an expert that got no token) says nothing about the next,
    so it changes no running norm, where the published minimum would clip that tensor to zero for good.
    """

    def __init__(
        self, config: AdaGC, parameters: Mapping[str, nn.Parameter], names: Sequence[str], device: torch.device
    ) -> None:
        """``names``: of the whole model; what is remembered of them is the same on every rank."""
        self._config, self._names = config, tuple(names)
        self._parameters = {self._names.index(name): parameter for name, parameter in parameters.items()}
        self._steps = torch.zeros((), dtype=torch.float64, device=device)
        self._norms = [torch.zeros((), dtype=torch.float64, device=device) for _ in self._names]

    def tensors(self) -> dict[str, Tensor]:
        norms = zip(self._names, self._norms, strict=True)
        return {"clip/steps": self._steps} | {f"clip/norm/{name}": norm for name, norm in norms}

    def shares(self, *, first_replica: bool) -> Tensor:
        held = {at: p.grad for at, p in self._parameters.items() if p.grad is not None}
        shares = list(torch.zeros(len(self._norms), dtype=torch.float64, device=self._steps.device).unbind())
        local = [local_part(grad) for grad in held.values()]
        wide = torch.promote_types(local[0].dtype, torch.float32) if local else None
        for (at, grad), norm in zip(held.items(), torch._foreach_norm(local, dtype=wide), strict=True):
            if is_counted(grad, first_replica=first_replica):
                shares[at] = norm.double().square().to(self._steps.device)
        return torch.stack(shares)

    def divisor(self, norm: Tensor, summed: Tensor, clip_norm: float, skip: Tensor) -> Tensor:
        ratio, beta = self._config.ratio, self._config.beta
        norms, running = summed.sqrt(), torch.stack(self._norms)
        starting, unseen = self._steps < self._config.warmup_steps, running == 0
        limit = ratio * running
        factors = torch.where(starting | unseen | (norms <= limit), 1.0, limit / norms)
        factors = torch.where(skip, 1.0, factors)
        divisor = clip_scale(torch.linalg.vector_norm(factors * norms), clip_norm)
        by_name = factors.to(local_part(next(iter(self._parameters.values()))).device).unbind()
        for at, parameter in self._parameters.items():
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(by_name[at])
        seen = factors * norms / divisor
        after = torch.where(starting, torch.minimum(running, seen), beta * running + (1.0 - beta) * seen)
        after = torch.where(unseen, seen, after)
        after = torch.where(skip | (seen == 0), running, after)
        self._steps.add_((~skip).double())
        torch._foreach_copy_(self._norms, list(after.unbind()))
        return divisor
