"""Two runs side by side: what their configs differ in, and the first batch where their rows do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.monitor.run import Run

COMPARED = ("train/", "eval/", "guard/", "inside/", "data/")
"""Sections that a replay gives again bit for bit; times and memory never do."""
IDENTITIES = ("step", "tokens", "sample_digest", "state_digest", "excluded", "cause")


@dataclass(frozen=True)
class RowDifference:
    """The first value that differs."""

    batch_index: int
    name: str
    left: Any
    """Value in the first run; None where it has none."""
    right: Any


@dataclass(frozen=True)
class Comparison:
    """What ``compare`` found."""

    config: tuple[tuple[str, Any, Any], ...]
    """Dotted key, value in the first, value in the second; None where absent."""
    first_difference: RowDifference | None
    common_rows: int
    """Batches that both runs have."""
    rows: tuple[int, int]
    """Batches of each."""

    @property
    def same(self) -> bool:
        """Same rows, all of them; the configs may still differ in what decides nothing."""
        return self.first_difference is None and self.rows[0] == self.rows[1] == self.common_rows


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys; elements of lists are numbered."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from flat({str(place): item for place, item in enumerate(value)}, f"{name}.")
        else:
            yield name, value


def config_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Dotted key, value on the left, value on the right, for every key where they are not the same."""
    a, b = dict(flat(left)), dict(flat(right))
    keys = [*a, *(key for key in b if key not in a)]
    return [(key, a.get(key), b.get(key)) for key in keys if key not in a or key not in b or a[key] != b[key]]


def compare(left: Run, right: Run) -> Comparison:
    """Configs and surviving rows of two runs."""
    a = {row["batch_index"]: row for row in left.rows}
    b = {row["batch_index"]: row for row in right.rows}
    common = sorted(a.keys() & b.keys())
    first = next((found for batch in common if (found := _row_difference(a[batch], b[batch]))), None)
    return Comparison(
        tuple(config_difference(left.config, right.config)), first, len(common), (len(left.rows), len(right.rows))
    )


def _row_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> RowDifference | None:
    names = [*IDENTITIES, *sorted(name for name in a.keys() | b.keys() if name.startswith(COMPARED))]
    for name in names:
        if a.get(name) != b.get(name):
            return RowDifference(a["batch_index"], name, a.get(name), b.get(name))
    return None
