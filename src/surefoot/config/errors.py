"""What is said when a config is wrong: all of it, at once."""

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(Exception):
    """A config that cannot be run. Exit code 2."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems: tuple[str, ...] = tuple(dict.fromkeys(problems))
        """Every mistake, each with its place, the rule and the way out."""
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...]]]:
        return ConfigError, (self.problems,)


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice a typist most likely meant, or None when nothing is near."""
    found = get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_choice(name: str, value: str, choices: Iterable[str]) -> str:
    """The sentence for a value outside a closed set, with the nearest member."""
    legal = list(choices)
    near = closest(value, legal)
    return f"{name} = {value!r} is not one of {', '.join(legal)}" + (f"; nearest: {near!r}" if near else "")
