"""Two configs side by side, by dotted key."""

from typing import Any

from surefoot.config.codec import to_dict
from surefoot.config.toml_write import toml_value

ABSENT = "(absent)"
"""Shown for a setting that the other variant of a union does not have."""


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of plain values under their dotted keys; items of a list of tables by index, other lists whole."""
    if isinstance(values, dict):
        pairs = [(str(key), item) for key, item in values.items()]
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        pairs = [(str(n), item) for n, item in enumerate(values)]
    else:
        return {prefix: values}
    if not pairs:
        return {prefix: values} if prefix else {}
    found: dict[str, Any] = {}
    for key, item in pairs:
        found |= flatten(item, f"{prefix}.{key}" if prefix else key)
    return found


def diff(a: Any, b: Any) -> list[tuple[str, str, str]]:
    """Dotted key, value in ``a``, value in ``b`` (TOML text) where two configs differ, in the order of ``a``."""
    left, right = flatten(to_dict(a)), flatten(to_dict(b))
    rows = []
    for key in [*left, *(key for key in right if key not in left)]:
        shown = [toml_value(side[key]) if key in side else ABSENT for side in (left, right)]
        if shown[0] != shown[1]:
            rows.append((key, shown[0], shown[1]))
    return rows
