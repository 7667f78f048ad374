"""What a person sees while a run trains: a live line on a terminal, plain lines in a log, events as sentences.

Progress goes to standard error, the summary at the end to standard output.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from surefoot.monitor.facts import RunFacts
from surefoot.monitor.sentences import sentence, tone
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.summary import Summary
from surefoot.monitor.summary_text import summary_text
from surefoot.monitor.wording import duration, percent, rate, short

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
        self._print_every = max(1, print_every)
        self._rich = RichConsole(file=stream or sys.stderr, force_terminal=terminal, highlight=False, soft_wrap=True)
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
                self._live.update(Text(self.line(report, self._rich.width - 1), no_wrap=True), refresh=True)
        elif report.step % self._print_every == 0 and report.step != self._printed_step:
            self._printed_step = report.step
            self._rich.print(Text(self.line(report, 0)))

    def event(self, kind: str, row: Mapping[str, Any]) -> None:
        """A ledger row or event, said as a sentence."""
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
        """The state of the run in one line; ``width`` 0 is all of it, else what fits, the least important dropped."""
        parts = self._parts(report, brief=0 < width < 100)
        while width and len(_joined(parts)) > width and len(parts) > 3:
            parts.remove(max(parts))
        text = _joined(parts)
        return text[:width] if width else text

    def _parts(self, report: StepReport, *, brief: bool) -> list[tuple[int, int, str]]:
        """(how soon it may be dropped, place in the line, text) of every figure there is."""
        value = report.metrics.get
        loss, smooth, norm = value("train/loss"), value("train/loss_smoothed"), value("train/gradient_norm")
        lr, speed, mfu = value("train/lr"), value("perf/tokens_per_s"), value("perf/mfu")
        memory = value("perf/memory_gib")
        total = self._facts.steps
        left = duration((total - report.step) * self._step_s) if self._step_s else "?"
        shown = [
            (0, f"step {report.step:,}/{total:,}" if not brief else f"{report.step}/{total}"),
            (1, None if loss is None else f"loss {loss:.3f}" + (f" ({smooth:.3f})" if brief and smooth else "")),
            (3, None if smooth is None or brief else f"smoothed {smooth:.3f}"),
            (4, None if norm is None else f"|g| {norm:.2f}" if brief else f"gradient norm {norm:.2f}"),
            (5, None if lr is None else f"lr {rate(lr)}"),
            (6, None if speed is None else f"{short(speed)} tok/s" if brief else f"{short(speed)} tokens/s"),
            (7, None if mfu is None else f"MFU {percent(mfu)}"),
            (8, None if memory is None else f"{memory:.1f} GiB"),
            (9, f"{short(report.tokens)} tok" if brief else f"{short(report.tokens)} tokens"),
            (2, f"ETA {left}"),
        ]
        return [(rank, place, text) for place, (rank, text) in enumerate(shown) if text]

    def _time(self, report: StepReport) -> None:
        """Average the wall time of recent steps; all of it, evaluations and checkpoints included."""
        now = time.monotonic()
        if self._last_report_at:
            took = now - self._last_report_at
            self._step_s = took if not self._step_s else self._step_s + (took - self._step_s) / RECENT
        else:
            self._step_s = report.metrics.get("perf/step_s", 0.0)
        self._last_report_at = now


def _joined(parts: list[tuple[int, int, str]]) -> str:
    return "  ".join(text for _, _, text in sorted(parts, key=lambda part: part[1]))


def print_summary(summary: Summary, *, as_json: bool = False, report: str = "", stream: TextIO | None = None) -> None:
    """The facts of a run to standard output, for a person or, with ``as_json``, for a program."""
    out = stream or sys.stdout
    if as_json:
        json.dump(summary.to_dict() | {"report": report}, out, indent=2)
        out.write("\n")
    else:
        out.write(summary_text(summary, report) + "\n")
    out.flush()
