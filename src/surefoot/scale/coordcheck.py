"""Do activations stay of one size as a model grows? The coordinate check (arXiv:2203.03466 appendix D.1), with its verdict."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.config.errors import ConfigError, unknown_choice
from surefoot.config.model import CompleteP, GroupedQueryAttention, ModelConfig, MuP, Standard
from surefoot.config.optim import Constant
from surefoot.config.run import BySteps, RunConfig
from surefoot.parallel.mesh import World
from surefoot.recipes.resize import nearest_of_width, with_depth, with_width
from surefoot.scale.coord_data import QUANTITIES, Coordinates, coordinates
from surefoot.scale.line_fit import Slope, fit_slope

Axis = Literal["width", "depth"]
Verdict = Literal["flat", "not_flat", "inconclusive"]
WIDTHS, DEPTHS, STEPS, SEEDS = (64, 128, 256, 512), (2, 4, 8, 16), 5, 5
FLAT, GROWS = 0.1, 0.3
"""Below the one in size a slope is flat; the control must have one beyond the other, or the check could not have told."""
ROWS, TOKENS = 2, 16
"""Of the batch. Few tokens: where there are more of them than columns, the chance part of an update, which is n^-1/2 smaller, hides the
aligned one."""
MOST_IDS, MOST_BLOCKS = 512, 4
"""Ids and, along width, blocks of the models: neither is what is looked at."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One coordinate check."""

    config: RunConfig
    """The recipe as its user would train it."""
    kind: Literal["mup", "completep"]
    widths: tuple[int, ...] = WIDTHS
    """Empty: width is not looked at."""
    depths: tuple[int, ...] = DEPTHS
    """Empty: depth is not looked at; only completep says anything about it."""
    steps: int = STEPS
    seeds: int = SEEDS


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One model, trained."""

    axis: Axis
    size: int
    """d_model or num_layers."""
    seed: int
    control: bool
    """Under the standard parametrization."""
    model: ModelConfig
    steps: tuple[Coordinates, ...]
    """From step 0, untrained."""


@dataclass(frozen=True, kw_only=True)
class CoordinateCheck:
    """What a check found. A slope is that of log(mean absolute change of the activation since initialisation) over log(size) at the last
    step; the untrained part is left out, as logits and, with growing heads, attention logits start smaller in wide models."""

    plan: Plan
    readings: tuple[Reading, ...]
    slopes: dict[str, Slope]
    """By ``axis/quantity``."""
    control_slopes: dict[str, Slope]

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(dict.fromkeys(reading.axis for reading in self.readings))

    def verdict_of(self, axis: Axis) -> Verdict:
        """not_flat where a slope is not; inconclusive where none of the control's is beyond 0.3, so that the check could not have told."""
        mine = [slope for name, slope in self.slopes.items() if name.startswith(axis)]
        control = [slope for name, slope in self.control_slopes.items() if name.startswith(axis)]
        if any(not abs(slope.value) < FLAT for slope in mine):
            return "not_flat"
        return "flat" if any(abs(slope.value) > GROWS for slope in control) else "inconclusive"

    @property
    def verdict(self) -> Verdict:
        """The worst of the axes."""
        found = [self.verdict_of(axis) for axis in self.axes]
        return next((bad for bad in ("not_flat", "inconclusive") if bad in found), "flat")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what is not finite is null."""
        return {
            "verdict": self.verdict,
            "verdicts": {axis: self.verdict_of(axis) for axis in self.axes},
            "parametrization": dataclasses.asdict(_parametrization(self.plan)),
            "lr": self.plan.config.optim.lr,
            "steps": self.plan.steps,
            "seeds": self.plan.seeds,
            "slopes": {name: slope.to_dict() for name, slope in self.slopes.items()},
            "control_slopes": {name: slope.to_dict() for name, slope in self.control_slopes.items()},
            "coordinates": [row for reading in self.readings for row in _rows(reading)],
        }


def check_coordinates(plan: Plan, world: World, say: Callable[[str], None] = lambda text: None) -> CoordinateCheck:
    """Train every size under the parametrization and under standard, at one rate, and fit the slopes. Raises ConfigError."""
    _check_plan(plan)
    readings = []
    for reading in _models(plan):
        say(
            f"{reading.axis} {reading.size}, seed {reading.seed}, {'standard' if reading.control else reading.model.parametrization.kind}"
        )
        found = coordinates(_small(plan, reading), world, plan.steps)
        readings.append(dataclasses.replace(reading, steps=tuple(found)))
    return CoordinateCheck(
        plan=plan, readings=tuple(readings), slopes=_slopes(readings, False), control_slopes=_slopes(readings, True)
    )


def _check_plan(plan: Plan) -> None:
    problems = []
    for name, sizes in (("widths", plan.widths), ("depths", plan.depths)):
        if sizes and (len(set(sizes)) < 3 or min(sizes) < 1):
            problems.append(
                f"{name} {','.join(map(str, sizes))}: a slope with an interval needs three different sizes, all above 0"
            )
    if not plan.widths and not (plan.depths and plan.kind == "completep"):
        problems.append(f"nothing to look at: {plan.kind} needs widths" + " or depths" * (plan.kind == "completep"))
    problems += [
        f"{name} {value}: at least 1" for name, value in (("steps", plan.steps), ("seeds", plan.seeds)) if value < 1
    ]
    if problems:
        raise ConfigError(problems)


def choose_kind(config: RunConfig, wanted: str = "") -> Literal["mup", "completep"]:
    """What to check: the one asked for, else the recipe's own, else completep, which is mup in width. Raises ConfigError."""
    if wanted not in ("", "mup", "completep"):
        raise ConfigError([unknown_choice("parametrization", wanted, ("mup", "completep"))])
    if wanted == "mup" or (not wanted and isinstance(config.model.parametrization, MuP)):
        return "mup"
    return "completep"


def _models(plan: Plan) -> Iterator[Reading]:
    """Every model of the check, not yet trained."""
    own = plan.config.model
    blocks = min(own.num_layers, MOST_BLOCKS)
    depths = plan.depths if plan.kind == "completep" else ()
    along: tuple[tuple[Axis, tuple[int, ...]], ...] = (("width", plan.widths), ("depth", depths))
    for axis, sizes in along:
        for seed in range(plan.seeds):
            for size in sorted(set(sizes)):
                for control in (False, True):
                    model = _resized(plan, size, blocks) if axis == "width" else _resized(plan, _narrow(plan), size)
                    parametrization = Standard() if control else _parametrization(plan)
                    model = dataclasses.replace(model, parametrization=parametrization)
                    yield Reading(axis=axis, size=size, seed=seed, control=control, model=model, steps=())


def _narrow(plan: Plan) -> int:
    return min(plan.widths or WIDTHS)


def _resized(plan: Plan, width: int, blocks: int) -> ModelConfig:
    """The recipe's model in the proportions that it has at the smallest width."""
    narrow = nearest_of_width(plan.config, _narrow(plan))
    return with_depth(with_width(narrow, width), blocks).model


def _parametrization(plan: Plan) -> MuP | CompleteP:
    """The recipe's own; else the smallest sizes of the check are the base, where it is the standard one."""
    own = plan.config.model.parametrization
    if not isinstance(own, Standard) and own.kind == plan.kind:
        return own
    if plan.kind == "mup":
        return MuP(base_d_model=_narrow(plan))
    return CompleteP(base_d_model=_narrow(plan), base_num_layers=min(plan.depths or DEPTHS))


def _small(plan: Plan, reading: Reading) -> RunConfig:
    """A few steps at the peak rate on a small batch; all else as the recipe has it."""
    config = plan.config
    parallel = dataclasses.replace(config.parallel, micro_batch_size=0, compile="off")
    if parallel.precision == "auto":
        parallel = dataclasses.replace(parallel, precision="fp32")
    data = dataclasses.replace(
        config.data, batch_size=ROWS, seq_len=TOKENS, document_mask=False, batch_stages=(), length_stages=()
    )
    optim = dataclasses.replace(config.optim, schedule=Constant(), warmup_steps=0, ramp_lr="none")
    model = dataclasses.replace(reading.model, vocab_size=min(reading.model.vocab_size, MOST_IDS))
    return dataclasses.replace(
        config,
        seed=reading.seed,
        steps=plan.steps,
        bound=BySteps(),
        model=model,
        data=data,
        optim=optim,
        parallel=parallel,
        log=dataclasses.replace(config.log, noise_every=0),
    )


def _slopes(readings: Sequence[Reading], control: bool) -> dict[str, Slope]:
    found = {}
    for axis in dict.fromkeys(reading.axis for reading in readings):
        mine = [reading for reading in readings if reading.axis == axis and reading.control == control]
        for name in QUANTITIES:
            sizes = [(reading.size, reading.steps[-1], reading.steps[-1].quantity(name)) for reading in mine]
            # a model whose updates were refused has changed by fewer steps than the others: no slope can be told
            points = [
                (float(size), 0.0 if last.refused else found_size.change)
                for size, last, found_size in sizes
                if found_size is not None
            ]
            if points:
                found[f"{axis}/{name}"] = fit_slope(points)
    return found


def _rows(reading: Reading) -> Iterator[dict[str, Any]]:
    """One row per activation and step."""
    for at in reading.steps:
        for name, size in at.sizes.items():
            values = {key: value if math.isfinite(value) else None for key, value in dataclasses.asdict(size).items()}
            head = {"axis": reading.axis, "size": reading.size, "seed": reading.seed, "control": reading.control}
            yield head | {"step": at.step, "activation": name} | values


def shape(model: ModelConfig) -> str:
    """The sizes of one model of the check, in words."""
    heads = ""
    if isinstance(model.attention, GroupedQueryAttention):
        part = model.attention
        heads = f", {part.num_heads} heads ({part.num_kv_heads} for keys) of {part.d_head}"
    return f"{model.d_model} wide, {model.num_layers} blocks{heads}"
