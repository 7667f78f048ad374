"""What kind of thing each parameter is, and all that follows from it: one table."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from surefoot.config.model import ModelConfig
from surefoot.model.role_scaling import Role, in_branch, init_depth, scaling


class RoleError(Exception):
    """A parameter whose role is undeclared, unknown, declared twice, or declared for a parameter that is not there."""


@dataclass(frozen=True)
class RoleRule:
    """How a role starts."""

    init: Literal["normal", "ones", "zeros"]
    """normal has the std of ``model.init``, and what the parametrization makes of it."""
    source: str
    """Where the rule comes from."""


ROLES: dict[Role, RoleRule] = {
    "embedding": RoleRule("normal", "GPT-2: N(0, 0.02)"),
    "hidden": RoleRule("normal", "GPT-2: N(0, 0.02)"),
    "output": RoleRule("normal", "GPT-2: an untied output projection starts as a matrix like another"),
    "norm": RoleRule("ones", "arXiv:1910.07467 section 3"),
    "bias": RoleRule("zeros", "GPT-2"),
    "router": RoleRule("normal", "DeepSeek-V3 as a hidden matrix; arXiv:2101.03961 section 2.4 starts it smaller"),
    "expert": RoleRule("normal", "arXiv:2412.19437 section 4.2: all matrices alike, experts as hidden"),
    "latent": RoleRule("normal", "arXiv:2405.04434 section 3.1.2: compressions of MLA as hidden matrices"),
}


def roles(model: nn.Module) -> dict[str, Role]:
    """Role of every parameter, by name, in the order of ``model.named_parameters()``.

    Asks every module that has a ``roles()`` of its own. Raises RoleError with the parameter's name.
    """
    declared: dict[str, Role] = {}
    for prefix, part in _declaring(model, "roles"):
        for name, role in part.roles().items():
            full = prefix + name
            if role not in get_args(Role):
                raise RoleError(f"{full} has role {role!r}; roles are {', '.join(get_args(Role))}")
            if full in declared:
                raise RoleError(f"{full} is declared twice: as {declared[full]} and as {role} by {type(part).__name__}")
            declared[full] = role
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        if name not in declared:
            raise RoleError(
                f"{name} has no role; name one of {', '.join(get_args(Role))} in the roles() of the part that owns it"
            )
    for name in declared.keys() - set(names):
        raise RoleError(
            f"{name} has role {declared[name]!r} but the model has no such parameter; remove it from roles()"
        )
    return {name: declared[name] for name in names}


def residual_writers(model: nn.Module) -> set[str]:
    """Names of the matrices whose product is added to the residual stream."""
    return {prefix + name for prefix, part in _declaring(model, "writes_residual") for name in part.writes_residual()}


def fused_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Rows of each matrix of the parameters that stack several along dim 0 (a fused projection), by name: a part says so in ``fused_rows()``.

    Raises RoleError when they are not the rows of the parameter.
    """
    by_name = dict(model.named_parameters())
    stacked = {}
    for prefix, part in _declaring(model, "fused_rows"):
        for name, rows in part.fused_rows().items():
            full = prefix + name
            if full not in by_name or sum(rows) != by_name[full].shape[0]:
                shape = tuple(by_name[full].shape) if full in by_name else "no such parameter"
                raise RoleError(f"{full} is said to stack matrices of {rows} rows, but it has shape {shape}")
            stacked[full] = tuple(rows)
    return stacked


def initialise(model: nn.Module, cfg: ModelConfig, seed: int) -> None:
    """Draws every parameter of a model of plain tensors, in place, each from (seed, name): the order does not matter."""
    writers = residual_writers(model)
    by_name = dict(model.named_parameters())
    with torch.no_grad():
        for name, role in roles(model).items():
            into = by_name[name]
            into.copy_(draw_parameter(name, into.shape, role, cfg, seed, into.dtype, writes_residual=name in writers))


def draw_parameter(
    name: str,
    shape: tuple[int, ...],
    role: Role,
    cfg: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    *,
    writes_residual: bool = False,
) -> Tensor:
    """The full starting tensor on the CPU, a pure function of its arguments; a shard is a slice of it.

    Normal roles are drawn in fp32 and then cast, so that fp64 and fp32 models start from the same numbers.
    """
    match ROLES[role].init:
        case "ones":
            return torch.ones(shape, dtype=dtype)
        case "zeros":
            return torch.zeros(shape, dtype=dtype)
    std = cfg.init.std * scaling(role, "adam", cfg, branch=in_branch(name)).init
    if writes_residual and cfg.init.depth_scaled:
        std /= math.sqrt(2 * init_depth(cfg))
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
    return _truncated_normal(shape, cfg.init.truncate, generator).mul_(std).to(dtype)


def _truncated_normal(shape: tuple[int, ...], truncate: float, generator: torch.Generator) -> Tensor:
    """Standard normal draws; those beyond ``truncate`` are drawn again until none is left (0: kept as they are)."""
    draws = torch.randn(math.prod(shape), generator=generator)
    while truncate > 0:
        beyond = (draws.abs() > truncate).nonzero()[:, 0]
        if not len(beyond):
            break
        draws[beyond] = torch.randn(len(beyond), generator=generator)
    return draws.view(shape)


def _declaring(model: nn.Module, method: str) -> Iterator[tuple[str, Any]]:
    """Modules whose own class has ``method``, with their name as a prefix; wrappers that only forward attributes are passed over."""
    for name, module in model.named_modules():
        if callable(getattr(type(module), method, None)):
            yield (f"{name}." if name else ""), module
