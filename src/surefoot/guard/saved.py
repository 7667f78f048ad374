"""Frozen dataclasses of plain values, back from JSON."""

import dataclasses
import types
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Saved = TypeVar("Saved")


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def thawed(cls: type[Saved], data: dict[str, Any]) -> Saved:
    """The value whose ``asdict`` was written as JSON: lists become tuples. Missing fields take their defaults, unknown ones are dropped."""
    kind: Any = cls
    hints = _hints(kind)
    fields = {
        field.name: _value(hints[field.name], data[field.name])
        for field in dataclasses.fields(kind)
        if field.name in data
    }
    return cls(**fields)


def _value(annotation: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return thawed(annotation, value)
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        if len(inner) == 2 and isinstance(inner[1], types.EllipsisType):
            return tuple(_value(inner[0], item) for item in value)
        return tuple(_value(kind, item) for kind, item in zip(inner, value, strict=True))
    return value
