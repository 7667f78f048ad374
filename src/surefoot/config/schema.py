"""What the dataclasses admit: settings, variants of a union, and how a type is called in an error."""

import dataclasses
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Setting:
    """One field of a config table."""

    name: str
    annotation: Any
    default: Any
    """Its default value, or ``MISSING`` when it must be given."""

    @property
    def required(self) -> bool:
        return self.default is MISSING


@cache
def settings(table: type) -> dict[str, Setting]:
    """The settings of one table in the order they are declared."""
    hints = get_type_hints(table)
    found = {}
    for field in dataclasses.fields(table):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found[field.name] = Setting(field.name, hints[field.name], default)
    return found


def variants(annotation: Any) -> tuple[type, ...]:
    """The tables an annotation admits; empty when it is no table."""
    if get_origin(annotation) in (Union, types.UnionType):
        members: tuple[type, ...] = get_args(annotation)
        return members if all(dataclasses.is_dataclass(member) for member in members) else ()
    return (annotation,) if isinstance(annotation, type) and dataclasses.is_dataclass(annotation) else ()


@cache
def kind_of(table: type) -> str | None:
    """The value of ``kind`` that tells this variant apart, or None for a table that is no variant."""
    kind = settings(table).get("kind")
    return None if kind is None else str(get_args(kind.annotation)[0])


def by_kind(annotation: Any) -> dict[str, type]:
    """Variants by their ``kind``."""
    return {kind: table for table in variants(annotation) if (kind := kind_of(table)) is not None}


def table_for(annotation: Any, value: Any) -> type | None:
    """The table that ``value`` is meant for: by its kind, or the only one there is."""
    found = variants(annotation)
    if isinstance(value, dict) and "kind" in value:
        kinds = by_kind(annotation)
        return kinds.get(value["kind"]) if isinstance(value["kind"], str) else None
    return found[0] if len(found) == 1 else None


def element(annotation: Any) -> Any:
    """Type of the items of a list setting (``tuple[X, ...]``)."""
    return get_args(annotation)[0] if get_origin(annotation) is tuple else Any


def type_name(annotation: Any) -> str:
    """A type in the words of a person who writes TOML."""
    if kinds := by_kind(annotation):
        return "a table of kind " + " | ".join(kinds)
    if variants(annotation) or get_origin(annotation) is dict:
        return "a table"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"a list, each item {type_name(element(annotation))}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(annotation, "any TOML value")


def default_text(setting: Setting) -> str:
    """The default as one word of an error: the value, the kind of a variant, or that there is none."""
    if setting.required:
        return "required"
    if dataclasses.is_dataclass(setting.default):
        kind = kind_of(type(setting.default))  # type: ignore[arg-type]
        return f"default {kind}" if kind else "has defaults"
    if isinstance(setting.default, bool):
        return f"default {str(setting.default).lower()}"
    if isinstance(setting.default, tuple | dict) and not setting.default:
        return "default empty"
    return f"default {setting.default!r}"


def every_setting(annotation: Any, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    """Every setting below a type under its dotted key, all variants of every union; list items as index 0."""
    for table in variants(annotation):
        for name, setting in settings(table).items():
            key = prefix + name
            yield key, setting
            inner = setting.annotation
            if get_origin(inner) is tuple:
                yield from every_setting(element(inner), key + ".0.")
            else:
                yield from every_setting(inner, key + ".")
