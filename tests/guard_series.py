"""Series of steps for tests of the detectors: fed as a run would feed them, refused where a device would refuse."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from surefoot.config.guard import Thresholds
from surefoot.guard.detectors import DetectorState, Scores, accept_level, limits_of, observe_step
from surefoot.guard.finding import Finding
from surefoot.guard.signals import StepSignals

THRESHOLDS = Thresholds()


def step(loss: float, norm: float = 1.0, **more: Any) -> StepSignals:
    """Signals of one step; ``Watch`` fills in counters."""
    return StepSignals(batch_index=-1, step=-1, loss=loss, gradient_norm=norm, num_targets=1000, **more)


class Watch:
    """Detectors on a run: ``batch_index`` and ``step`` advance as DESIGN section 3 says."""

    def __init__(self, thresholds: Thresholds = THRESHOLDS, state: DetectorState | None = None) -> None:
        self.thresholds = thresholds
        self.state = state or DetectorState()
        self.batch_index = self.step = 0
        self.findings: list[Finding] = []
        self.scores = Scores()

    def see(self, signals: StepSignals) -> tuple[Finding, ...]:
        """One batch, refused where it is beyond a limit."""
        limits = limits_of(self.state, self.thresholds, signals.regime)
        refused = (
            not signals.finite
            or signals.loss > limits.loss
            or signals.gradient_norm > limits.gradient_norm
            or signals.document_loss_max > limits.document_loss
        )
        self.step += not refused
        signals = replace(signals, batch_index=self.batch_index, step=self.step, applied=not refused)
        detected = observe_step(self.state, signals, self.thresholds)
        self.batch_index += 1
        self.state, self.scores = detected.state, detected.scores
        self.findings += detected.findings
        return detected.findings

    def all(self, series: Iterable[StepSignals]) -> "Watch":
        """Many batches; a level is accepted after eight rejections in a row, as the guard does."""
        for signals in series:
            self.see(signals)
            if len(self.state.loss.rejected) >= 8:
                self.state = accept_level(self.state)
        return self

    def alarms(self) -> list[tuple[int, str]]:
        """(batch, kind) of every alarm so far."""
        return [(f.batch_index, f.kind) for f in self.findings if f.severity == "alarm"]


def calm(
    num_steps: int, loss: float = 2.2, norm: float = 0.25, sigma: float = 0.02, seed: int = 0, **more: Any
) -> list[StepSignals]:
    """A healthy stretch: normal noise on the loss, log-normal on the gradient."""
    draw = random.Random(seed)
    return [step(loss + draw.gauss(0, sigma), norm * math.exp(draw.gauss(0, 0.1)), **more) for _ in range(num_steps)]


def falling(num_steps: int, fall: Sequence[float], sigma: float = 0.02, seed: int = 0) -> list[StepSignals]:
    """A loss that falls along a given curve, with noise, and a gradient norm that falls with it."""
    draw = random.Random(seed)
    return [
        step(fall[n] + draw.gauss(0, sigma), (0.3 + 2 * math.exp(-n / 15)) * math.exp(draw.gauss(0, 0.1)))
        for n in range(num_steps)
    ]
