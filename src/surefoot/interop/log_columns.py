"""What other loggers call the step, the loss and the gradient norm, and how their values read."""

import math
import re
from collections.abc import Iterable
from typing import Any

from surefoot.data.errors import DataError
from surefoot.guard.replay import LoggedStep

STEP = (
    "batch_index",
    "step",
    "global_step",
    "trainer_global_step",
    "train_global_step",
    "iteration",
    "iter",
    "train_step",
)
LOSS = (
    "loss",
    "train_loss",
    "training_loss",
    "lm_loss",
    "train_lm_loss",
    "loss_train",
    "ce_loss",
    "train_ce_loss",
    "train_cross_entropy_loss",
)
GRADIENT_NORM = (
    "grad_norm", "gradient_norm", "train_grad_norm", "train_gradient_norm", "gnorm", "train_gnorm", "global_grad_norm",
    "train_global_grad_norm", "total_grad_norm", "optim_total_grad_norm", "grad_norm_train",
)  # fmt: skip
"""In the order of preference, in small letters, everything else an underscore: ``train/loss`` and ``Train Loss`` are ``train_loss``."""

Value = float | None
"""None is a gap."""


class LogError(DataError):
    """A log that cannot be read; says where and which rule."""


def plain_name(name: str) -> str:
    """A column's name as the lists above spell it."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def choose(names: Iterable[str], wanted: tuple[str, ...]) -> str | None:
    """The column that is meant, or None."""
    by_plain: dict[str, str] = {}
    for name in names:
        by_plain.setdefault(plain_name(name), name)
    return next((by_plain[name] for name in wanted if name in by_plain), None)


def missing(where: str, what: str, wanted: tuple[str, ...], names: Iterable[str]) -> LogError:
    """The error for a log without a column."""
    there = ", ".join(names) or "none"
    return LogError(f"{where}: no column for the {what} (one of {', '.join(wanted[:5])}); there are: {there}")


def number(value: Any, where: str, what: str) -> Value:
    """A cell's number; None where it is empty. NaN and Infinity are numbers: a log that says so has a fault to be found."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise LogError(f"{where}: {what} {value!r} is not a number; leave the cell empty where there is none") from None


def whole(value: Any, where: str) -> int:
    """A cell's step."""
    found = number(value, where, "step")
    if found is None or not math.isfinite(found) or found != int(found) or found < 0:
        raise LogError(f"{where}: step {value!r} is not a whole number from 0 on")
    return int(found)


class Rows:
    """Gathers a log's rows: what belongs to one step comes together, and a run that was resumed at an earlier step goes on from there."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._steps: list[int] = []
        self._values: dict[int, tuple[Value, Value]] = {}
        self.dropped = 0
        """Rows that a later row of the same or an earlier step took the place of."""

    def add(self, step: int, loss: Value, gradient_norm: Value) -> None:
        """One row; a value that it lacks is a gap, or stands in another row of the step."""
        if loss is None and gradient_norm is None:
            return
        while self._steps and self._steps[-1] > step:
            del self._values[self._steps.pop()]
            self.dropped += 1
        if step not in self._values:
            self._steps.append(step)
        before = self._values.get(step, (None, None))
        self._values[step] = (
            before[0] if loss is None else loss,
            before[1] if gradient_norm is None else gradient_norm,
        )

    def logged(self) -> list[LoggedStep]:
        """The surviving rows that have a loss, in order."""
        rows = [_row(step, *self._values[step]) for step in self._steps]
        found = [row for row in rows if row is not None]
        if not found:
            raise LogError(f"{self._source}: no row has a loss")
        if self.dropped > len(found):
            raise LogError(
                f"{self._source}: steps run backwards ({self.dropped} rows come after a later step, {len(found)} do not); sort the log by step"
            )
        return found


def _row(step: int, loss: Value, gradient_norm: Value) -> LoggedStep | None:
    if loss is None:
        return None
    if gradient_norm is None:
        return LoggedStep(step=step, loss=loss, gradient_known=False)
    return LoggedStep(step=step, loss=loss, gradient_norm=gradient_norm)
