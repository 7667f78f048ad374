"""Help of ``surefoot train``: what is used most first, and every setting on demand."""

import dataclasses
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_origin

from surefoot.cli.exit_codes import MEANINGS
from surefoot.cli.train_args import OPTIONS, SWITCHES, sort_words
from surefoot.config.codec import to_dict
from surefoot.config.run import RunConfig
from surefoot.config.schema import Setting, by_kind, default_text, element, kind_of, settings, type_name, variants
from surefoot.config.texts import field_text
from surefoot.config.toml_write import toml_value
from surefoot.recipes.index import RECIPES

COMMON = (
    "steps",
    "bound.kind",
    "seed",
    "optim.lr",
    "optim.schedule.kind",
    "optim.warmup_steps",
    "data.batch_size",
    "data.seq_len",
    "parallel.precision",
    "parallel.micro_batch_size",
    "parallel.compile",
    "checkpoint.every",
    "eval.every",
)
"""The settings that are changed most, in the order of the short help."""

_NARROWEST, _WIDEST = 60, 120


def help_for(argv: Sequence[str]) -> str | None:
    """The help a command line asks for (``-h``, ``--help``, ``--help-all``), or None."""
    asked = {"-h", "--help", "--help-all"}.intersection(argv)
    if not asked:
        return None
    words = sort_words([word for word in argv if word not in asked])
    recipe = words.recipe if words.recipe in RECIPES else None
    values = to_dict(RECIPES[recipe]()) if recipe else None
    return long_help(values) if "--help-all" in asked else short_help(values)


def short_help(values: dict[str, Any] | None) -> str:
    """Usage, the command's flags and the settings used most; defaults of the recipe when one is named."""
    lines = ["usage: surefoot train RECIPE [--key value ...]", ""]
    lines += _wrap("Trains a recipe. The same command continues a run that was stopped, bit for bit.", "")
    lines += ["", f"recipes: {', '.join(RECIPES)}", ""]
    lines += [line for name, text in SWITCHES.items() for line in _entry(name, text)]
    lines += [line for name, (value, text) in OPTIONS.items() for line in _entry(f"{name} {value}", text)]
    lines += _entry("--help-all", "every setting, with its meaning, type and default")
    lines += ["", "settings used most (any setting can be given, as --key value or --key=value):", ""]
    lines += [line for key in COMMON for line in _setting_lines(key, *_find(key), values)]
    codes = ", ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items())
    return "\n".join([*lines, "", *_wrap(f"exit codes: {codes}", "")])


def long_help(values: dict[str, Any] | None) -> str:
    """Every setting of a run by table; all variants of a union, the recipe's own first."""
    lines = ["usage: surefoot train RECIPE [--key value ...]", ""]
    lines += _wrap(
        "Lists are written as JSON, TOML or with commas; an item of a list is --data.sources.0.weight; "
        "a table of another kind is chosen by --TABLE.kind NAME and starts from that kind's defaults.",
        "",
    )
    return "\n".join([*lines, *_table(RunConfig, "", values, "")])


def _table(table: type, prefix: str, values: Any, title: str) -> Iterator[str]:
    """One table: its meaning, its settings, then the tables inside it."""
    if title:
        yield from ("", title)
        yield from _wrap(_first_paragraph(table), "  ")
    yield ""
    inner = []
    for name, setting in settings(table).items():
        if name == "kind" or (not title and name == "recipe"):
            continue
        if variants(setting.annotation):
            inner.append((f"{prefix}{name}", setting, values.get(name) if isinstance(values, dict) else None))
            continue
        yield from _setting_lines(f"{prefix}{name}", table, setting, values, name)
        if variants(element(setting.annotation)) and get_origin(setting.annotation) is tuple:
            item = Setting(name, element(setting.annotation), setting.default)
            held = values.get(name) if isinstance(values, dict) else None
            inner.append((f"{prefix}{name}.0", item, held[0] if held else None))
    for key, setting, held in inner:
        yield from _variants(key, setting, held)


def _variants(key: str, setting: Setting, values: Any) -> Iterator[str]:
    kinds = by_kind(setting.annotation)
    if len(kinds) < 2:
        yield from _table(variants(setting.annotation)[0], f"{key}.", values, f"{key}:")
        return
    chosen = values.get("kind") if isinstance(values, dict) else _default_kind(setting)
    for kind, table in sorted(kinds.items(), key=lambda pair: pair[0] != chosen):
        mark = ", the one of this recipe" if isinstance(values, dict) and kind == chosen else ""
        held = values if kind == chosen else None
        yield from _table(table, f"{key}.", held, f"--{key}.kind {kind}{mark}:")


def _default_kind(setting: Setting) -> str | None:
    table: type = type(setting.default)
    return kind_of(table) if dataclasses.is_dataclass(table) else None


def _setting_lines(key: str, table: type, setting: Setting, values: Any, name: str = "") -> Iterator[str]:
    held = values
    for part in (name or key).split("."):
        if not isinstance(held, dict) or part not in held:
            default = default_text(setting)
            break
        held = held[part]
    else:
        default = "given below" if variants(element(setting.annotation)) and held else f"default {_value(held)}"
    yield from _entry(f"--{key}  ({type_name(setting.annotation)}; {default})", field_text(table, setting))


def _value(value: Any) -> str:
    """A value as one types it after a flag."""
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        return ",".join(map(_value, value)) or "empty"
    return value if isinstance(value, str) and value else toml_value(value)


def _find(key: str) -> tuple[type, Setting]:
    """The table and setting of a dotted key that is the same in every variant, or is a ``kind``."""
    table: type = RunConfig
    *outer, name = key.split(".")
    for part in outer:
        holder, setting = table, settings(table)[part]
        table = variants(setting.annotation)[0]
    if name == "kind":
        return holder, Setting(part, Literal[tuple(by_kind(setting.annotation))], _default_kind(setting))
    return table, settings(table)[name]


def _entry(name: str, text: str) -> list[str]:
    return [f"  {name}", *_wrap(text, "      ")]


def _wrap(text: str, indent: str) -> list[str]:
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((100, 24)).columns))
    return textwrap.wrap(
        " ".join(text.replace("``", "").split()), width, initial_indent=indent, subsequent_indent=indent
    )


def _first_paragraph(table: type) -> str:
    return (table.__doc__ or "").strip().split("\n\n")[0]
