"""Learning-rate sweeps over widths and depths, under a parametrization and under ``standard`` as its control."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from surefoot.config.errors import ConfigError
from surefoot.config.model import Standard
from surefoot.config.run import RunConfig
from surefoot.data.build import Progress
from surefoot.recipes.resize import with_depth, with_parametrization, with_width
from surefoot.scale.optimum import by_rate, optimum
from surefoot.scale.transfer_cells import Cell, Kind, Size, cell_name
from surefoot.scale.trials import Trial, TrialResult, run_trials
from surefoot.train.opening import commit_of

FACTOR = 2.0
"""Between the rates of a grid, and from its edge to the next rate where it is extended."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to sweep."""

    base: RunConfig
    """The recipe; its width and depth are the base of the parametrizations, its other settings hold at every size."""
    widths: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    lrs: tuple[float, ...]
    """The grid of every size that ``grids`` does not name."""
    grids: Mapping[Size, tuple[float, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...]
    fewer_seeds: Mapping[Size, int] = field(default_factory=dict)
    """How many of the seeds a size gets, where not all."""
    width_kind: Kind = "mup"
    depth_kind: Kind = "completep"
    control: bool = True
    """Sweep ``standard`` too."""
    extend: int = 3
    """Rates a grid may grow by where its edge is its best, a factor of two at a time."""
    command: str = ""
    """That repeats it, for the cells."""

    @property
    def base_size(self) -> Size:
        return Size("standard", self.base.model.d_model, self.base.model.num_layers)

    def sizes(self) -> tuple[Size, ...]:
        """Every model, each once, the cheapest first."""
        base = self.base_size
        kinds: list[tuple[Kind, Kind]] = [(self.width_kind, self.depth_kind)]
        kinds += [("standard", "standard")] * self.control
        found = [base]
        for wide, deep in kinds:
            found += [Size(wide, width, base.num_layers) for width in self.widths if width != base.d_model]
            found += [Size(deep, base.d_model, depth) for depth in self.depths if depth != base.num_layers]
        return tuple(sorted(dict.fromkeys(found), key=lambda size: (_cost(size), size.kind)))


def _cost(size: Size) -> float:
    """In proportion to the work of a token, roughly: products grow with the square, all else with the width."""
    return size.num_layers * size.d_model * (size.d_model + 128.0)


def trial_of(plan: Plan, size: Size, lr: float, seed: int) -> Trial:
    """The run of one cell: the guard watches only, for what it does about a rate would hide what the rate does."""
    config = with_parametrization(plan.base, size.kind)
    config = with_depth(with_width(config, size.d_model), size.num_layers)
    config = dataclasses.replace(
        config,
        seed=seed,
        optim=dataclasses.replace(config.optim, lr=lr),
        guard=dataclasses.replace(config.guard, policy="observe", probe_every=0, snapshots=0),
        eval=dataclasses.replace(config.eval, every=0),
        log=dataclasses.replace(config.log, sample_tokens=0),
    )
    return Trial(name=cell_name(size, lr, seed), config=config)


def around(centre: float, each_side: int) -> tuple[float, ...]:
    """A grid of factor two with so many rates on each side of its middle."""
    return tuple(centre * FACTOR**n for n in range(-each_side, each_side + 1))


def check_plan(plan: Plan) -> None:
    """Raises ConfigError with every reason why the plan can't be run."""
    problems = []
    if not isinstance(plan.base.model.parametrization, Standard):
        problems.append(
            f"model.parametrization={plan.base.model.parametrization.kind}: the recipe's own size is the base of a transfer sweep; "
            "leave it standard"
        )
    others = {*plan.widths} - {plan.base.model.d_model}, {*plan.depths} - {plan.base.model.num_layers}
    if not any(others):
        problems.append("no size but the recipe's own is asked for; give --widths, --depths or both")
    for lrs in {plan.lrs, *plan.grids.values()}:
        if len(set(lrs)) < 3 or min(lrs, default=0.0) <= 0.0:
            problems.append(
                f"learning rates {_listed(lrs)}: three different ones above 0 at least, to fit an optimum to"
            )
    if not plan.seeds or len(set(plan.seeds)) < len(plan.seeds):
        problems.append(f"seeds {_listed(plan.seeds)}: one at least, none twice")
    if problems:
        raise ConfigError(problems)
    for size in plan.sizes():
        trial_of(plan, size, plan.lrs[0], plan.seeds[0])  # widths that give no whole heads are refused here


def run_plan(
    plan: Plan,
    folder: Path,
    *,
    known: Mapping[str, Cell],
    jobs: int,
    on_cell: Callable[[Cell], None],
    on_tick: Callable[[Sequence[str]], None] = lambda running: None,
    on_failure: Callable[[TrialResult], None] = lambda result: None,
    progress: Progress | None = None,
) -> dict[str, Cell]:
    """Every cell of the plan by name: those ``known``, and the others, run below ``folder``, ``jobs`` at once.

    The middle three rates of every grid for one seed, then for the next, then the rest of the grids: what is cut short is a whole sweep of
    fewer seeds or rates. After each round, grids whose edge is the best are extended. ``on_cell`` hears of each new cell. Raises what
    ``run_trials`` raises.
    """
    check_plan(plan)
    cells = dict(known)
    failed: set[str] = set()
    asked = {size: tuple(sorted(set(plan.grids.get(size, plan.lrs)))) for size in plan.sizes()}
    grids = {size: _middle(lrs) for size, lrs in asked.items()}
    wanted: dict[str, tuple[Size, float, int]] = {}

    def done(result: TrialResult) -> None:
        if result.ending == "failed":
            failed.add(result.name)
            on_failure(result)
        else:
            cells[result.name] = _cell(plan, *wanted[result.name], result)
            on_cell(cells[result.name])

    rounds = [*((plan.seeds[: n + 1], False) for n in range(len(plan.seeds))), (plan.seeds, True)]
    for seeds, whole in rounds:
        if whole:
            grids = {size: tuple(sorted({*lrs, *asked[size]})) for size, lrs in grids.items()}
        while True:
            wanted = _wanted(plan, grids, seeds)
            missing = [one for name, one in wanted.items() if name not in cells and name not in failed]
            if missing:
                trials = [trial_of(plan, *one) for one in missing]
                run_trials(trials, folder, jobs=jobs, on_done=done, on_tick=on_tick, progress=progress)
            grown = {
                size: _extended(size, lrs, cells.values(), asked[size], plan.extend) for size, lrs in grids.items()
            }
            if grown == grids:
                break
            grids = grown
    return {name: cells[name] for name in wanted if name in cells}


def _middle(lrs: tuple[float, ...]) -> tuple[float, ...]:
    """The three rates in the middle of a grid."""
    first = (len(lrs) - 3) // 2
    return lrs[first : first + 3]


def _wanted(
    plan: Plan, grids: Mapping[Size, tuple[float, ...]], seeds: Sequence[int]
) -> dict[str, tuple[Size, float, int]]:
    """The cells of these seeds by name."""
    return {
        cell_name(size, lr, seed): (size, lr, seed)
        for seed in seeds
        for size, lrs in grids.items()
        if seed in plan.seeds[: plan.fewer_seeds.get(size, len(plan.seeds))]
        for lr in lrs
    }


def _cell(plan: Plan, size: Size, lr: float, seed: int, result: TrialResult) -> Cell:
    base, data = plan.base_size, plan.base.data
    assert result.ending != "failed"
    return Cell(
        kind=size.kind,
        d_model=size.d_model,
        num_layers=size.num_layers,
        base_d_model=base.d_model,
        base_num_layers=base.num_layers,
        lr=lr,
        seed=seed,
        loss=round(result.bounded_loss, 6),
        ending=result.ending,
        reason=result.reason,
        num_params=result.num_params,
        num_tokens=plan.base.steps * data.batch_size * data.seq_len,
        batch_tokens=data.batch_size * data.seq_len,
        seconds=result.seconds,
        command=plan.command,
        commit=commit_of(),
        torch=torch.__version__,
    )


def _extended(
    size: Size, lrs: tuple[float, ...], cells: Iterable[Cell], asked: tuple[float, ...], extend: int
) -> tuple[float, ...]:
    """The grid, one rate longer where its edge is its best and it may still grow: by a rate that was asked for, or by a factor of two."""
    curve = by_rate({(cell.lr, cell.seed): cell.loss for cell in cells if cell.size == size and cell.lr in lrs})
    if curve is None or curve.lrs != lrs:
        return lrs
    edge = optimum(curve).edge
    if edge == "none":
        return lrs
    beyond = [lr for lr in asked if (lr < lrs[0] if edge == "low" else lr > lrs[-1])]
    further = (
        (max(beyond) if edge == "low" else min(beyond))
        if beyond
        else (lrs[0] / FACTOR if edge == "low" else lrs[-1] * FACTOR)
    )
    grown = tuple(sorted({*lrs, further}))
    return grown if len({*grown} - {*asked}) <= extend else lrs


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or "(none)"
