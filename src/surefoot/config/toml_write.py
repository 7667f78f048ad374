"""TOML text of plain values: stable order, and read back it gives the same values."""

import json
import re
from collections.abc import Iterator
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(values: dict[str, Any]) -> str:
    """A TOML document. Scalars of a table come before its tables, as TOML needs; otherwise the order is kept."""
    return "\n".join(_table(values, ())).strip("\n") + "\n"


def toml_value(value: Any) -> str:
    """One value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        if not value:
            return "{}"
        return "{ " + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    raise TypeError(f"TOML has no value for {value!r} of type {type(value).__name__}")


def _key(part: str) -> str:
    return part if _BARE.fullmatch(part) else toml_value(part)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_table(item) for item in value)


def _table(values: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    for key, value in values.items():
        if not _is_table(value) and not _is_tables(value):
            yield f"{_key(key)} = {toml_value(value)}"
    for key, value in values.items():
        header = ".".join(_key(part) for part in (*path, key))
        if _is_table(value):
            yield from ("", f"[{header}]", *_table(value, (*path, key)))
        elif _is_tables(value):
            for item in value:
                yield from ("", f"[[{header}]]", *_table(item, (*path, key)))
