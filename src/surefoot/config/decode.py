"""Plain values to config, strictly: nothing unknown, nothing missing, nothing coerced, and every mistake at once."""

import math
from typing import Any, Literal, get_args, get_origin

from surefoot.config.errors import unknown_choice
from surefoot.config.places import Path, Report, dotted
from surefoot.config.schema import (
    by_kind,
    element,
    settings,
    table_for,
    type_name,
    variants,
)
from surefoot.config.text_value import FlagText, NotReadable, read_text
from surefoot.config.unknown_key import unknown_key


class _Invalid:
    """Stands for a value whose mistake has been reported."""


INVALID = _Invalid()


class Decoder:
    """Reads values of ``root`` and reports what is wrong with them."""

    def __init__(self, root: type, report: Report) -> None:
        self.root = root
        self.report = report

    def value(self, annotation: Any, value: Any, path: Path) -> Any:
        """The value of one setting, or ``INVALID``."""
        if isinstance(value, FlagText):
            try:
                value = read_text(annotation, value)
            except NotReadable as error:
                return self._wrong(path, f"{dotted(path)}: {error}")
        if variants(annotation):
            return self._table(annotation, value, path)
        if get_origin(annotation) is Literal:
            return self._choice(annotation, value, path)
        if get_origin(annotation) is tuple:
            return self._items(annotation, value, path)
        if get_origin(annotation) is dict:
            return self._free_table(annotation, value, path)
        return self._scalar(annotation, value, path)

    def fields(self, table: type, value: dict[str, Any], path: Path, annotation: Any = None) -> dict[str, Any]:
        """The settings of one table that could be read; the others are reported and left out."""
        known = settings(table)
        for key in value:
            if key not in known:
                self.report.add((*path, key), unknown_key(self.root, table, annotation or table, (*path, str(key))))
        found = {}
        for name, setting in known.items():
            if name in value:
                read = self.value(setting.annotation, value[name], (*path, name))
                if read is not INVALID:
                    found[name] = read
            elif setting.required:
                self.report.add(path, f"{dotted((*path, name))} is missing: {type_name(setting.annotation)}")
        return found

    def _wrong(self, path: Path, text: str) -> Any:
        self.report.add(path, text)
        return INVALID

    def _not_a(self, annotation: Any, value: Any, path: Path) -> Any:
        return self._wrong(path, f"{dotted(path)} = {_shown(value)} is not {type_name(annotation)}")

    def _table(self, annotation: Any, value: Any, path: Path) -> Any:
        if not isinstance(value, dict):
            return self._not_a(annotation, value, path)
        table = table_for(annotation, value)
        if table is None:
            kinds = by_kind(annotation)
            key = (*path, "kind")
            if "kind" not in value:
                return self._wrong(path, f"{dotted(key)} is missing: one of {', '.join(kinds)}")
            return self._wrong(key, unknown_choice(dotted(key), str(value["kind"]), kinds))
        before = len(self.report.problems)
        found = self.fields(table, value, path, annotation)
        return table(**found) if len(self.report.problems) == before else INVALID

    def _choice(self, annotation: Any, value: Any, path: Path) -> Any:
        choices = get_args(annotation)
        if isinstance(value, str) and value in choices:
            return str(value)
        return self._wrong(path, unknown_choice(dotted(path), str(value), map(str, choices)))

    def _items(self, annotation: Any, value: Any, path: Path) -> Any:
        if not isinstance(value, list | tuple):
            return self._not_a(annotation, value, path)
        items = [self.value(element(annotation), item, (*path, str(n))) for n, item in enumerate(value)]
        return INVALID if any(item is INVALID for item in items) else tuple(items)

    def _free_table(self, annotation: Any, value: Any, path: Path) -> Any:
        if not isinstance(value, dict):
            return self._not_a(annotation, value, path)
        return self._free(value, path)

    def _free(self, value: Any, path: Path) -> Any:
        """A value of no declared type: TOML's, without dates and without numbers that JSON cannot hold."""
        if isinstance(value, FlagText):
            value = read_text(Any, value)
        if isinstance(value, dict):
            items = {str(key): self._free(item, (*path, str(key))) for key, item in value.items()}
            return INVALID if any(item is INVALID for item in items.values()) else items
        if isinstance(value, list | tuple):
            listed = [self._free(item, (*path, str(n))) for n, item in enumerate(value)]
            return INVALID if any(item is INVALID for item in listed) else listed
        if isinstance(value, float) and not math.isfinite(value):
            return self._wrong(path, f"{dotted(path)} = {value} is not finite")
        if isinstance(value, str | int | float):
            return value
        return self._wrong(path, f"{dotted(path)} = {_shown(value)} is not a text, number, true, false, list or table")

    def _scalar(self, annotation: Any, value: Any, path: Path) -> Any:
        if annotation is float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                return self._not_a(annotation, value, path)
            try:
                number = float(value)
            except OverflowError:  # a whole number beyond any float
                number = math.inf
            return number if math.isfinite(number) else self._wrong(path, f"{dotted(path)} = {number} is not finite")
        if annotation not in (bool, int, str):
            raise TypeError(f"{dotted(path)} is declared as {annotation}, which no config file can hold")
        if not isinstance(value, annotation) or (annotation is int and isinstance(value, bool)):
            return self._not_a(annotation, value, path)
        if annotation is int and not -(2**63) <= value < 2**63:
            return self._wrong(path, f"{dotted(path)} = {value} does not fit 64 bits, TOML's whole numbers")
        return value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
