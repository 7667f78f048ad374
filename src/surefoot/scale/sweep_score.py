"""What a sweep's results say: each setting over its seeds, each value of each setting, and which is best."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.scale.sweep_axes import Combination, exact_text, value_text
from surefoot.scale.trials import TrialResult


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Held-out losses of the seeds that ended as they should, nats per token; NaN where there is none."""

    mean: float
    low: float
    high: float
    std: float
    """Of a sample; NaN for one seed."""
    count: int

    @classmethod
    def of(cls, losses: Sequence[float]) -> "Spread":
        """Over these losses."""
        if not losses:
            return cls(mean=math.nan, low=math.nan, high=math.nan, std=math.nan, count=0)
        std = statistics.stdev(losses) if len(losses) > 1 else math.nan
        return cls(mean=statistics.fmean(losses), low=min(losses), high=max(losses), std=std, count=len(losses))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One setting over its seeds."""

    values: Mapping[str, Any]
    """By dotted key."""
    runs: Sequence[tuple[Combination, TrialResult | None]]
    """None: not run yet."""

    @property
    def spread(self) -> Spread:
        """Over the seeds that are done."""
        return Spread.of([result.loss for _, result in self.runs if result and result.ending == "done"])

    @property
    def whole(self) -> bool:
        """Every seed came to a good end."""
        return all(result is not None and result.ending == "done" for _, result in self.runs)

    def ended(self, how: str) -> list[TrialResult]:
        """The seeds that ended so."""
        return [result for _, result in self.runs if result and result.ending == how]


@dataclass(frozen=True, kw_only=True)
class LeafValue:
    """One value of one setting, whatever the others are."""

    text: str
    best: Line | None
    """Of the settings that have it, the one whose seeds have the lowest mean loss; None where none came to an end."""
    mean: float
    """Over all runs with it that are done."""
    count: int
    """Runs with it."""
    diverged: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """All that is known of a sweep."""

    lines: Sequence[Line]
    """In the order of the grid or the draws."""
    keys: Sequence[str]
    """The settings that are varied."""

    @property
    def ranked(self) -> list[Line]:
        """Whole settings by mean loss, then the others in their order."""
        return sorted(self.lines, key=lambda line: line.spread.mean if line.whole else math.inf)

    @property
    def best(self) -> Line | None:
        """The whole setting with the lowest mean loss."""
        first = self.ranked[0] if self.lines else None
        return first if first and first.whole else None

    def leaf(self, key: str) -> list[LeafValue]:
        """The values of one setting, numbers in their order, words as they were given."""
        by_text: dict[str, list[Line]] = {}
        for line in self.lines:
            by_text.setdefault(exact_text(line.values[key]), []).append(line)
        numbers = all(is_number(lines[0].values[key]) for lines in by_text.values())
        ordered = sorted(by_text, key=lambda text: by_text[text][0].values[key]) if numbers else list(by_text)
        short = [value_text(by_text[text][0].values[key]) for text in ordered]
        shown = [text if short.count(less) > 1 else less for text, less in zip(ordered, short, strict=True)]
        return [_leaf_value(told, by_text[text]) for told, text in zip(shown, ordered, strict=True)]

    def remarks(self) -> list[str]:
        """What to know before the best setting is believed."""
        best, told = self.best, []
        if best is None:
            return ["no setting came to its end with all its seeds"]
        rivals = [line for line in self.ranked[1:] if line.whole]
        if rivals and best.spread.count > 1 and not clearly_lower(best.spread, rivals[0].spread):
            told.append("the next best is as good within the spread over seeds: more seeds would tell them apart")
        if best.spread.count == 1 and rivals:
            told.append("one seed each: how far chance moves these losses is not known; --seeds 3 shows it")
        for key in self.keys:
            ends = [line.values[key] for line in self.lines]
            if not all(map(is_number, ends)) or len(set(ends)) < 2:
                continue
            if best.values[key] in (min(ends), max(ends)):
                side = "smallest" if best.values[key] == min(ends) else "largest"
                told.append(f"the best {key} is the {side} that was tried: the optimum may lie beyond it")
        return told


def clearly_lower(a: Spread, b: Spread) -> bool:
    """Whether the means differ by more than two standard errors of their difference."""
    if a.count < 2 or b.count < 2:
        return False
    return b.mean - a.mean > 2 * math.sqrt(a.std**2 / a.count + b.std**2 / b.count)


def is_number(value: Any) -> bool:
    """True and false are words here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _leaf_value(text: str, lines: Sequence[Line]) -> LeafValue:
    results = [result for line in lines for _, result in line.runs if result is not None]
    done = [result.loss for result in results if result.ending == "done"]
    some = [line for line in lines if line.spread.count]
    whole = [line for line in some if line.whole] or some
    return LeafValue(
        text=text,
        best=min(whole, key=lambda line: line.spread.mean) if whole else None,
        mean=statistics.fmean(done) if done else math.nan,
        count=len(results),
        diverged=sum(result.ending == "diverged" for result in results),
    )


def score(combinations: Sequence[Combination], results: Mapping[str, TrialResult]) -> Score:
    """The score of a sweep, by trial name what is there of its results."""
    by_setting: dict[tuple[str, ...], list[Combination]] = {}
    for combination in combinations:
        by_setting.setdefault(combination.setting, []).append(combination)
    lines = [
        Line(values=group[0].values, runs=[(each, results.get(each.name)) for each in group])
        for group in by_setting.values()
    ]
    return Score(lines=lines, keys=list(combinations[0].values) if combinations else [])
