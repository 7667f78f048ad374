"""Everything a step needs that does not change, and the state it starts from."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from surefoot.config.errors import ConfigError
from surefoot.config.layout_search import check_layout
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
from surefoot.parallel.forward_backward import ForwardBackward, Rows
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
    sizes: tuple[int, ...]
    """Elements of every parameter of the whole model."""
    blocks: Mapping[int, nn.Module]
    """The blocks of this rank, by layer."""
    rows: Rows
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

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Of every parameter of this rank, its place in the whole model."""
        all_names = list(self.roles)
        return tuple(all_names.index(name) for name in self.names)

    def over_the_model(self, figures: Tensor, fill: float = 0.0) -> Tensor:
        """Figures of this rank's parameters, in the last dim, among those of the whole model's; ``fill`` where another stage has it."""
        whole = figures.new_full((*figures.shape[:-1], len(self.roles)), fill)
        whole[..., list(self.places)] = figures
        return whole

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
    check_layout(config, world.size)
    if config.model.attention_backend == "flex" and world.device.type == "cpu":
        raise ConfigError(["model.attention_backend=flex has no backward on the CPU; take auto, eager or sdpa"])
    set_determinism(config)
    with torch.device("meta"):
        model = Transformer(config.model, policy.compute, policy.weights)
    by_name = roles(model)
    draw = _drawing(config, by_name, residual_writers(model))
    sizes = tuple(parameter.numel() for parameter in model.parameters())
    fused, custom = fused_rows(model), {n: custom_count(model, n) for n in lengths(config.data)}
    placed = apply_layout(model, config.parallel, world, draw=draw, fixed_order=config.determinism == "strict")
    parameters = placed.parameters
    optimizer = build_optimizer(parameters, by_name, config.optim, config.model, fused, replicas=world.size)
    clipping = build_clipping(config.optim, parameters, tuple(by_name), device=world.device)
    qk_clip = build_qk_clip(
        parameters,
        config.model,
        config.optim.qk_clip,
        compiled=compiles(config.parallel),
        layout=world.layout,
        tp_rank=world.place.tp,
    )
    for part in placed.model.modules():
        if isinstance(part, Transformer):
            part.maxima = qk_clip.maxima if qk_clip else None
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
        sizes=sizes,
        blocks=placed.blocks,
        rows=placed.rows,
        sample=WeightSample(parameters, by_name, first_replica=world.counts_plain, sizes=sizes),
        qk_clip=qk_clip,
    )
    return setup, state


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
