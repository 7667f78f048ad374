"""Completion of the command line: a script for the shell, which asks the program itself."""

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from surefoot.cli.main import COMMANDS
from surefoot.cli.train_args import OPTIONS, SWITCHES
from surefoot.config.errors import ConfigError, unknown_choice
from surefoot.config.run import RunConfig
from surefoot.config.schema import Setting, every_setting, variants
from surefoot.recipes.index import RECIPES

_BASH = """\
_surefoot() {
  local IFS=$'\\n'
  COMPREPLY=($(surefoot --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _surefoot surefoot
"""
SCRIPTS: dict[str, str] = {"bash": _BASH, "zsh": f"autoload -Uz bashcompinit && bashcompinit\n{_BASH}"}


def main(request: str, words: Sequence[str]) -> int:
    """``--completion SHELL`` prints the script; ``--complete WORD ...`` what the last word may become."""
    if request == "--complete":
        print("\n".join(candidates(words)))
        return 0
    shell = words[0] if words else ""
    if shell not in SCRIPTS:
        raise ConfigError([unknown_choice("shell", shell, SCRIPTS)])
    print(SCRIPTS[shell], end="")
    return 0


def candidates(words: Sequence[str]) -> list[str]:
    """Every word that the last one, still being typed, may become."""
    *before, current = words or [""]
    if not before:
        found = [*COMMANDS, "--help", "--version", "--completion"]
    elif before[0] == "train":
        found = _train(before[1:], current)
    elif before[0] == "config":
        found = ["show", "diff"] if len(before) == 1 else [*RECIPES]
    else:
        found = []
    return [word for word in found if word.startswith(current)]


def _train(before: Sequence[str], current: str) -> list[str]:
    previous = before[-1] if before else ""
    if previous in OPTIONS:
        return []  # a path or a key of another config: the shell's own completion serves better
    leaves = _leaves()
    if previous in leaves:
        return leaves[previous]
    if current.startswith("-"):
        return [*SWITCHES, *OPTIONS, "--help", "--help-all", *leaves]
    return [*RECIPES]


def _leaves() -> dict[str, list[str]]:
    """Flags of all settings that hold a value, with the values they may have where these are few."""
    found: dict[str, list[str]] = {}
    for key, setting in every_setting(RunConfig):
        if not variants(setting.annotation):
            found.setdefault(f"--{key}", []).extend(_choices(setting))
    return found


def _choices(setting: Setting) -> list[Any]:
    if get_origin(setting.annotation) is Literal:
        return list(get_args(setting.annotation))
    return ["true", "false"] if setting.annotation is bool else []
