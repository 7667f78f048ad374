"""Rules between the settings of optimisers, for every role that they move."""

import dataclasses
import math
from collections.abc import Iterator

from surefoot.config.data import DataConfig
from surefoot.config.optim import MUON_ROLES, Adam, AdamW, Lion, Muon, OptimConfig, RolesConfig, StableAdamW
from surefoot.config.parallel import ParallelConfig
from surefoot.config.ramp import largest_ramp
from surefoot.config.rule import Rule

_INDEPENDENT = 0.1  # a weight would forget where it was within ten steps


def optimizer_rules(optim: OptimConfig, data: DataConfig) -> Iterator[Rule]:
    """What decays too fast, and what has no effect."""
    if isinstance(optim.optimizer, Adam) and optim.decay == "independent":
        text = "optim.decay='independent' has no meaning under optim.optimizer.kind='adam', whose weight_decay is an L2 penalty in the gradient"
        yield Rule(("optim.decay", "optim.optimizer.kind"), f"{text}; take kind='adamw', or leave decay='decoupled'")
    ramp = _ramp(optim, data)
    for field in dataclasses.fields(RolesConfig):
        role = field.name
        at, kind = _optimizer_of(role, optim)
        if not isinstance(kind, Adam):
            yield from (_independent if optim.decay == "independent" else _decoupled)(
                role, at, kind.weight_decay, optim, ramp
            )
        key, eps = f"optim.roles.{role}.eps", getattr(optim.roles, role).eps
        if isinstance(kind, Lion | Muon) and eps != 1.0:
            yield Rule(
                (key, f"{at}.kind"), f"{key}={eps} has no effect: {at}.kind={kind.kind!r} has no epsilon; leave it 1"
            )


def moments(optim: OptimConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    """Narrow moments are computed in fp32."""
    if optim.moments == "bf16" and parallel.precision == "fp64":
        text = "optim.moments='bf16' would lose the digits that parallel.precision='fp64' is for"
        yield Rule(("optim.moments", "parallel.precision"), f"{text}; leave 'fp32': moments are fp64 there")


def _optimizer_of(role: str, optim: OptimConfig) -> tuple[str, AdamW | Adam | StableAdamW | Lion | Muon]:
    """Key and settings of what moves a role."""
    if isinstance(optim.optimizer, Muon) and role not in MUON_ROLES:
        return "optim.optimizer.others", optim.optimizer.others
    return "optim.optimizer", optim.optimizer


Factor = tuple[tuple[str, ...], str, float]
"""Keys that a factor comes from, how it is told, and what it is."""


def _ramp(optim: OptimConfig, data: DataConfig) -> Factor:
    """What the largest batch of the ramp multiplies every rate by."""
    key, factor = largest_ramp(optim, data)
    return (
        (key, "optim.ramp_lr", "data.batch_size") if key else (),
        f"optim.ramp_lr={optim.ramp_lr!r} at {key}, {factor:g},",
        factor,
    )


def _decoupled(role: str, at: str, weight_decay: float, optim: OptimConfig, ramp: Factor) -> Iterator[Rule]:
    mine = getattr(optim.roles, role)
    name = "weight_decay" if at == "optim.optimizer" else f"{at}.weight_decay"
    factors: list[Factor] = [
        (("optim.lr",), f"optim.lr={optim.lr}", optim.lr),
        ramp,
        ((f"optim.roles.{role}.lr",), f"optim.roles.{role}.lr={mine.lr}", mine.lr),
        ((f"{at}.weight_decay",), f"{name}={weight_decay}", weight_decay),
        ((f"optim.roles.{role}.decay",), f"optim.roles.{role}.decay={mine.decay}", mine.decay),
    ]
    share = math.prod(factor for *_, factor in factors)
    if share >= 1:
        # What is 1 is told only of the two that are always there.
        told = [each for each in factors if each[2] != 1.0 or each[0] in (("optim.lr",), (f"{at}.weight_decay",))]
        text = f"{' times '.join(text for _, text, _ in told)} is {share:g}"
        keys = sorted((key for keys, *_ in told for key in keys), key=lambda key: not key.endswith("weight_decay"))
        yield Rule(tuple(keys), f"{text}: one step would turn the weights over; it must be below 1")


def _independent(role: str, at: str, weight_decay: float, optim: OptimConfig, ramp: Factor) -> Iterator[Rule]:
    key, of_role = f"{at}.weight_decay", f"optim.roles.{role}.decay"
    factor = getattr(optim.roles, role).decay
    if weight_decay * factor * ramp[2] >= _INDEPENDENT:
        more: list[Factor] = [((of_role,), f"{of_role}={factor}", factor), ramp]
        told = [each for each in more if each[2] != 1.0]
        shown = " times ".join([f"{key}={weight_decay}", *(text for _, text, _ in told)])
        text = f"{shown} with optim.decay='independent' is the share of a weight that every step at the peak rate takes off, whatever optim.lr"
        keys = (key, *(name for names, *_ in told for name in names), "optim.decay")
        yield Rule(keys, f"{text}; it must be below {_INDEPENDENT}, and 1e-4 is usual")
