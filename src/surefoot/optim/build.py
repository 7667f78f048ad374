"""The optimiser of a config: every parameter's setting from its role, and the rules that share the parameters out."""

from collections.abc import Mapping

import torch
from torch import nn

from surefoot.config.model import ModelConfig
from surefoot.config.optim import MUON_ROLES, Adam, AdamW, Lion, Muon, OptimConfig, StableAdamW
from surefoot.model.role_scaling import Family, Role, in_branch, scaling
from surefoot.optim.adam import FusedAdam
from surefoot.optim.lion import LionRule
from surefoot.optim.muon import MuonRule
from surefoot.optim.narrow_adam import NarrowAdam
from surefoot.optim.optimizer import Optimizer, Rule, Setting
from surefoot.optim.stable_adamw import StableAdamWRule


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    roles: Mapping[str, Role],
    config: OptimConfig,
    model: ModelConfig,
    fused: Mapping[str, tuple[int, ...]] | None = None,
    *,
    replicas: int = 1,
) -> Optimizer:
    """Rules over parameters by name, their rates, decays and epsilons by the table of roles for this model's width and depth.

    ``fused``: rows of each matrix of the parameters that stack several along dim 0. ``replicas``: ranks that hold plain parameters alike
    and step together; a rule may share its work out among them. Raises ValueError when a parameter has no role.
    """
    missing = sorted(set(parameters) - set(roles))
    if missing:
        raise ValueError(
            f"no role for parameter {missing[0]!r}: declare it in the part's roles(), or it would not train as it should"
        )
    rows = fused or {}
    settings = {name: setting_of(name, roles[name], config, model, rows.get(name, ())) for name in parameters}
    shares = _shares(parameters, roles, config)
    return Optimizer(parameters, settings, [_rule(kind, mine, settings, config, replicas) for kind, mine in shares])


def setting_of(name: str, role: Role, config: OptimConfig, model: ModelConfig, rows: tuple[int, ...] = ()) -> Setting:
    """How a parameter of this name and role moves: the optimiser's numbers, times the role's, times the parametrization's.

    Independent decay takes ``weight_decay`` times rate over peak rate off the weight, at every width alike (arXiv:2309.14322 section
    3.2.2); as a share of the parameter's own rate that is weight_decay / (lr of the parameter).
    """
    kind = optimizer_of(role, config)
    family: Family = "muon" if isinstance(kind, Muon) else "adam"
    mine, scaled = getattr(config.roles, role), scaling(role, family, model, branch=in_branch(name))
    lr = mine.lr * scaled.lr
    decay = kind.weight_decay * mine.decay
    if config.decay == "independent":
        decay /= config.lr * lr
    else:
        # Adam's is a part of the gradient, whose size epsilon follows
        decay *= scaled.decay * (scaled.eps if isinstance(kind, Adam) else 1.0)
    eps = 0.0 if isinstance(kind, Lion | Muon) else kind.eps * mine.eps * scaled.eps
    return Setting(role=role, lr=lr, weight_decay=decay, eps=eps, rows=rows)


def optimizer_of(role: Role, config: OptimConfig) -> AdamW | Adam | StableAdamW | Lion | Muon:
    """The optimiser that moves parameters of this role."""
    if isinstance(config.optimizer, Muon) and role not in MUON_ROLES:
        return config.optimizer.others
    return config.optimizer


def _shares(
    parameters: Mapping[str, nn.Parameter], roles: Mapping[str, Role], config: OptimConfig
) -> list[tuple[AdamW | Adam | StableAdamW | Lion | Muon, dict[str, nn.Parameter]]]:
    """Which optimiser moves which parameters."""
    shares: dict[AdamW | Adam | StableAdamW | Lion | Muon, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        shares.setdefault(optimizer_of(roles[name], config), {})[name] = parameter
    return list(shares.items())


def _rule(
    kind: AdamW | Adam | StableAdamW | Lion | Muon,
    parameters: Mapping[str, nn.Parameter],
    settings: Mapping[str, Setting],
    config: OptimConfig,
    replicas: int,
) -> Rule:
    narrow_moments = config.moments == "bf16"
    match kind:
        case AdamW() | Adam():
            if narrow_moments or any(parameter.dtype == torch.bfloat16 for parameter in parameters.values()):
                return NarrowAdam(parameters, settings, kind, narrow_moments=narrow_moments)
            return FusedAdam(parameters, settings, kind)
        case StableAdamW():
            return StableAdamWRule(parameters, settings, kind, narrow_moments=narrow_moments)
        case Lion():
            return LionRule(parameters, settings, kind, narrow_moments=narrow_moments)
        case Muon():
            return MuonRule(parameters, settings, kind, narrow_moments=narrow_moments, replicas=replicas)
