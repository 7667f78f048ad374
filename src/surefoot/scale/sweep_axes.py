"""What a sweep varies: settings with their values or ranges, and the combinations to run. No torch, so that mistakes are told at once."""

import hashlib
import itertools
import math
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.config.codec import resolve, to_dict
from surefoot.config.diff import flatten
from surefoot.config.errors import ConfigError
from surefoot.config.fingerprint import fingerprint
from surefoot.config.run import RunConfig
from surefoot.config.toml_write import toml_value

DIGITS = 3
"""Significant digits of drawn and spaced numbers: a sweep resolves no more, and they stay readable as folder names."""
_RANGE = re.compile(r"(log|linear|int):([^.:]+(?:\.[0-9][^.:]*)?)\.\.([^:]+)(?::([0-9]+))?")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.=,+-]+")


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    scale: Literal["log", "linear", "int"]
    low: float
    high: float
    points: int = 0
    """Of a grid, evenly spaced; 0 where none is given."""

    def spaced(self) -> list[str]:
        """The points of a grid."""
        return list(dict.fromkeys(self._at(k / max(1, self.points - 1)) for k in range(self.points)))

    def draw(self, share: float) -> str:
        """The number a share of the way through."""
        return self._at(share)

    def _at(self, share: float) -> str:
        if self.scale == "log":
            return _short(math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low))))
        value = self.low + share * (self.high - self.low)
        return str(round(value)) if self.scale == "int" else _short(value)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One setting and what it takes."""

    key: str
    """Dotted, as in flags."""
    values: tuple[str, ...] | Range


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One setting of all axes with one seed."""

    name: str
    """Of its trial: ``lr=0.003,qk_norm=true,seed=0``."""
    values: Mapping[str, Any]
    """By dotted key, as the config has them."""
    seed: int
    config: RunConfig

    @property
    def setting(self) -> tuple[str, ...]:
        """What the seeds of one setting share: values as text, in the order of the axes."""
        return tuple(toml_value(value) for value in self.values.values())


def read_axes(words: Sequence[str], *, drawn: bool) -> list[Axis]:
    """``key=a,b,c`` or ``key=log:low..high`` (for a grid ``:points`` after it). Raises ConfigError with every mistake."""
    axes: list[Axis] = []
    problems: list[str] = []
    for word in words:
        key, has_value, text = word.partition("=")
        try:
            axes.append(_axis(key.removeprefix("--"), text if has_value else "", drawn))
        except ValueError as error:
            problems.append(f"--vary {word}: {error}")
    keys = [axis.key for axis in axes]
    problems += [
        f"--vary {key}: given twice; list all its values once" for key in dict.fromkeys(keys) if keys.count(key) > 1
    ]
    if not words:
        problems.append("command line: nothing to vary; give --vary KEY=A,B,C, such as --vary optim.lr=1e-3,3e-3,1e-2")
    if problems:
        raise ConfigError(problems)
    return axes


def _axis(key: str, text: str, drawn: bool) -> Axis:
    if not key or not text:
        raise ValueError("give it as KEY=A,B,C, such as optim.lr=1e-3,3e-3,1e-2")
    if not text.startswith(("log:", "linear:", "int:")):
        values = split_values(text)
        if "" in values:
            raise ValueError("a value is empty; separate values by single commas")
        if len(set(values)) < len(values):
            raise ValueError("a value is given twice")
        return Axis(key=key, values=values)
    match = _RANGE.fullmatch(text)
    try:
        low, high = (float(match[2]), float(match[3])) if match else (math.nan, math.nan)
    except ValueError:
        low = high = math.nan
    if match is None or not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            "a range is log:LOW..HIGH, linear:LOW..HIGH or int:LOW..HIGH, and in a grid ends with :POINTS, as log:1e-4..1e-1:7"
        )
    scale: Any = match[1]
    if low >= high:
        raise ValueError(f"the range begins at {low:g} and ends at {high:g}; the lower end comes first")
    if scale == "log" and low <= 0:
        raise ValueError(f"a logarithmic range begins above 0, not at {low:g}")
    if scale == "int" and not (low.is_integer() and high.is_integer()):
        raise ValueError("the ends of an int range are whole numbers")
    points = int(match[4] or 0)
    if drawn and points:
        raise ValueError(f"with --random N values are drawn; leave out :{points}")
    if not drawn and points < 2:
        raise ValueError(
            f"a grid needs the number of points (2 or more): {text.rpartition(':')[0] if points else text}:5; or draw with --random N"
        )
    found = Range(scale=scale, low=low, high=high, points=points)
    return Axis(key=key, values=found if drawn else tuple(found.spaced()))


def split_values(text: str) -> tuple[str, ...]:
    """Values between commas, those inside brackets, braces and quotes left alone."""
    values, depth, quoted, start = [], 0, False, 0
    for place, letter in enumerate(text):
        quoted ^= letter == '"'
        depth += (not quoted) * ((letter in "[{") - (letter in "]}"))
        if letter == "," and not depth and not quoted:
            values.append(text[start:place].strip())
            start = place + 1
    return (*values, text[start:].strip())


def settings_of(axes: Sequence[Axis], num_drawn: int, draw_seed: int) -> list[tuple[str, ...]]:
    """The text of every axis in every setting: the whole grid, or ``num_drawn`` draws, each a function of (draw_seed, its number)."""
    if not num_drawn:
        return list(itertools.product(*(axis.values for axis in axes if not isinstance(axis.values, Range))))
    drawn = []
    for number in range(num_drawn):
        draw = random.Random(f"sweep {draw_seed} {number}")
        drawn.append(tuple(_draw(axis.values, draw) for axis in axes))
    return list(dict.fromkeys(drawn))


def _draw(values: tuple[str, ...] | Range, draw: random.Random) -> str:
    share = draw.random()
    return values.draw(share) if isinstance(values, Range) else values[int(share * len(values))]


def combine(
    base: RunConfig,
    files: Sequence[Path],
    flags: Sequence[str],
    axes: Sequence[Axis],
    settings: Sequence[tuple[str, ...]],
    num_seeds: int,
) -> list[Combination]:
    """Every setting with every seed as a checked config. Raises ConfigError with every mistake of all of them, each told once."""
    problems: dict[str, list[str]] = {}
    found: dict[str, Combination] = {}
    names = short_names([axis.key for axis in axes])
    if num_seeds > 1 and any(axis.key == "seed" for axis in axes):
        raise ConfigError(["--vary seed=...: seeds are given by --seeds N, or by themselves with --seeds 1"])
    for texts in settings:
        varied = [f"--{axis.key}={text}" for axis, text in zip(axes, texts, strict=True)]
        shown = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
        try:
            config = resolve(base, files, [*flags, *varied])
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(shown)
            continue
        values = flatten(to_dict(config))
        chosen = {axis.key: values.get(axis.key, text) for axis, text in zip(axes, texts, strict=True)}
        for seed in range(config.seed, config.seed + num_seeds):
            name = trial_name(
                {**dict(zip(names, chosen.values(), strict=True)), **({} if "seed" in chosen else {"seed": seed})}
            )
            seeded = resolve(config, [], [f"--seed={seed}"])
            # Cut short, or told apart only by letters or digits that a name does not hold.
            if (name in found and found[name].config != seeded) or any(map(rounded, chosen.values())):
                name = f"{name[:140]}-{fingerprint(seeded)[:6]}"
            found[name] = Combination(name=name, values=chosen, seed=seed, config=seeded)
    if problems:
        raise ConfigError(_told(problem, where, len(settings)) for problem, where in problems.items())
    return list(found.values())


def _told(problem: str, where: Sequence[str], of: int) -> str:
    if len(where) == of:
        return problem
    more = f" and {len(where) - 1} more" if len(where) > 1 else ""
    return f"{problem} (with {where[0]}{more})"


def short_names(keys: Sequence[str]) -> list[str]:
    """The end of each dotted key that tells it from the others."""
    names = []
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        names.append(next((end for end in ends if sum(k == end or k.endswith(f".{end}") for k in keys) == 1), key))
    return names


def trial_name(values: Mapping[str, Any]) -> str:
    """A folder's name that says the values."""
    words = [f"{name}={value_text(value)}" for name, value in values.items()]
    return _NOT_IN_NAMES.sub("_", ",".join(words))[:150]


def value_text(value: Any) -> str:
    """A value as a person reads it."""
    return f"{value:.6g}" if isinstance(value, float) else exact_text(value)


def exact_text(value: Any) -> str:
    """A value as a person types it, all its digits there."""
    if isinstance(value, float):
        short = f"{value:.6g}"
        return short if float(short) == value else repr(value)
    return value if isinstance(value, str) else toml_value(value)


def rounded(value: Any) -> bool:
    """Whether ``value_text`` leaves out digits."""
    return isinstance(value, float) and float(value_text(value)) != value


def flags_of(values: Mapping[str, Any]) -> str:
    """Values as flags to paste behind ``surefoot train RECIPE``."""
    return shlex.join(word for key, value in values.items() for word in (f"--{key}", exact_text(value)))


def common_flags(files: Sequence[Path], flags: Sequence[str]) -> str:
    """What all runs of a sweep have, as flags to paste behind ``surefoot train RECIPE``."""
    return shlex.join([*(word for file in files for word in ("--config", str(file))), *flags])


def common_fingerprint(base: RunConfig, files: Sequence[Path], flags: Sequence[str]) -> str:
    """Hex digits that tell sweeps of one recipe apart by what all their runs have, whatever is varied."""
    try:
        return fingerprint(resolve(base, files, flags))
    except ConfigError:  # they make sense only with what is varied
        parts = [fingerprint(base), *(file.read_text() for file in files), *flags]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _short(value: float) -> str:
    return f"{value:.{DIGITS}g}"
