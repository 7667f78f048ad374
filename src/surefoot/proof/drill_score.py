"""The score of the drill: what was harmful, what was seen of it, how late, which cause was named, and what it cost. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from surefoot.proof.drill import Base
from surefoot.proof.drill_cells import PREFIX, share_code, task_name
from surefoot.proof.fault_catalogue import CATALOGUE, FAULTS, SHARES, Fault

Cell = Mapping[str, Any]
SIGMAS = 3.0
"""Standard deviations above clean from which an end counts as harmed."""
NEAR = 0.005
"""Relative distance from clean, or from the control, within which a cured run should end."""
NAMES = ("data", "optimiser", "numerics", "hardware", "unknown", "not seen")
"""Columns of the confusion matrix: the causes the guard may name, and none because it saw nothing."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One fault at one dose, unguarded and guarded."""

    fault: Fault
    share: float
    seed: int
    clean: float
    unguarded: Cell
    guarded: Cell
    control: Cell | None
    """A healthy run that skipped the same batches; None where none were, or its fault is not curable."""
    noise: float
    """Standard deviation of the end, relative to clean."""

    @property
    def harmful(self) -> bool:
        """Decided from the unguarded run alone."""
        return not self.unguarded["finite"] or self.unguarded["loss"] / self.clean - 1 > SIGMAS * self.noise

    @property
    def detected(self) -> bool:
        """The guard said or did something about it."""
        return bool(self.guarded["detected"])

    @property
    def named(self) -> str:
        """The first cause that it named; unknown counts only where no other was."""
        if not self.detected:
            return "not seen"
        return next((cause for cause in self.guarded["causes"] if cause != "unknown"), "unknown")

    @property
    def target(self) -> float:
        """The end of a run that was cured: clean, or the control's where skipping as many healthy batches alone costs more."""
        return max(self.clean, self.control["loss"] if self.control else 0.0)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table: a kind of fault at one dilution, over its seeds."""

    fault: Fault
    share: float
    pairs: tuple[Pair, ...]

    @cached_property
    def harmful(self) -> tuple[Pair, ...]:
        """The pairs that count."""
        return tuple(pair for pair in self.pairs if pair.harmful)

    @property
    def detected(self) -> int:
        """Of the harmful ones."""
        return sum(pair.detected for pair in self.harmful)

    @property
    def seen_at_all(self) -> int:
        """Of all, harmful or not."""
        return sum(pair.detected for pair in self.pairs)

    @property
    def right(self) -> int:
        """Harmful ones whose cause was named rightly."""
        return sum(pair.named == self.fault.cause for pair in self.harmful)

    @property
    def delay(self) -> float:
        """Median, in batches, of those detected; harmful ones where there are any. NaN where none was."""
        some = self.harmful or self.pairs
        return median(pair.guarded["delay"] for pair in some if pair.detected)

    @property
    def clean(self) -> float:
        """Mean end without the fault, nats per token."""
        return mean(pair.clean for pair in self.pairs)

    @property
    def unguarded(self) -> float:
        """Mean end with the fault and no guard; infinite where one is not finite."""
        return mean(end(pair.unguarded) for pair in self.pairs)

    @property
    def guarded(self) -> float:
        """Mean end with the fault and the guard."""
        return mean(end(pair.guarded) for pair in self.pairs)

    @property
    def target(self) -> float:
        """Mean end of a cure."""
        return mean(pair.target for pair in self.pairs)

    @property
    def cured(self) -> bool:
        """The mean over seeds is within reach of clean or of the control."""
        return self.guarded <= self.target * (1 + NEAR)

    @property
    def wasted(self) -> float:
        """Batches consumed for no surviving update, mean."""
        return mean(
            pair.guarded["consumed"] - pair.guarded["steps"] for pair in self.pairs if pair.guarded["ending"] == "done"
        )

    @property
    def actions(self) -> Counter[str]:
        """Runs in which each action was taken."""
        return Counter(action for pair in self.pairs for action in pair.guarded["actions"])


@dataclass(frozen=True, kw_only=True)
class Score:
    """The whole drill."""

    lines: tuple[Line, ...]
    noise: float
    """Standard deviation of a run's end under a few skipped healthy batches, relative to the clean run of its seed."""
    noise_runs: int
    clean_pairs: int
    clean_same: int
    """Clean runs whose guarded twin has the same curve and end."""
    false_alarms: int
    """Warnings and alarms in clean guarded runs, and before the onset in the others."""
    healthy_steps: int
    """Steps in which those could have come."""

    @property
    def harmful(self) -> list[Pair]:
        """All that count."""
        return [pair for line in self.lines for pair in line.harmful]

    @property
    def detected(self) -> list[Pair]:
        """Harmful and seen."""
        return [pair for pair in self.harmful if pair.detected]

    @property
    def right(self) -> int:
        """Seen, harmful, and their cause named rightly."""
        return sum(pair.named == pair.fault.cause for pair in self.detected)

    @property
    def fast_delay(self) -> float:
        """Median delay of fast harmful ones, in batches."""
        return median(pair.guarded["delay"] for pair in self.detected if pair.fault.fast)

    @property
    def curable(self) -> list[Line]:
        """Lines that skipping, excluding or going back can cure, and that needed it."""
        return [line for line in self.lines if line.fault.curable and line.harmful]

    def confusion(self, pairs: Iterable[Pair]) -> dict[str, Counter[str]]:
        """Named causes by true cause."""
        table: dict[str, Counter[str]] = {}
        for pair in pairs:
            table.setdefault(pair.fault.cause, Counter())[pair.named] += 1
        return table


def score(cells: Sequence[Cell], base: Base = "B") -> Score:
    """The score of all cells of one model that are complete: pairs with their clean run."""
    by_name = {cell["name"]: cell for cell in cells if cell["base"] == base}
    clean = {c["seed"]: c["loss"] for c in by_name.values() if _is_clean(c) and not c["guarded"]}
    shifts = [
        c["loss"] / clean[c["seed"]] - 1
        for c in by_name.values()
        if c["name"].startswith(f"{PREFIX[base]}noise-") and c["seed"] in clean
    ]
    noise = math.sqrt(statistics.fmean(shift**2 for shift in shifts)) if shifts else math.nan
    lines = [_line(fault, share, by_name, clean, noise, base) for share in (1.0, *SHARES) for fault in CATALOGUE]
    twins = [
        (c, by_name.get(task_name("", 1.0, c["seed"], True, base)))
        for c in by_name.values()
        if _is_clean(c) and not c["guarded"]
    ]
    guarded = [c for c in by_name.values() if c["guarded"]]
    return Score(
        lines=tuple(line for line in lines if line.pairs),
        noise=noise,
        noise_runs=len(shifts),
        clean_pairs=sum(twin is not None for _, twin in twins),
        clean_same=sum(
            twin is not None and (c["curve"], c["loss"]) == (twin["curve"], twin["loss"]) for c, twin in twins
        ),
        false_alarms=sum(c["false_alarms"] for c in guarded),
        healthy_steps=sum(min(c["dose"]["onset"], c["steps"]) for c in guarded),
    )


def _line(
    fault: Fault, share: float, by_name: Mapping[str, Cell], clean: Mapping[int, float], noise: float, base: Base
) -> Line:
    pairs = []
    for seed in sorted(clean):
        off, on = (by_name.get(task_name(fault.name, share, seed, guarded, base)) for guarded in (False, True))
        if off is None or on is None:
            continue
        control = by_name.get(f"{PREFIX[base]}control-{fault.name}-{share_code(share)}-s{seed}-guarded")
        pairs.append(
            Pair(
                fault=FAULTS[fault.name],
                share=share,
                seed=seed,
                clean=clean[seed],
                unguarded=off,
                guarded=on,
                control=control,
                noise=noise,
            )
        )
    return Line(fault=fault, share=share, pairs=tuple(pairs))


def _is_clean(cell: Cell) -> bool:
    return not cell["fault"] and not cell["skips"]


def end(cell: Cell) -> float:
    """Held-out loss at the end, infinite where it is not a number."""
    return float(cell["loss"]) if cell["finite"] else math.inf


def mean(values: Iterable[float]) -> float:
    """NaN of nothing."""
    found = list(values)
    return math.fsum(found) / len(found) if found else math.nan


def median(values: Iterable[float]) -> float:
    """NaN of nothing."""
    found = list(values)
    return float(statistics.median(found)) if found else math.nan
