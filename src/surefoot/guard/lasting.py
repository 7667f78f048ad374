"""Conditions that last: one finding when they begin, silence until they have ended."""

from collections.abc import Callable

from surefoot.guard.finding import Finding


class Lasting:
    """Collects the findings of one set of signals; a condition already known is not said again."""

    def __init__(self, active: tuple[str, ...]) -> None:
        self._active = set(active)
        self.findings: list[Finding] = []

    @property
    def active(self) -> tuple[str, ...]:
        """Conditions that hold now, those that could not be judged this time included."""
        return tuple(sorted(self._active))

    def see(self, key: str, begins: bool, lasts: bool, say: Callable[[], Finding]) -> None:
        """A condition that begins at one threshold and ends at a milder one (hysteresis)."""
        if key in self._active:
            if not begins and not lasts:
                self._active.remove(key)
        elif begins:
            self._active.add(key)
            self.findings.append(say())

    def escalate(self, key: str, level: int, lasts: bool, say: Callable[[], Finding]) -> None:
        """A condition with levels, 0 and up (-1: it does not begin): said again each time that it reaches a higher one, until it has ended."""
        mark = f"{key}#"
        known = max((int(name.removeprefix(mark)) for name in self._active if name.startswith(mark)), default=-1)
        if level > known:
            self._active.discard(f"{mark}{known}")
            self._active.add(f"{mark}{level}")
            self.findings.append(say())
        elif level < 0 and not lasts:
            self._active.discard(f"{mark}{known}")
