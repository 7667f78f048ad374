"""One set of values laid over another: a recipe, then files, then flags."""

import tomllib
from pathlib import Path as FilePath
from typing import Any

from surefoot.config.errors import ConfigError
from surefoot.config.places import Path, Report, dotted
from surefoot.config.schema import element, settings, table_for, type_name, variants
from surefoot.config.text_value import FlagText, structure
from surefoot.config.toml_lines import key_lines


def read_toml(file: FilePath) -> tuple[dict[str, Any], dict[Path, int]]:
    """The values of a TOML file and the line of every key. Raises ConfigError with file and line."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: is not UTF-8 text: {error.reason} at byte {error.start}"]) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_syntax_error(file, text, str(error))]) from error
    except ValueError as error:  # a number with more digits than Python reads
        raise ConfigError([f"{file}: cannot be read: {error}"]) from error
    return values, key_lines(text.replace("\r\n", "\n"))


def _syntax_error(file: FilePath, text: str, message: str) -> str:
    what, _, where = message.rpartition(" (at ")
    line = text.count("\n") + 1
    if where.startswith("line "):
        line = int(where.removeprefix("line ").split(",")[0])
    shown = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else "the end of the file"
    return f"{file}:{line}: is not TOML: {what or message}: {shown}"


def lay_over(annotation: Any, below: Any, above: Any, path: Path, report: Report) -> Any:
    """``above`` over ``below``: tables merge, a table of another kind replaces, items of a list are patched by index."""
    if isinstance(below, FlagText) and isinstance(above, dict):
        below = structure(below)
    if isinstance(below, list) and isinstance(above, dict):
        return _patch_items(annotation, below, above, path, report)
    if not isinstance(below, dict) or not isinstance(above, dict):
        if not isinstance(above, dict):
            report.places.forget(path)
        return above
    merged = dict(below)
    if variants(annotation) and "kind" in above and above["kind"] != below.get("kind"):
        merged = {}
        report.places.forget(path)
    table = table_for(annotation, {**merged, **above})
    known = settings(table) if table else {}
    for key, value in above.items():
        inner = known[key].annotation if key in known else Any
        merged[key] = lay_over(inner, merged.get(key), value, (*path, key), report)
    return merged


def _patch_items(annotation: Any, below: list[Any], above: dict[str, Any], path: Path, report: Report) -> list[Any]:
    items = list(below)
    for key, value in above.items():
        where = (*path, key)
        if not key.isdecimal():
            kind = type_name(annotation) if annotation is not Any else "a list"
            report.add(where, f"{dotted(where)}: {dotted(path)} is {kind}; name an item by its number, from 0")
        elif int(key) >= len(items):
            held = f"items 0 to {len(items) - 1}" if items else "no items"
            report.add(where, f"{dotted(where)}: {dotted(path)} has {held}; give the whole list to add one")
        else:
            items[int(key)] = lay_over(element(annotation), items[int(key)], value, where, report)
    return items
