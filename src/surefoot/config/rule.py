"""A broken rule between settings."""

from typing import NamedTuple

_NEAR = 4096


class Rule(NamedTuple):
    """A broken rule: the settings it is about, the one to point at first, and what is wrong."""

    keys: tuple[str, ...]
    text: str


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of ``step`` around a value, as the end of an error."""
    below = value // step * step
    return ", ".join(str(near) for near in (below, below + step) if near > 0)


def nearest_divisors(value: int, wanted: int) -> list[int]:
    """The two divisors of ``value`` nearest to ``wanted``, smaller first; numbers far from it are not looked at."""
    candidates = range(max(1, wanted - _NEAR), min(value, wanted + _NEAR) + 1)
    divisors = [n for n in (1, *candidates, value) if value % n == 0]
    return sorted(sorted(set(divisors), key=lambda n: abs(n - wanted))[:2])
