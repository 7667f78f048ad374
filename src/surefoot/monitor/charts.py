"""The charts of a report as plain data for the page's script: what each shows, and its thinned lines."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from surefoot.monitor.envelope import BUCKETS, envelope
from surefoot.monitor.run import Columns, Run, columns
from surefoot.monitor.summary import Domain, column, domain_names
from surefoot.monitor.wording import short

Look = Literal["raw", "main", "second", "third", "fourth", "fifth", "sixth", "abandoned"]

DOMAIN_LOOKS: tuple[Look, ...] = ("main", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    look: Look
    x: list[int]
    """Batches."""
    y: list[float | None]
    legend: bool = True
    dots: bool = False
    """Mark each point: where they are few."""
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened, on the curve where it happened."""

    batch: int
    y: float
    kind: str
    survives: bool
    hover: str
    """HTML."""


@dataclass(frozen=True)
class Chart:
    """One chart with the sentence that says what it shows."""

    title: str
    sentence: str
    unit: str
    lines: list[Line]
    logarithmic: bool = False
    from_zero: bool = False
    marks: tuple[Mark, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def charts(run: Run, domains: tuple[Domain, ...]) -> list[Chart]:
    """Every chart that has something to show, drawn over batches; parents of a fork are joined in front."""
    history = run.history()
    lost = _by_attempt(run)
    every = [
        _loss(history, lost),
        _validation(history, domains),
        Chart(
            "Gradient norm",
            "How hard the data pulls at the weights, before clipping. Steady or slowly falling is healthy; "
            "a spike comes before most faults of the loss, which is why every batch is drawn, even the shortest spike.",
            "L2 norm",
            [
                *_lost_lines(lost, "train/gradient_norm"),
                *drawn(history, "train/gradient_norm", "main", "gradient norm"),
            ],
            logarithmic=True,
        ),
        Chart(
            "Learning rate",
            "How far each update moves the weights: up during warm-up, then as the schedule says.",
            "learning rate",
            drawn(history, "train/lr", "main", "learning rate"),
            from_zero=True,
        ),
        Chart(
            "Throughput",
            "Training tokens a second. Flat is good; dips are evaluations, checkpoints or a busy machine.",
            "tokens/s",
            [
                *drawn(history, "perf/tokens_per_s", "raw", "each batch"),
                *_smoothed(history, "perf/tokens_per_s", "moving average"),
            ],
            from_zero=True,
        ),
    ]
    return [chart for chart in every if chart.lines]


def _loss(history: Columns, lost: list[Columns]) -> Chart:
    written = "train/loss_smoothed" in history
    smooth = drawn(history, "train/loss_smoothed", "main", "smoothed") if written else []
    more = "" if len(history["step"]) <= 2 * BUCKETS else f" (lowest and highest of every {_bucket(history)})"
    text = (
        "How badly the model predicts the next token of its training text; it should fall fast, then slowly. "
        f"Pale: every batch{more}. Bold: the moving average."
    )
    if lost:
        text += " Dotted: steps that a rollback or resume took back."
    lines = [*_lost_lines(lost, "train/loss"), *drawn(history, "train/loss", "raw", "each batch")]
    return Chart(
        "Training loss", text, "nats per token", [*lines, *(smooth or _smoothed(history, "train/loss", "smoothed"))]
    )


def _bucket(history: Columns) -> str:
    batches = history["batch_index"]
    return f"{short((batches[-1] - batches[0] + 1) / BUCKETS)} batches"


def _validation(history: Columns, domains: tuple[Domain, ...]) -> Chart:
    sticks = {domain.name: domain for domain in domains}
    lines: list[Line] = []
    for place, name in enumerate(domain_names(history)):
        look = DOMAIN_LOOKS[place % len(DOMAIN_LOOKS)]
        lines += drawn(history, f"eval/{name}/bits_per_byte", look, name, dots=True)
        stick = sticks.get(name)
        if stick and np.isfinite(stick.xz_bits_per_byte):
            ends = [int(history["batch_index"][0]), int(history["batch_index"][-1])]
            best = min(stick.xz_bits_per_byte, stick.zlib_bits_per_byte)
            lines.append(Line(f"{name}, best compressor", look, ends, [best, best], dashed=True))
    text = (
        "Text the model has never trained on, in bits per byte of text, per domain; lower is better. "
        "If this rises while the training loss falls, the model is memorising."
    )
    if any(line.dashed for line in lines):
        text += " Dashed: what the better of zlib -9 and xz needs for the same text."
    return Chart("Held-out text", text, "bits per byte", lines)


def drawn(history: Columns, name: str, look: Look, label: str, *, dots: bool = False) -> list[Line]:
    """One metric, or nothing where the run never wrote it. Sparse metrics (dots) are joined across batches without."""
    x, y = history["batch_index"], column(history, name)
    if not np.isfinite(y).any():
        return []
    if dots:
        kept = np.isfinite(y)
        return [Line(label, look, x[kept].tolist(), y[kept].tolist(), dots=True)]
    return [Line(label, look, *envelope(x, y))]


def _smoothed(history: Columns, name: str, label: str) -> list[Line]:
    """Moving average over about a fiftieth of the run, of the values that are finite."""
    y = column(history, name)
    kept = np.isfinite(y)
    if not kept.any():
        return []
    width = max(1, min(200, len(y) // 50))
    sums = np.cumsum(np.concatenate([[0.0], np.where(kept, y, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], kept]))
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(0, ends - width)
    seen = counts[ends] - counts[starts]
    mean = np.where(seen > 0, (sums[ends] - sums[starts]) / np.maximum(seen, 1), np.nan)
    return [Line(label, "main", *envelope(history["batch_index"], mean))]


def _by_attempt(run: Run) -> list[Columns]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in run.abandoned_rows:
        rows.setdefault(row["attempt"], []).append(row)
    return [columns(found) for found in rows.values()]


def _lost_lines(lost: list[Columns], name: str) -> list[Line]:
    lines: list[Line] = []
    for history in lost:
        for line in drawn(history, name, "abandoned", "taken back"):
            lines.append(Line(line.name, line.look, line.x, line.y, legend=not lines))
    return lines
