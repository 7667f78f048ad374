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
    """A number of one step. ``<domain>`` in a name stands for the name of a source, ``<role>`` for a role of parameters (model/parametrization),
    ``<layer>`` for the number of a layer, from 0."""

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
    Metric("train/tokens_masked", "tokens", "sum", "tokens blanked because they repeat themselves (data.repetition)"),
    Metric("train/loss_scale", "1", "same", "factor on the fp16 loss after the batch"),
    Metric("train/overflows", "batches", "same", "fp16 overflows so far: each halved the scale and skipped its update"),
    Metric("train/skipped", "1", "same", "1 where the update was refused, else 0"),
    Metric(
        "train/gradient_norm/<role>", "1", "same", "L2 norm of the gradient of one kind of parameters, before clipping"
    ),
    Metric("train/nonfinite", "elements", "sum", "elements of the gradient that are NaN or infinite"),
    Metric(
        "train/update_size", "1", "same", "root mean square of what the update changed in a fixed sample of weights"
    ),
    Metric(
        "train/attention_logit_max",
        "1",
        "max",
        "largest attention logit of the batch; written where a head may be above optim.qk_clip",
    ),
    Metric("train/heads_clipped", "heads", "same", "query heads whose weights QK-clip scaled back after the update"),
    Metric(
        "train/noise_scale",
        "tokens",
        "same",
        "gradient noise scale, smoothed: the batch size beyond which more of it helps little (critical batch size)",
    ),
    Metric("train/noise_scale_rows", "rows", "same", "the same in rows of this batch's mean number of targets"),
    Metric("train/noise_signal", "1", "same", "squared norm of the true gradient, smoothed estimate"),
    Metric("train/noise_trace", "1", "same", "trace of the covariance of one target's gradient, smoothed estimate"),
    Metric("train/document_loss_max", "nats/token", "max", "largest loss of a document's part in one row"),
    Metric("train/document_loss_p999", "nats/token", "same", "99.9th percentile of those losses over the batch"),
    Metric("data/misaligned", "share", "same", "targets that are not the next token of their row; 0 in sound data"),
    Metric("data/copied", "share", "same", "targets equal to their own input token; near 1 where the target leaks"),
    Metric("data/repeated", "share", "same", "tokens in floods: 1 to 13 tokens repeated at least 32 times in a row"),
    Metric("data/duplicated", "share", "same", "rows also read under another number in this batch or the last 64"),
    Metric("guard/loss_zscore", "1", "same", "loss above its trend, in robust standard deviations"),
    Metric("guard/document_zscore", "1", "same", "largest document loss above its trend, likewise"),
    Metric("guard/gradient_zscore", "1", "same", "logarithm of the gradient norm above its trend, likewise"),
    Metric("guard/update_zscore", "1", "same", "size of the update, for its rate, above its trend, likewise"),
    Metric("perf/tokens_per_s", "tokens/s", "sum", "tokens of the batch over the wall time of the step"),
    Metric("perf/mfu", "1", "same", "model FLOPs over what the device's matrix products reach at best"),
    Metric("perf/step_s", "s", "max", "wall time of the step, its wait for data included"),
    Metric("perf/train_s", "s", "same", "training time so far, all attempts; where hours or money bound the run"),
    Metric("perf/data_wait_s", "s", "max", "time the step waited for its batch"),
    Metric("perf/memory_gib", "GiB", "max", "largest memory a process has held so far"),
    Metric("eval/<domain>/loss", "nats/token", "mean", "held-out cross-entropy of a domain"),
    Metric("inside/<role>/lr", "1", "same", "learning rate of one kind of parameters, everything multiplied out"),
    Metric("inside/<role>/weight_decay", "1", "same", "share of a weight that decay takes off per step"),
    Metric("inside/<role>/update_ratio", "1", "same", "size of the update over the size of the weights it changed"),
    Metric(
        "inside/<role>/rms_t",
        "1",
        "same",
        "gradient over what the second moment expects, RMS; above 2 the moment is stale",
    ),
    Metric("inside/<role>/weight_norm", "1", "same", "L2 norm of the weights of one kind of parameters"),
    Metric("inside/<role>/largest_weight", "1", "same", "largest weight over the root mean square of its own tensor"),
    Metric(
        "inside/layer_<layer>/attention_logit_max", "1", "same", "largest attention logit on the probe's held-out rows"
    ),
    Metric(
        "inside/layer_<layer>/attention_entropy",
        "1",
        "same",
        "attention entropy over its largest possible value; 0 is one key only",
    ),
    Metric(
        "inside/layer_<layer>/activation_rms", "1", "same", "root mean square of the residual stream after the layer"
    ),
    Metric(
        "inside/layer_<layer>/activation_max", "1", "same", "largest magnitude in the residual stream after the layer"
    ),
    Metric(
        "eval/<domain>/bits_per_byte", "bits/byte", "mean", "held-out loss per byte of text: compares across tokenizers"
    ),
)


class UnknownMetricError(ValueError):
    """A name that is not in the table."""


def _pattern(name: str) -> re.Pattern[str]:
    """``re.escape`` leaves the angle brackets as they are."""
    return re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(name)))


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
