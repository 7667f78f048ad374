"""``surefoot config``: a config as TOML, and what differs between two."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from surefoot.cli.train_args import parse_train_args
from surefoot.config.codec import from_toml, to_dict, to_toml
from surefoot.config.diff import diff
from surefoot.config.errors import ConfigError, closest
from surefoot.config.fingerprint import changed_computation, fingerprint
from surefoot.config.run import RunConfig
from surefoot.recipes.index import RECIPES

_SHOW = "show RECIPE [--config FILE] [--key value ...]"


def main(argv: Sequence[str]) -> int:
    """Runs one ``surefoot config`` command."""
    parser = argparse.ArgumentParser(
        prog="surefoot config", description="Shows configs and compares them.", allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print a config whole", usage=f"surefoot config {_SHOW}", allow_abbrev=False)
    show.add_argument(
        "config", metavar="CONFIG", help="a recipe and settings as for `surefoot train`, a run folder, or a TOML file"
    )
    show.add_argument("--json", action="store_true", help="JSON on standard output")
    compare = actions.add_parser("diff", help="print the settings that differ", allow_abbrev=False)
    compare.add_argument("a", metavar="A", help="a recipe, a run folder, or a TOML file that is a whole config")
    compare.add_argument("b", metavar="B", help="the same")
    compare.add_argument("--json", action="store_true", help="JSON on standard output")
    if argv[:1] == ["show"] and len(argv) > 1 and not {"-h", "--help"}.intersection(argv):
        return _show(list(argv[1:]))
    arguments = parser.parse_args(argv)
    if arguments.action == "show":
        return _show([arguments.config])
    return _diff(arguments.a, arguments.b, as_json=arguments.json)


def read_config(name: str) -> RunConfig:
    """The config a person means: a recipe by name, the folder of a run, or a TOML file."""
    if name in RECIPES:
        return RECIPES[name]()
    path = Path(name)
    file = path / "config.toml" if path.is_dir() else path
    if not file.is_file():
        near = closest(name, RECIPES)
        hint = f"; nearest recipe: {near}" if near else f"; recipes: {', '.join(RECIPES)}"
        raise ConfigError([f"{name}: is no recipe, no run folder with a config.toml, and no file{hint}"])
    return from_toml(RunConfig, file)


def _show(words: list[str]) -> int:
    as_json = "--json" in words
    named = [word for word in words if word != "--json"]
    if len(named) == 1 and named[0] not in RECIPES and Path(named[0]).exists():
        config = read_config(named[0])
    else:
        config = parse_train_args(named).config
    if as_json:
        print(json.dumps({"fingerprint": fingerprint(config), "config": to_dict(config)}, indent=2))
    else:
        print(f"# fingerprint {fingerprint(config)}\n{to_toml(config)}", end="")
    return 0


def _diff(name_a: str, name_b: str, *, as_json: bool) -> int:
    a, b = read_config(name_a), read_config(name_b)
    rows = diff(a, b)
    deciding = set(changed_computation(a, b))
    if as_json:
        found = [{"key": key, "a": left, "b": right, "decides": key in deciding} for key, left, right in rows]
        print(json.dumps({"a": fingerprint(a), "b": fingerprint(b), "differences": found}, indent=2))
        return 0
    if not rows:
        print("the same config")
    width = max((len(key) for key, _, _ in rows), default=0)
    for key, left, right in rows:
        print(f"{key:<{width}}  {left} -> {right}" + ("" if key in deciding else "   (does not change the run)"))
    return 0
