"""The sentences that stand under the fields of a config, read from the source when help is asked for."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

from surefoot.config.schema import Setting, element, variants


@cache
def _module_texts(module: str) -> dict[str, dict[str, str]]:
    file = sys.modules[module].__file__
    if file is None:
        return {}
    found: dict[str, dict[str, str]] = {}
    for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef):
            found[statement.name] = _field_texts(statement.body)
    return found


def _field_texts(body: list[ast.stmt]) -> dict[str, str]:
    texts = {}
    for field, text in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            texts[field.target.id] = inspect.cleandoc(text.value.value)
    return texts


def field_text(table: type, setting: Setting) -> str:
    """What a setting means: the text under its field, or what its table or the items of its list are."""
    text = _module_texts(table.__module__).get(table.__name__, {}).get(setting.name, "")
    if text:
        return text
    inner = [*variants(setting.annotation), *variants(element(setting.annotation))]
    return inspect.cleandoc(inner[0].__doc__ or "") if len(inner) == 1 else ""
