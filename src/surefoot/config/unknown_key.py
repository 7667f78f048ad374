"""A key that is no setting: which one was meant."""

from typing import Any

from surefoot.config.errors import closest
from surefoot.config.places import Path, dotted
from surefoot.config.schema import Setting, by_kind, default_text, every_setting, settings, type_name


def unknown_key(root: type, table: type, annotation: Any, path: Path) -> str:
    """Says that ``path`` is no setting of ``table`` (one variant of ``annotation``) and names the nearest with type and default.

    Looked for in this order: the other variants of the union, the table's own settings, the same name elsewhere below ``root``, the
    nearest whole key, the nearest name elsewhere.
    """
    key, name = dotted(path), path[-1]
    for kind, variant in by_kind(annotation).items():
        if variant is not table and name in settings(variant):
            here = settings(table)["kind"].default
            return f"{key} belongs to kind {kind!r}; here the kind is {here!r}"
    if near := closest(name, settings(table)):
        return _nearest(key, dotted((*path[:-1], near)), settings(table)[near])
    legal = dict(every_setting(root))
    by_name: dict[str, str] = {}
    for other in legal:
        by_name.setdefault(other.rpartition(".")[2], other)
    around = (other for other in legal if not key.startswith(f"{other}."))
    meant = by_name.get(name) or closest(key, around) or by_name.get(closest(name, by_name) or "")
    if meant is None:
        return f"{key} is not a setting; here are: {', '.join(settings(table))}"
    return _nearest(key, meant, legal[meant])


def _nearest(key: str, meant: str, setting: Setting) -> str:
    return f"{key} is not a setting; nearest: {meant} ({type_name(setting.annotation)}, {default_text(setting)})"
