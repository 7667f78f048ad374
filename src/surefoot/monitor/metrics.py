"""Every metric once: its name, unit, how it reduces over ranks, and one line of meaning. A name not here cannot be written."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

Reduction = Literal["sum", "mean", "max", "same"]
"""Over ranks: added up; weighted by target tokens and averaged; the largest; already the same on all (or told by rank 0)."""


@dataclass(frozen=True)
class Metric:
    """A number of one step. ``<domain>`` in a name stands for the name of a source."""

    name: str
    unit: str
    reduces: Reduction
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("train/loss", "nats/token", "mean", "next-token cross-entropy of the batch, before its update"),
    Metric(
        "train/loss_smoothed", "nats/token", "same", "moving average of train/loss over steps that were not skipped"
    ),
    Metric("train/gradient_norm", "1", "same", "L2 norm of the whole gradient before clipping"),
    Metric("train/lr", "1", "same", "learning rate of the update"),
    Metric(
        "train/z_loss",
        "nats/token",
        "mean",
        "z-loss as it enters the objective: its weight times the mean squared logsumexp",
    ),
    Metric(
        "train/logsumexp_mean", "nats", "mean", "mean logsumexp of the logits: how far the softmax is from normalised"
    ),
    Metric("train/logsumexp_max", "nats", "max", "largest logsumexp of the logits in the batch"),
    Metric("train/num_targets", "tokens", "sum", "tokens that were predicted"),
    Metric("train/tokens_excluded", "tokens", "sum", "tokens blanked because their document is excluded"),
    Metric("train/skipped", "1", "same", "1 where the update was refused, else 0"),
    Metric("perf/tokens_per_s", "tokens/s", "sum", "tokens of the batch over the wall time of the step"),
    Metric("perf/mfu", "1", "same", "model FLOPs over what the device's matrix products reach at best"),
    Metric("perf/step_s", "s", "max", "wall time of the step, its wait for data included"),
    Metric("perf/data_wait_s", "s", "max", "time the step waited for its batch"),
    Metric("perf/memory_gib", "GiB", "max", "largest memory a process has held so far"),
    Metric("eval/<domain>/loss", "nats/token", "mean", "held-out cross-entropy of a domain"),
    Metric(
        "eval/<domain>/bits_per_byte", "bits/byte", "mean", "held-out loss per byte of text: compares across tokenizers"
    ),
)


class UnknownMetricError(ValueError):
    """A name that is not in the table."""


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace("<domain>", "[^/]+"))


_EXACT = {metric.name: metric for metric in METRICS if "<" not in metric.name}
_PATTERNS = [(_pattern(metric.name), metric) for metric in METRICS if "<" in metric.name]
_SEEN = dict(_EXACT)


def find(name: str) -> Metric:
    """The table's entry for a name; a name without one is an UnknownMetricError with the nearest."""
    metric = _SEEN.get(name)
    if metric is None:
        metric = next((entry for pattern, entry in _PATTERNS if pattern.fullmatch(name)), None)
        if metric is None:
            raise UnknownMetricError(_unknown(name))
        _SEEN[name] = metric
    return metric


def refuse_unknown(names: Iterable[str]) -> None:
    """Find every name or raise; a dictionary look-up each once seen, so that every row can afford it."""
    for name in names:
        if name not in _SEEN:
            find(name)


def _unknown(name: str) -> str:
    close = get_close_matches(name, [metric.name for metric in METRICS], n=1)
    hint = f"; the nearest is {close[0]!r}" if close else ""
    return f"metric {name!r} is not in the table{hint}; add a line with unit and meaning to monitor/metrics.py"


def table() -> str:
    """The metric table as Markdown, for the documentation."""
    lines = ["| metric | unit | over ranks | meaning |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.unit} | {m.reduces} | {m.meaning} |" for m in METRICS]
    return "\n".join(lines)
