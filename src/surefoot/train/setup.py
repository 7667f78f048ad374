"""Everything a step needs that does not change, and the state it starts from."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from surefoot.config.errors import ConfigError
from surefoot.config.run import RunConfig
from surefoot.model.count import flops_per_token
from surefoot.model.parametrization import draw_parameter, fused_rows, residual_writers, roles
from surefoot.model.parts import custom_count
from surefoot.model.role_scaling import Role
from surefoot.model.transformer import Transformer
from surefoot.optim.adaptive_clip import build_clipping
from surefoot.optim.build import build_optimizer
from surefoot.optim.loss_scale import LossScale, ScaledForwardBackward
from surefoot.optim.qk_clip import QKClip, build_qk_clip
from surefoot.parallel.apply import apply_layout, compiles
from surefoot.parallel.forward_backward import ForwardBackward
from surefoot.parallel.mesh import World
from surefoot.parallel.precision import policy_of
from surefoot.train.budget import planned_steps
from surefoot.train.cutting import lengths
from surefoot.train.state import TrainState
from surefoot.train.update_size import WeightSample


@dataclass(frozen=True)
class Setup:
    """One rank's machinery for one run."""

    config: RunConfig
    """With every ``auto`` resolved."""
    world: World
    forward_backward: ForwardBackward
    draw: Callable[[str, torch.Size, torch.dtype], Tensor]
    """(name, shape, dtype) -> the full initial tensor of a parameter."""
    flops_at: Mapping[int, float]
    """Of every row length that the run uses: forward and backward per token, model FLOPs; the causal half of attention."""
    num_steps: int
    """Updates at which the run ends, as worked out before it starts; OPEN_END where its clock decides."""
    peak_flops: float
    """What the device's matrix products reach at best, FLOP/s; 0 where unknown."""
    roles: Mapping[str, Role]
    """Of every parameter of the whole model, in its order."""
    names: tuple[str, ...]
    """The parameters of this rank, in the same order."""
    blocks: Mapping[int, nn.Module]
    """The blocks of this rank, by layer."""
    sample: WeightSample
    """What update sizes are measured on."""
    qk_clip: QKClip | None = None

    @property
    def flops_per_token(self) -> float:
        """At the full length of a row."""
        return self.flops_at[self.config.data.seq_len]

    @cached_property
    def role_names(self) -> tuple[Role, ...]:
        """The roles that the model has, in the order in which they first appear."""
        return tuple(dict.fromkeys(self.roles.values()))

    @cached_property
    def role_numbers(self) -> tuple[int, ...]:
        """Of every parameter of this rank, the place of its role in ``role_names``."""
        return tuple(self.role_names.index(self.roles[name]) for name in self.names)

    @property
    def first_replica(self) -> bool:
        """Whether this rank's plain gradients are the ones that are counted."""
        return self.world.counts_plain


def set_up(config: RunConfig, world: World, *, peak_flops: float = 0.0) -> tuple[Setup, TrainState]:
    """Build the model under its layout, with initial weights drawn from (seed, name), and the optimiser by roles.

    ``config.parallel.precision`` must be resolved. Raises ConfigError when the batch does not divide over the ranks, or
    the attention backend does not run on the device.
    """
    policy = policy_of(config.parallel)
    check_rows(config, world.data_size)
    if config.model.attention_backend == "flex" and world.device.type == "cpu":
        raise ConfigError(["model.attention_backend=flex has no backward on the CPU; take auto, eager or sdpa"])
    set_determinism(config)
    with torch.device("meta"):
        model = Transformer(config.model, policy.compute, policy.weights)
    by_name = roles(model)
    draw = _drawing(config, by_name, residual_writers(model))
    fused, custom = fused_rows(model), {n: custom_count(model, n) for n in lengths(config.data)}
    placed = apply_layout(model, config.parallel, world, draw=draw, fixed_order=config.determinism == "strict")
    parameters = placed.parameters
    optimizer = build_optimizer(parameters, by_name, config.optim, config.model, fused, replicas=world.size)
    clipping = build_clipping(config.optim, parameters)
    qk_clip = build_qk_clip(parameters, config.model, config.optim.qk_clip, compiled=compiles(config.parallel))
    model.maxima = qk_clip.maxima if qk_clip else None
    scale = LossScale.starting(config.parallel.loss_scale) if policy.loss_scaled else LossScale()
    state = TrainState(
        model=placed.model, parameters=parameters, optimizer=optimizer, clipping=clipping, loss_scale=scale
    )
    flops_at = {n: flops_per_token(config.model, n, count) for n, count in custom.items()}
    plain = placed.forward_backward
    setup = Setup(
        config=config,
        world=world,
        forward_backward=ScaledForwardBackward(plain, scale, list(parameters.values()))
        if policy.loss_scaled
        else plain,
        draw=draw,
        flops_at=flops_at,
        num_steps=planned_steps(config, flops_at.__getitem__),
        peak_flops=peak_flops,
        roles=by_name,
        names=tuple(parameters),
        blocks=placed.blocks,
        sample=WeightSample(parameters, by_name, first_replica=world.counts_plain),
        qk_clip=qk_clip,
    )
    return setup, state


def check_rows(config: RunConfig, num_ranks: int) -> None:
    """Raise ConfigError, with the nearest legal sizes, when some stage's batch does not divide over ranks and micro-batches."""
    sizes = {"data.batch_size": config.data.batch_size}
    sizes |= {f"data.batch_stages.{i}.batch_size": s.batch_size for i, s in enumerate(config.data.batch_stages)}
    unit = num_ranks * (config.parallel.micro_batch_size or 1)
    for key, size in sizes.items():
        if size % unit:
            low, high = size // unit * unit, -(-size // unit) * unit
            nearest = f"{low}, {high}" if low else f"{high}"
            raise ConfigError(
                [
                    f"{key}={size} does not divide over {num_ranks} ranks with parallel.micro_batch_size="
                    f"{config.parallel.micro_batch_size}; nearest: {nearest}"
                ]
            )


def set_determinism(config: RunConfig) -> None:
    """Fix, or free, everything in torch that can change bits between two runs."""
    strict = config.determinism == "strict"
    torch.use_deterministic_algorithms(strict)
    # Filling fresh memory would only hide a read of it, at the price of one pass over every buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    # DDP looks for unused parameters only so that its buckets keep their order; that all are used is as it should be.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")


def _drawing(
    config: RunConfig, by_name: dict[str, Role], writers: set[str]
) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
    def draw(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        role, writes = by_name[name], name in writers
        return draw_parameter(name, shape, role, config.model, config.seed, dtype, writes_residual=writes)

    return draw
