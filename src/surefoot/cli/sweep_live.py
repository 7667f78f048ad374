"""What a person sees while a sweep runs: a table that redraws on a terminal, a line per finished run in a log; on standard error."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from surefoot.monitor.wording import duration
from surefoot.scale.sweep_axes import Combination
from surefoot.scale.sweep_score import Score
from surefoot.scale.sweep_table import setting_heads, setting_rows
from surefoot.scale.trials import TrialResult, steps_done
from surefoot.train.budget import OPEN_END, steps_of

BEST = 8
"""Settings in the live table."""


class SweepWatch:
    """Follows a sweep."""

    def __init__(self, combinations: Sequence[Combination], folder: Path, live: Live | None) -> None:
        self.configs = {each.name: each.config for each in combinations}
        self._last_steps: dict[str, int] = {}
        self.folder, self.live = folder, live
        self.ended: dict[str, TrialResult] = {}
        self.found: Score | None = None
        self.ran, self.begun = 0, 0.0
        """Runs that ended since the first tick, and when that was."""

    def done(self, result: TrialResult, found: Score) -> None:
        """One result more."""
        self.ended[result.name], self.found = result, found
        self.ran += bool(self.begun)
        if not self.live:
            told = (
                f"loss {result.loss:.4f}, {result.seconds:.0f} s"
                if result.ending == "done"
                else f"{result.ending}: {result.reason}"
            )
            print(f"[{len(self.ended)}/{len(self.configs)}] {result.name}: {told}", file=sys.stderr, flush=True)

    def tick(self, running: Sequence[str]) -> None:
        """About once a second."""
        if self.live and not self.begun:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)  # the bar of shards being built
        self.begun = self.begun or time.monotonic()
        if self.live:
            self.live.update(self.picture(running), refresh=True)

    def picture(self, running: Sequence[str]) -> Group:
        """The best settings so far, and where the running ones are."""
        parts: list[Table | Text] = []
        if self.found:
            table = Table(box=None, pad_edge=False, header_style="bold")
            for head in setting_heads(self.found):
                table.add_column(head)
            for row in setting_rows(self.found, BEST):
                table.add_row(*row)
            parts.append(table)
        parts.append(Text(self.summary(running), style="bold"))
        parts += [Text(f"  {name}  step {steps_done(self.folder, name):,}{self._of(name)}") for name in running]
        return Group(*parts)

    def _of(self, name: str) -> str:
        """The last step of a run, where it is known before its end."""
        last = self._last_steps.setdefault(name, 0) or steps_of(self.configs[name])
        self._last_steps[name] = last
        return "" if last == OPEN_END else f"/{last:,}"

    def summary(self, running: Sequence[str]) -> str:
        """How far it is."""
        left = len(self.configs) - len(self.ended)
        took = time.monotonic() - self.begun
        eta = f", about {duration(took / self.ran * left)} left" if self.ran and left else ""
        now = f", {len(running)} running" if running else ""
        return f"{len(self.ended)} of {len(self.configs)} runs done{now}{eta}"


@contextmanager
def open_watch(combinations: Sequence[Combination], folder: Path) -> Iterator[SweepWatch]:
    """A watch on standard error, taken away at the end."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield SweepWatch(combinations, folder, None)
        return
    # No thread of its own: children are forked meanwhile.
    with Live(
        Text(""), console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as live:
        yield SweepWatch(combinations, folder, live)
