"""Config to TOML and JSON and back; a recipe with files and flags laid over it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, TypeVar

from surefoot.config.decode import INVALID, Decoder
from surefoot.config.errors import ConfigError
from surefoot.config.flags import nested, read_flags
from surefoot.config.overlay import lay_over, read_toml
from surefoot.config.places import Places, Report, dotted
from surefoot.config.run import RunConfig
from surefoot.config.toml_write import toml_text
from surefoot.config.validate import broken_rules

Config = TypeVar("Config")


def to_dict(cfg: Any) -> dict[str, Any]:
    """The config as plain TOML values, every field present, lists for tuples."""
    return {field.name: _plain(getattr(cfg, field.name)) for field in dataclasses.fields(cfg)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def to_toml(cfg: Any) -> str:
    """The config as TOML in the order of its declaration; read back it gives an equal config."""
    return toml_text(to_dict(cfg))


def from_dict(cls: type[Config], data: dict[str, Any], *, where: str = "") -> Config:
    """The config of plain values. Raises ConfigError with every mistake, those between settings of a run included."""
    return _read(cls, data, Report(Places(where)))


def from_toml(cls: type[Config], file: FilePath) -> Config:
    """The config of one TOML file that gives everything required. Raises ConfigError with file and line."""
    values, lines = read_toml(file)
    places = Places(str(file), {path: f"{file}:{line}" for path, line in lines.items()})
    return _read(cls, values, Report(places))


def resolve(base: RunConfig, overlays: Sequence[FilePath], flags: Sequence[str]) -> RunConfig:
    """A recipe's config with TOML files laid over it from left to right, then flags. Raises ConfigError with every mistake."""
    report = Report(Places(f"recipe {base.recipe}"))
    values: Any = to_dict(base)
    for file in overlays:
        try:
            above, lines = read_toml(file)
        except ConfigError as error:
            report.problems.extend(error.problems)
            continue
        values = lay_over(RunConfig, values, above, (), report)
        for path, line in lines.items():
            report.places.give(path, f"{file}:{line}")
    for path, text in read_flags(flags, report):
        flag = f"--{dotted(path)}"
        report.places.give(path, flag)
        values = lay_over(RunConfig, values, nested(path, text), (), report)
        report.places.give(path, flag)  # again: replacing a value forgets where it was given
    return _read(RunConfig, values, report)


def _read(cls: type[Config], values: dict[str, Any], report: Report) -> Config:
    decoder = Decoder(cls, report)
    if cls is not RunConfig:
        found = decoder.value(cls, values, ())
        if found is INVALID or report.problems:
            raise ConfigError(report.problems)
        return found  # type: ignore[no-any-return]
    fields = decoder.fields(cls, values, ())
    for rule in broken_rules(fields):
        report.add_rule([tuple(key.split(".")) for key in rule.keys], rule.text)
    if report.problems:
        raise ConfigError(report.problems)
    return cls(**fields)
