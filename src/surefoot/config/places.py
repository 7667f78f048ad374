"""Where each setting was given, so that an error can point there."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Path = tuple[str, ...]
"""A dotted key as its parts; items of a list by their index."""


def dotted(path: Path) -> str:
    """The key as written in TOML and in flags."""
    return ".".join(path)


@dataclass
class Places:
    """File and line, or flag, by key; ``fallback`` for what the recipe gave."""

    fallback: str
    given: dict[Path, str] = field(default_factory=dict)

    def give(self, path: Path, place: str) -> None:
        """A value was set here."""
        self.given[path] = place

    def forget(self, path: Path) -> None:
        """The value at ``path`` is replaced whole: nothing inside it was given where it used to be."""
        for key in [key for key in self.given if key[: len(path)] == path]:
            del self.given[key]

    def of(self, path: Path) -> str:
        """The place of a setting, of what was given inside it, or of the closest table around it."""
        if path not in self.given:
            inside = (place for key, place in self.given.items() if key[: len(path)] == path)
            if (place := next(inside, None)) is not None and path:
                return place
        for end in range(len(path), 0, -1):
            for key in (path[:end], (*path[:end], "kind")):
                if key in self.given:
                    return self.given[key]
        return self.fallback

    def of_any(self, paths: Sequence[Path]) -> str:
        """The place where the first of these settings was given; of a rule between several."""
        return next((self.given[path] for path in paths if path in self.given), self.fallback)


@dataclass
class Report:
    """Collects every mistake with its place."""

    places: Places
    problems: list[str] = field(default_factory=list)

    def add(self, path: Path, text: str) -> None:
        """A mistake at one setting."""
        self.say(self.places.of(path), text)

    def add_rule(self, paths: Sequence[Path], text: str) -> None:
        """A mistake between settings."""
        self.say(self.places.of_any(paths), text)

    def say(self, place: str, text: str) -> None:
        """A mistake at a place that is no setting."""
        self.problems.append(f"{place}: {text}" if place else text)
