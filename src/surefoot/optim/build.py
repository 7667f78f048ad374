"""An optimiser whose groups follow the roles of parameters, found again by name and never by position."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from surefoot.config.optim import OptimConfig
from surefoot.model.parametrization import ROLES, Role


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], roles: Mapping[str, Role], config: OptimConfig
) -> torch.optim.AdamW:
    """Fused AdamW over parameters by name, one group that decays and one that does not, by the table of roles.

    Moments are created at once, in the dtype of the parameters, so that they exist (as zeros) before the first step and after a skipped one.
    Raises ValueError when a parameter has no role.
    """
    settings = config.optimizer
    missing = sorted(set(parameters) - set(roles))
    if missing:
        raise ValueError(
            f"no role for parameter {missing[0]!r}: declare it in the part's roles(), or it would not train as it should"
        )
    decayed = [p for name, p in parameters.items() if ROLES[roles[name]].decays]
    kept = [p for name, p in parameters.items() if not ROLES[roles[name]].decays]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def moments_by_name(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``exp_avg/<name>`` and ``exp_avg_sq/<name>`` of every parameter: the live tensors, not copies."""
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key in ("exp_avg", "exp_avg_sq"):
            moments[f"{key}/{name}"] = optimizer.state[parameter][key]
    return moments


def set_step_count(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the applied updates that bias correction counts, for every parameter."""
    for state in optimizer.state.values():
        state["step"].fill_(step)


def apply_update(optimizer: torch.optim.Optimizer, *, lr: float, scale: Tensor, skip: Tensor, gated: bool) -> None:
    """One optimiser step with clipping folded in, or none at all.

    ``scale`` (scalar): gradients are divided by it. ``skip`` (scalar bool): leave weights, moments and step counts untouched to the bit.
    Gated, the fused kernel reads both on the device; otherwise the host reads ``skip`` and does not call ``step()``. Same bits either way:
    an update is never multiplied by zero, since 0 x NaN is NaN.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if not gated and bool(skip):
        return
    fp64 = optimizer.param_groups[0]["params"][0].dtype == torch.float64
    if fp64:  # the fused kernel takes its scale in fp32, which would cost fp64 its last digits
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(grads, scale.to(torch.float64))
    else:
        optimizer.grad_scale = scale.to(torch.float32)  # type: ignore[attr-defined]
    if gated:
        optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        optimizer.__dict__.pop("grad_scale", None)
        optimizer.__dict__.pop("found_inf", None)
