"""The words after ``surefoot train``: its own flags, the recipe, and settings for the codec."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.config.codec import resolve
from surefoot.config.errors import ConfigError, closest, unknown_choice
from surefoot.config.run import RunConfig
from surefoot.config.schema import every_setting
from surefoot.recipes.index import RECIPES

SWITCHES: dict[str, str] = {
    "--fresh": "start over: an existing run folder is moved aside, never deleted",
    "--dry-run": "resolve and check everything, print the plan, write nothing",
    "--json": "facts as JSON on standard output",
}
OPTIONS: dict[str, tuple[str, str]] = {
    "--run": ("DIR", "run folder (default: runs/<recipe>-<six hex digits of the config fingerprint>)"),
    "--config": ("FILE", "TOML file laid over the recipe; repeat it, later files win"),
    "--world": (
        "N",
        "with --dry-run: plan the first of N ranks, memory and traffic, without them, without data and without a step",
    ),
    "--allow-change": ("KEY", "continue a run although this setting (or table) has changed; repeat it"),
}


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """One request to train."""

    recipe: str
    config: RunConfig
    """The recipe with files and flags laid over it, checked."""
    run: Path | None = None
    """Run folder; None is the default one."""
    fresh: bool = False
    dry_run: bool = False
    world: int = 0
    """Ranks to plan for; 0 is a dry run on this machine."""
    json: bool = False
    config_files: tuple[Path, ...] = ()
    allow_change: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """The words that were settings."""


@dataclass
class Words:
    """Command line words sorted by who reads them."""

    switches: set[str] = field(default_factory=set)
    values: dict[str, list[str]] = field(default_factory=dict)
    recipe: str | None = None
    flags: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def parse_train_args(argv: Sequence[str]) -> TrainArgs:
    """The request of a command line. Raises ConfigError with every mistake in flags, files and settings at once."""
    words = sort_words(argv)
    base = None
    if words.recipe is None:
        words.problems.append(f"command line: no recipe is named; there are: {', '.join(RECIPES)}")
    elif words.recipe not in RECIPES:
        words.problems.append("command line: " + unknown_choice("recipe", words.recipe, RECIPES))
    else:
        base = RECIPES[words.recipe]()
    files = tuple(Path(file) for file in words.values.get("--config", []))
    config = None
    if base is not None:
        try:
            config = resolve(base, files, words.flags)
        except ConfigError as error:
            words.problems.extend(error.problems)
    world = _ranks_of(words)
    if words.recipe is None or config is None or words.problems:
        raise ConfigError(words.problems)
    folders = words.values.get("--run", [])
    return TrainArgs(
        recipe=words.recipe,
        config=config,
        run=Path(folders[-1]) if folders else None,
        fresh="--fresh" in words.switches,
        dry_run="--dry-run" in words.switches,
        world=world,
        json="--json" in words.switches,
        config_files=files,
        allow_change=tuple(words.values.get("--allow-change", [])),
        flags=tuple(words.flags),
    )


def _ranks_of(words: Words) -> int:
    """Ranks to plan for, 0 where none are named; what is wrong with them goes to the problems."""
    given = words.values.get("--world", [])
    if not given:
        return 0
    if not given[-1].isdecimal() or int(given[-1]) < 1:
        words.problems.append(f"command line: --world {given[-1]} must be a number of ranks, 1 or more")
        return 0
    if "--dry-run" not in words.switches:
        words.problems.append(
            f"command line: --world {given[-1]} only plans: add --dry-run, or start as many ranks with torchrun"
        )
    return int(given[-1])


def sort_words(argv: Sequence[str]) -> Words:
    """Tells the command's own flags from the recipe and from settings; the latter stay as they are."""
    words = Words()
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        name, has_value, value = word.partition("=")
        if name in SWITCHES:
            words.switches.add(name)
            if has_value:
                words.problems.append(f"command line: {name} takes no value")
        elif name in OPTIONS:
            if not has_value:
                if not waiting or waiting[0].startswith("--"):
                    words.problems.append(f"command line: {name} needs a value: {name} {OPTIONS[name][0]}")
                    continue
                value = waiting.pop(0)
            words.values.setdefault(name, []).append(value)
        elif (meant := _own_flag_meant(name)) is not None:
            words.problems.append(f"command line: {name} is not a flag; nearest: {meant}")
            if not has_value and meant in OPTIONS and waiting and not waiting[0].startswith("--"):
                waiting.pop(0)
        elif word.startswith("-"):
            words.flags.append(word)
            if not has_value and waiting and not waiting[0].startswith("--"):
                words.flags.append(waiting.pop(0))
        elif words.recipe is None:
            words.recipe = word
        else:
            words.flags.append(word)  # the codec says what is wrong with it, beside the other mistakes
    return words


def _own_flag_meant(name: str) -> str | None:
    """The command's own flag that a mistyped word stands for; None for what may be a setting."""
    if not name.startswith("--") or "." in name:
        return None
    names = {key.rpartition(".")[2] for key, _ in every_setting(RunConfig)}
    if name.removeprefix("--") in names:
        return None  # a setting without its table: the codec knows where it belongs
    near = closest(name, [*SWITCHES, *OPTIONS, *(f"--{key}" for key in sorted(names))])
    return near if near in SWITCHES or near in OPTIONS else None
