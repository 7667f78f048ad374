"""What the guard watches, drawn; and what it did, marked on the curve where it happened."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

import numpy as np

from surefoot.monitor.charts import DOMAIN_LOOKS, Chart, Line, Mark, drawn
from surefoot.monitor.envelope import envelope
from surefoot.monitor.run import Columns, Run
from surefoot.monitor.sentences import Moment
from surefoot.monitor.summary import column

MOST_LAYERS = len(DOMAIN_LOOKS)
"""Layers that get a line each; of more only the largest and the median are drawn."""


def guard_charts(run: Run) -> list[Chart]:
    """A chart of each signal that the rows have."""
    history = run.history()
    size = column(history, "train/update_size")
    history["train/update_size"] = np.where(size > 0, size, np.nan)  # a skipped step moves nothing: a gap
    largest, p999 = column(history, "train/document_loss_max"), column(history, "train/document_loss_p999")
    every = [
        Chart(
            "Hardest documents",
            "The largest loss of a document in each batch, and the 99.9th percentile where batches have so many: one bad "
            "document shows here long before it moves the mean.",
            "nats per token",
            [
                *drawn(history, "train/document_loss_max", "main", "largest of the batch"),
                *(
                    drawn(history, "train/document_loss_p999", "second", "99.9th percentile")
                    if _differ(largest, p999)
                    else []
                ),
            ],
        ),
        Chart(
            "Size of the update",
            "How far an update moved a fixed sample of the weights, measured before and after. It follows the learning "
            "rate; a step out of line with it is an update gone wrong.",
            "root mean square",
            drawn(history, "train/update_size", "main", "update"),
            logarithmic=True,
        ),
        Chart(
            "Distance from the trend",
            "How unusual each batch was, in robust standard deviations: within 3 is everyday, beyond 8 the guard refuses "
            "an update by default.",
            "standard deviations",
            [
                *drawn(history, "guard/loss_zscore", "main", "loss"),
                *drawn(history, "guard/document_zscore", "second", "largest document loss"),
                *drawn(history, "guard/gradient_zscore", "third", "gradient norm"),
                *drawn(history, "guard/update_zscore", "fourth", "update"),
            ],
        ),
        Chart(
            "Attention logits",
            "The largest attention logit of a layer on a few held-out rows. Growth from a hundred towards ten thousand is "
            "how attention fails, slowly; QK-norm holds it down.",
            "logit",
            [*_attention(history), *_of_batches(history)],
            logarithmic=True,
        ),
        Chart(
            "Heads clipped",
            "Query heads whose weights QK-clip scaled back after an update, because a logit of the batch was above its threshold. "
            "Kimi K2's fell to none as the run settled; many heads for long point to a rate that is too high.",
            "heads",
            drawn(history, "train/heads_clipped", "main", "heads clipped"),
            from_zero=True,
        ),
    ]
    return [chart for chart in every if chart.lines]


def with_deeds(charts: Sequence[Chart], run: Run, moments: Sequence[Moment]) -> list[Chart]:
    """The charts, with the skips, rollbacks, halts and changes of rate marked on the training loss."""
    history = run.history()
    marks = _marks(history, [m for m in moments if _changed_the_course(m)])
    return [replace(chart, marks=marks) if chart.title == "Training loss" else chart for chart in charts]


def hover(moments: Iterable[Moment]) -> str:
    """What happened at one place, as the text of its mark: escaped HTML in short lines."""
    return "<br>".join(line for m in moments for line in _wrapped(f"Step {m.step:,}: {escape(m.text)}"))


def _changed_the_course(moment: Moment) -> bool:
    if moment.kind == "attempt":
        return moment.tone == "warning"
    return moment.kind in ("skip", "verdict", "lr_event")


def _marks(history: Columns, moments: Sequence[Moment]) -> tuple[Mark, ...]:
    """One mark per batch and kind, at the loss of that batch, or where it has none at the smoothed loss before it."""
    loss, smoothed = column(history, "train/loss"), column(history, "train/loss_smoothed")
    smoothed = np.where(np.isfinite(smoothed), smoothed, loss)
    kept = np.isfinite(smoothed)
    batches, losses = history["batch_index"][kept], smoothed[kept]
    if not len(batches):
        return ()
    own = dict(zip(history["batch_index"].tolist(), loss.tolist(), strict=True))
    together: dict[tuple[int, str], list[Moment]] = {}
    for moment in moments:
        together.setdefault((moment.batch_index, moment.kind), []).append(moment)
    marks = []
    for (batch, kind), found in together.items():
        place = max(0, int(np.searchsorted(batches, batch, side="right")) - 1)
        survives = any(m.survives for m in found)
        y = own.get(batch, math.nan)
        y = y if math.isfinite(y) else float(losses[place])
        marks.append(Mark(batch, y, kind, survives, hover(found)))
    return tuple(marks)


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Somewhere both are known and not the same: in small batches the percentile is the largest itself."""
    return bool(((a != b) & np.isfinite(a) & np.isfinite(b)).any())


def _attention(history: Columns) -> list[Line]:
    names = [n for n in history if n.startswith("inside/layer_") and n.endswith("/attention_logit_max")]
    names.sort(key=lambda name: int(name.split("/")[1].removeprefix("layer_")))
    if len(names) <= MOST_LAYERS:
        lines = []
        for look, name in zip(DOMAIN_LOOKS, names, strict=False):
            lines += drawn(history, name, look, name.split("/")[1].replace("_", " "), dots=True)
        return lines
    every = np.stack([history[name] for name in names])
    seen = np.isfinite(every).any(axis=0)
    x = history["batch_index"][seen]
    largest, middle = np.nanmax(every[:, seen], axis=0), np.nanmedian(every[:, seen], axis=0)
    what = f"of {len(names)} layers"
    return [
        Line(f"largest {what}", "main", *_thin(x, largest), dots=True),
        Line(f"median {what}", "second", *_thin(x, middle), dots=True),
    ]


def _of_batches(history: Columns) -> list[Line]:
    """What QK-clip saw, at the batches where it looked."""
    y = column(history, "train/attention_logit_max")
    seen = np.isfinite(y)
    return [Line("largest of a batch", "raw", *_thin(history["batch_index"][seen], y[seen]))] if seen.any() else []


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[list[int], list[float | None]]:
    """Few points are joined across the batches between them."""
    xs, ys = envelope(x, y)
    known = [(a, b) for a, b in zip(xs, ys, strict=True) if b is not None]
    return [a for a, _ in known], [b for _, b in known]


def _wrapped(text: str, width: int = 44) -> Iterable[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line
