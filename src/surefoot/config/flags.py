"""``--key value`` and ``--key=value``: settings given on the command line."""

from collections.abc import Sequence
from typing import Any

from surefoot.config.places import Path, Report
from surefoot.config.text_value import FlagText

COMMAND_LINE = "command line"


def read_flags(arguments: Sequence[str], report: Report) -> list[tuple[Path, FlagText]]:
    """Dotted keys and their texts, outer keys first and ``kind`` before its neighbours; what is no flag is reported."""
    found: list[tuple[Path, FlagText]] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or word == "--":
            report.say(COMMAND_LINE, f"{word!r} is not a flag; settings are given as --key value")
            continue
        key, has_value, value = word.removeprefix("--").partition("=")
        if not has_value:
            if not waiting or waiting[0].startswith("--"):
                report.say(COMMAND_LINE, f"--{key} needs a value: --{key} VALUE")
                continue
            value = waiting.pop(0)
        if not all(key.split(".")):
            report.say(COMMAND_LINE, f"--{key} is not a setting: a part of the dotted key is empty")
            continue
        found.append((tuple(key.split(".")), FlagText(value)))
    return sorted(found, key=lambda flag: (len(flag[0]), flag[0][-1] != "kind"))


def nested(path: Path, value: Any) -> dict[str, Any]:
    """The tables around one value."""
    for part in reversed(path):
        value = {part: value}
    return dict(value)
