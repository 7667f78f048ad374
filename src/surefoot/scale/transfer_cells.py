"""What a transfer sweep left, one cell a run, and what it says: whether the best learning rate stays where it is as the model grows. No torch."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.monitor.durable import write_atomic
from surefoot.scale.optimum import LossCurve, Optimum, Shift, by_rate, optimum, shift

Axis = Literal["width", "depth"]
Kind = Literal["standard", "mup", "completep"]
AT_MOST = 1.0
"""Factor-of-two steps that an optimum may move and still be said to transfer."""
AT_LEAST = 2.0
"""Steps that the control must move, or the protocol could not have told."""
SHARPEST = 1.0
"""Widest interval, in steps, that an optimum may have and still decide."""


@dataclass(frozen=True, order=True)
class Size:
    """One model of a sweep. At the base sizes every parametrization is ``standard``, and its runs are shared."""

    kind: Kind
    d_model: int
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a size, a rate and a seed, and what came of it."""

    kind: Kind
    d_model: int
    num_layers: int
    base_d_model: int
    base_num_layers: int
    lr: float
    seed: int
    loss: float
    """Held-out, nats per token; the training loss of the first batch where the run diverged."""
    ending: Literal["done", "diverged"]
    reason: str
    """Why it diverged."""
    num_params: int
    num_tokens: int
    batch_tokens: int
    seconds: float
    """In steps."""
    command: str
    """That repeats it."""
    commit: str
    torch: str

    @property
    def size(self) -> Size:
        return Size(self.kind, self.d_model, self.num_layers)

    @property
    def name(self) -> str:
        return cell_name(self.size, self.lr, self.seed)


def cell_name(size: Size, lr: float, seed: int) -> str:
    """Name of a cell's file and of its run folder."""
    return f"{size.kind}-d{size.d_model}-L{size.num_layers}-lr{lr:g}-s{seed}"


def write_cell(folder: Path, cell: Cell) -> None:
    """``<folder>/<name>.json``."""
    write_atomic(folder / f"{cell.name}.json", json.dumps(dataclasses.asdict(cell), indent=1) + "\n")


def read_cells(folder: Path) -> dict[str, Cell]:
    """All cells of a folder by name; other JSON files there are left alone."""
    found: dict[str, Cell] = {}
    names = {field.name for field in dataclasses.fields(Cell)}
    for path in sorted(folder.glob("*-s*.json")):
        values: dict[str, Any] = json.loads(path.read_text())
        if values.keys() == names:
            cell = Cell(**values)
            found[cell.name] = cell
    return found


@dataclass(frozen=True)
class Row:
    """One size of a family."""

    size: int
    """Its width or depth."""
    num_params: int
    curve: LossCurve
    optimum: Optimum
    shift: Shift
    """From the smallest size."""
    diverged: int
    """Runs that did."""

    @property
    def num_runs(self) -> int:
        return len(self.curve.lrs) * self.optimum.num_seeds


@dataclass(frozen=True)
class Family:
    """One parametrization over one axis, smallest size first."""

    axis: Axis
    kind: Kind
    rows: tuple[Row, ...]

    @property
    def farthest(self) -> Row:
        """The row whose optimum moved most; of equals, the largest size."""
        return max(self.rows, key=lambda row: (round(abs(row.shift.steps), 6), row.size))

    @property
    def sharp(self) -> bool:
        """Whether every optimum lies inside its grid, with an interval narrow enough to decide."""
        return all(row.optimum.edge == "none" and row.optimum.width < SHARPEST for row in self.rows)


def families(cells: Iterable[Cell], axis: Axis) -> tuple[Family, ...]:
    """The parametrizations that were swept along an axis, the control last; sizes without three rates of a seed are left out."""
    held = list(cells)
    if not held:
        return ()
    base = Size("standard", held[0].base_d_model, held[0].base_num_layers)
    runs: dict[Size, list[Cell]] = {}
    for cell in held:
        runs.setdefault(cell.size, []).append(cell)
    found = []
    for kind in ("mup", "completep", "standard"):
        along = [size for size in runs if size == base or (size.kind == kind and _varies(size, base, axis))]
        if len(along) > 1:
            along.sort(key=lambda size: _value(size, axis))
            found.append(Family(axis, kind, _rows(along, runs, axis)))
    return tuple(family for family in found if len(family.rows) > 1)


def _varies(size: Size, base: Size, axis: Axis) -> bool:
    if axis == "width":
        return size.num_layers == base.num_layers and size.d_model != base.d_model
    return size.d_model == base.d_model and size.num_layers != base.num_layers


def _value(size: Size, axis: Axis) -> int:
    return size.d_model if axis == "width" else size.num_layers


def _rows(along: Sequence[Size], runs: Mapping[Size, Sequence[Cell]], axis: Axis) -> tuple[Row, ...]:
    curves: dict[Size, LossCurve] = {}
    for size in along:
        curve = by_rate({(cell.lr, cell.seed): cell.loss for cell in runs[size]})
        if curve is not None:
            curves[size] = curve
    first = next(iter(curves.values()), None)
    return tuple(
        Row(
            size=_value(size, axis),
            num_params=runs[size][0].num_params,
            curve=curve,
            optimum=optimum(curve),
            shift=shift(first or curve, curve),
            diverged=sum(cell.ending == "diverged" for cell in runs[size]),
        )
        for size, curve in curves.items()
    )


@dataclass(frozen=True)
class Verdict:
    """What one parametrization does along one axis, against the control."""

    axis: Axis
    kind: Kind
    word: Literal["transfers", "moves", "inconclusive"]
    reason: str
    """One sentence with the numbers."""
    moved: float
    """Steps, of the size that moved most."""
    control_moved: float | None
    """The same of ``standard``; None where it was not swept."""


def verdict(family: Family, control: Family | None) -> Verdict:
    """transfers: no optimum moves by more than one step, each inside its grid and known to within a step, while the control moves by two or
    more. moves: one certainly does. inconclusive: anything else, and what would decide it."""
    row = family.farthest
    moved, place = row.shift.steps, f"{family.axis} {row.size}"
    far = control.farthest if control else None
    against = f"; under standard by {told_shift(far.shift)}" if far else ""
    said = f"the best rate moves by {told_shift(row.shift)} factor-of-two steps at {place}{against}"
    word: Literal["transfers", "moves", "inconclusive"]
    if _certainly_moves(family):
        word = "moves"
    elif not family.sharp:
        word, said = "inconclusive", f"{said}; {_blunt(family)}"
    elif abs(moved) > AT_MOST:
        word, said = "inconclusive", f"{said}; its interval reaches below one step: more seeds would decide"
    elif far is None:
        word, said = "inconclusive", f"{said}; there is no control"
    elif not _moves_by(far.shift, AT_LEAST):
        word = "inconclusive"
        said = (
            f"{said}, less than two: this protocol does not tell parametrizations apart; a wider range of sizes would"
        )
    else:
        word = "transfers"
    return Verdict(family.axis, family.kind, word, said, moved, far.shift.steps if far else None)


def _moves_by(one: Shift, steps: float) -> bool:
    """Whether an optimum moved so far; a bound counts on its own side."""
    return (one.steps <= -steps and one.bound != "at_least") or (one.steps >= steps and one.bound != "at_most")


def _certainly_moves(family: Family) -> bool:
    """Whether some optimum lies beyond one step with its whole interval; a bound counts on its own side."""
    for row in family.rows:
        one = row.shift
        below = one.high < -AT_MOST and one.bound != "at_least"
        above = one.low > AT_MOST and one.bound != "at_most"
        if below or above:
            return True
    return False


def _blunt(family: Family) -> str:
    for row in family.rows:
        if row.optimum.edge != "none":
            side = "lowest" if row.optimum.edge == "low" else "highest"
            return f"at {family.axis} {row.size} the {side} rate is the best: the grid must go on"
    row = max(family.rows, key=lambda row: row.optimum.width)
    return f"at {family.axis} {row.size} the interval is {row.optimum.width:.1f} steps wide: more seeds would narrow it"


def told_shift(one: Shift) -> str:
    """A shift in words: "-2.10 (-2.30 to -1.90)", "at most -2.00" where an optimum lies at the edge of its grid."""
    if one.bound == "none":
        return f"{one.steps:+.2f} ({one.low:+.2f} to {one.high:+.2f})"
    return f"at {one.bound[3:]} {one.steps:+.2f}"


def verdicts(cells: Iterable[Cell]) -> tuple[Verdict, ...]:
    """Of every parametrization along every axis that was swept; ``standard`` gets one only where it was swept alone."""
    held = list(cells)
    found = []
    axes: tuple[Axis, ...] = ("width", "depth")
    for axis in axes:
        swept = families(held, axis)
        control = next((family for family in swept if family.kind == "standard"), None)
        tested = [family for family in swept if family.kind != "standard"] or list(swept)
        found += [verdict(family, None if family is control else control) for family in tested]
    return tuple(found)
