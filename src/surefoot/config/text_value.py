"""Values written as text on the command line, read by the type of the setting they are for."""

import json
import tomllib
from typing import Any, Literal, get_origin

from surefoot.config.schema import element, kind_of, type_name, variants


class FlagText(str):
    """A value as typed after a flag; its meaning waits for the setting's type."""

    __slots__ = ()


class NotReadable(ValueError):
    """The text is no value of the type; the message says what would be."""


def read_text(annotation: Any, text: FlagText) -> Any:
    """The value a text stands for under a setting's type. Raises :class:`NotReadable`."""
    if annotation is str or get_origin(annotation) is Literal:
        return str(text)
    if annotation is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    elif annotation is int:
        return _whole_number(text)
    elif annotation is float:
        try:
            return float(text)
        except ValueError:
            pass
    elif get_origin(annotation) is tuple:
        return _items(annotation, text)
    else:
        return _structured(annotation, text)
    raise NotReadable(f"{str(text)!r} is not {type_name(annotation)}")


def structure(text: str) -> Any:
    """A JSON or TOML value, or the text itself when it is neither."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text


def _whole_number(text: FlagText) -> int:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        near = float(text)
    except ValueError:
        near = float("nan")
    hint = f"; write {int(near)}" if near.is_integer() else ""
    raise NotReadable(f"{str(text)!r} is not a whole number{hint}")


def _items(annotation: Any, text: FlagText) -> Any:
    if not text.strip():
        return []
    if text.lstrip().startswith("["):
        value = structure(text)
        if isinstance(value, list):
            return value
        raise NotReadable(f"{str(text)!r} is neither a JSON nor a TOML list")
    if variants(element(annotation)):
        raise NotReadable(f"{str(text)!r} is not {type_name(annotation)}: write a JSON or TOML list of tables")
    return [FlagText(item.strip()) for item in text.split(",")]


def _structured(annotation: Any, text: FlagText) -> Any:
    value = structure(text)
    if isinstance(value, str) and value == text and (variants(annotation) or get_origin(annotation) is dict):
        kinds = [kind_of(table) for table in variants(annotation)]
        hint = f"give its kind as .kind {text}" if text in kinds else "write a JSON or TOML table"
        raise NotReadable(f"{str(text)!r} is not {type_name(annotation)}: {hint}")
    return str(value) if isinstance(value, FlagText) else value
