"""Whatever is written, the answer is a config or a list of mistakes, never a traceback."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from sample_config import tiny
from surefoot.config.codec import from_dict, resolve, to_dict
from surefoot.config.errors import ConfigError
from surefoot.config.rule import nearest_divisors
from surefoot.config.run import RunConfig
from surefoot.config.schema import every_setting

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**400, 2.5, float("nan"), float("inf"), "", "gqa", "python", "custom", "wsd", "0.5"),
    *([], [1], [[]], [{}], {}, {"kind": "custom"}, {"kind": 3}, {"kind": ["x"]}, {"0": {}}, {"x": {"kind": None}}),
)
TEXTS = (
    "",
    "1",
    "1e400",
    "9" * 5000,
    "true",
    "[",
    "[1, {}]",
    "{",
    "{}",
    '{"kind": "custom"}',
    "kind",
    "NaN",
    "²",
    "a,b",
    "[[1]]",
)


def spoilt(values: Any, draw: random.Random) -> Any:
    """The values with one place replaced, removed or added to."""
    spoiled = copy.deepcopy(values)
    at = spoiled
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return spoiled
        key = draw.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and draw.random() < 0.7:
            at = at[key]
            continue
        action = draw.randrange(3)
        if action == 0:
            del at[key]
        elif action == 1 and isinstance(at, dict):
            at[draw.choice(["x", "kind", "0", ""])] = draw.choice(VALUES)
        else:
            at[key] = draw.choice(VALUES)
        return spoiled


def mistakes(read: Callable[[], object]) -> int:
    """How many mistakes reading reports; anything but a ConfigError passes through and fails the test."""
    try:
        read()
    except ConfigError as error:
        return len([problem for problem in error.problems if problem.strip()])
    return 0


def test_spoilt_values_are_a_config_or_mistakes() -> None:
    counts = []
    for seed in range(1500):
        values = spoilt(to_dict(tiny()), random.Random(seed))
        counts.append(mistakes(lambda values=values: from_dict(RunConfig, values)))
    assert 500 < sum(count > 0 for count in counts) < 1500


def test_any_flags_are_a_config_or_mistakes() -> None:
    odd = ("", "x", "model.", "data.sources.x", "optim.lr.deep", "a.0.b")
    keys = [*sorted({key for key, _ in every_setting(RunConfig)}), *odd]
    counts = []
    for seed in range(1500):
        draw = random.Random(seed)
        flags = [word for key in draw.sample(keys, draw.randrange(1, 4)) for word in (f"--{key}", draw.choice(TEXTS))]
        counts.append(mistakes(lambda flags=flags: resolve(tiny(), [], flags)))
    assert 500 < sum(count > 0 for count in counts) < 1500


def test_a_whole_number_beyond_floats_is_not_finite() -> None:
    values = to_dict(tiny())
    values["optim"]["lr"] = 10**400
    with pytest.raises(ConfigError, match=r"optim.lr = inf is not finite"):
        from_dict(RunConfig, json.loads(json.dumps(values)))


def test_nearest_divisors_of_a_huge_number_are_found_at_once() -> None:
    assert nearest_divisors(6, 4) == [2, 3]
    assert nearest_divisors(6, 100) == [3, 6]
    assert nearest_divisors(2**62, 3) == [2, 4]
    assert nearest_divisors(2**61 - 1, 10**9) == [1, 2**61 - 1]
