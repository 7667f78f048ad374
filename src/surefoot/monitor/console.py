"""What a person sees while a run trains: a live line on a terminal, plain lines in a log, events as sentences.

Progress goes to standard error, the summary at the end to standard output.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from surefoot.monitor.facts import RunFacts
from surefoot.monitor.sentences import sentence, tone
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.summary import Summary
from surefoot.monitor.summary_text import summary_text
from surefoot.monitor.wording import duration, percent, rate, several, short

REFRESH_S = 0.2
"""Least time between two drawings of the live line."""
RECENT = 20
"""Steps that the estimate of the remaining time looks back, roughly."""

_STYLES = {"good": "green", "plain": "", "warning": "yellow"}


class ConsoleWatcher:
    """Follows a run on standard error. Gets reports and events, returns nothing, changes nothing."""

    def __init__(
        self, facts: RunFacts, *, print_every: int, stream: TextIO | None = None, terminal: bool | None = None
    ) -> None:
        """``terminal`` overrides whether the stream is one; ``print_every`` is in steps, for logs."""
        self._facts = facts
        self._goal = facts.steps
        self._print_every = max(1, print_every)
        self._rich = RichConsole(file=stream or sys.stderr, force_terminal=terminal, highlight=False)
        # On a terminal lines break between words; in a log they stay whole.
        self._rich.soft_wrap = not self._rich.is_terminal
        self._live: Live | None = None
        self._drawn_at = 0.0
        self._step_s = 0.0
        self._last_report_at = 0.0
        self._printed_step = -1

    def start(self) -> None:
        """The first line; on a terminal, the live line below it."""
        self._rich.print(Text(self._facts.line(), style="bold"))
        if self._rich.is_terminal:
            self._live = Live(Text(""), console=self._rich, auto_refresh=False, transient=True)
            self._live.start()

    def step(self, report: StepReport) -> None:
        """One consumed batch."""
        self._time(report)
        if self._live:
            now = time.monotonic()
            if now - self._drawn_at >= REFRESH_S:
                self._drawn_at = now
                self._live.update(Text(self.line(report, self._rich.width)), refresh=True)
        elif report.step % self._print_every == 0 and report.step != self._printed_step:
            self._printed_step = report.step
            self._rich.print(Text(self.line(report, 0)))

    def event(self, kind: str, row: Mapping[str, Any]) -> None:
        """A ledger row or event, said as a sentence."""
        if kind == "horizon":
            self._goal = int(row["last_step"])
        self._rich.print(Text(sentence(kind, row), style=_STYLES[tone(kind, row)]))

    def say(self, text: str) -> None:
        """Something a person should know: a repaired file, a full disk."""
        self._rich.print(Text(text, style="yellow"))

    def close(self) -> None:
        """Take the live line away; twice is once."""
        if self._live:
            self._live.stop()
            self._live = None

    def line(self, report: StepReport, width: int) -> str:
        """The state of the run in one line, or broken between figures into lines that fit; ``width`` 0 is no limit."""
        lines: list[str] = []
        for figure in self._figures(report):
            if lines and (not width or len(lines[-1]) + 2 + len(figure) <= width):
                lines[-1] += f"  {figure}"
            else:
                lines.append(figure)
        return "\n".join(lines)

    def _figures(self, report: StepReport) -> list[str]:
        """Every figure there is, with its name or unit."""
        value = report.metrics
        total = self._goal
        left = self._left(report)
        shown: list[tuple[str, Callable[[float], str]]] = [
            ("train/loss", lambda x: f"loss {x:.3f}"),
            ("train/loss_smoothed", lambda x: f"smoothed {x:.3f}"),
            ("train/gradient_norm", lambda x: f"gradient norm {x:.2f}"),
            ("train/heads_clipped", lambda x: several(round(x), "head") + " clipped"),
            ("train/lr", lambda x: f"lr {rate(x)}"),
            ("train/noise_scale", lambda x: f"critical batch {short(x)} tokens"),
            ("perf/tokens_per_s", lambda x: f"{short(x)} tokens/s"),
            ("perf/mfu", lambda x: f"MFU {percent(x)}"),
            ("perf/memory_gib", lambda x: f"{x:.1f} GiB"),
        ]
        figures = [wording(value[name]) for name, wording in shown if name in value]
        step = f"step {report.step:,}/{total:,}" if total else f"step {report.step:,}"
        return [step, *figures, f"{short(report.tokens)} tokens", f"ETA {left}"]

    def _left(self, report: StepReport) -> str:
        """The time that remains: by the pace lately, or what a bound of time leaves while it has not become steps."""
        if self._goal:
            return duration((self._goal - report.step) * self._step_s) if self._step_s else "?"
        return duration(max(self._facts.bound_s - report.metrics.get("perf/train_s", 0.0), 0.0))

    def _time(self, report: StepReport) -> None:
        """Average the wall time of recent steps; all of it, evaluations and checkpoints included."""
        now = time.monotonic()
        if self._last_report_at:
            took = now - self._last_report_at
            self._step_s = took if not self._step_s else self._step_s + (took - self._step_s) / RECENT
        else:
            self._step_s = report.metrics.get("perf/step_s", 0.0)
        self._last_report_at = now


def print_summary(summary: Summary, *, as_json: bool = False, report: str = "", stream: TextIO | None = None) -> None:
    """The facts of a run to standard output, for a person or, with ``as_json``, for a program."""
    out = stream or sys.stdout
    if as_json:
        json.dump(summary.to_dict() | {"report": report}, out, indent=2)
        out.write("\n")
    else:
        out.write(summary_text(summary, report) + "\n")
    out.flush()
