"""The report's page: a summary that needs no explanation, the charts, what happened, how to go on. One file, offline."""

import json
import math
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from surefoot.monitor.charts import Chart
from surefoot.monitor.compare import flat
from surefoot.monitor.facts import RunFacts
from surefoot.monitor.guard_charts import hover
from surefoot.monitor.guard_section import guard_section
from surefoot.monitor.guard_story import Deed
from surefoot.monitor.health import Health
from surefoot.monitor.role_section import role_table
from surefoot.monitor.sentences import Moment, told_briefly
from surefoot.monitor.summary import Domain, Summary
from surefoot.monitor.wording import duration, percent, several, short

_HERE = Path(__file__).parent
_LINES = 60
"""Most vertical lines through a chart; beyond that skipped steps are only marks on the rail."""


def page(
    summary: Summary,
    health: Health,
    drawn: list[Chart],
    moments: list[Moment],
    deeds: list[Deed],
    config: dict[str, Any],
    x: tuple[int, int],
) -> str:
    """The whole HTML document; ``x`` is the range of batches all charts share."""
    body = [
        _head(summary, health),
        _figures(summary),
        _domains(summary.domains),
        *(_chart(place, chart) for place, chart in enumerate(drawn)),
        role_table(summary.roles),
        guard_section(deeds),
        _events(moments),
        _samples(summary),
        _going_on(summary),
        _config(config),
    ]
    data = {"charts": [c.to_dict() for c in drawn], "moments": _marks(moments), "range": _padded(x)}
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(summary.name)}: Surefoot report</title>",
            f"<style>{(_HERE / 'page.css').read_text()}</style></head><body>",
            *(part for part in body if part),
            f'<script type="application/json" id="data">{_embedded(data)}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{(_HERE / 'page.js').read_text()}</script>",
            "</body></html>\n",
        ]
    )


def _embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _padded(x: tuple[int, int]) -> list[float]:
    room = 0.02 * max(1, x[1] - x[0])
    return [x[0] - room, x[1] + room]


def _marks(moments: list[Moment]) -> list[dict[str, Any]]:
    """One mark per batch: the gravest thing that happened there, with all of it in words."""
    by_batch: dict[int, list[Moment]] = {}
    for moment in moments:
        by_batch.setdefault(moment.batch_index, []).append(moment)
    grave = {batch: min(found, key=_gravity) for batch, found in by_batch.items()}
    turns = [m for m in told_briefly(list(grave.values())) if _gravity(m) < _PLAIN and m.batch_index > 0]
    crossing = sorted(turns, key=_gravity)[:_LINES]
    lines = {m.batch_index for m in crossing}
    return [
        {
            "batch": batch,
            "kind": mark.kind,
            "tone": mark.tone,
            "survives": mark.survives,
            "line": batch in lines,
            "hover": hover(by_batch[batch]),
        }
        for batch, mark in grave.items()
    ]


_PLAIN = 5


def _gravity(moment: Moment) -> int:
    """Smaller is graver; from _PLAIN on it did not change the course of the run."""
    if moment.kind == "attempt" and moment.tone == "warning":
        return 0
    return {
        "verdict": 1,
        "skip": 2,
        "attempt": 3,
        "lr_event": 4,
        "noted": _PLAIN,
        "finish": _PLAIN,
        "stop": _PLAIN,
        "certified": _PLAIN + 1,
    }.get(moment.kind, _PLAIN + 2)


def _head(summary: Summary, health: Health) -> str:
    facts = summary.facts
    what = (
        f"A language model of {short(facts.num_params)} parameters ({escape(facts.model)}), recipe "
        f"<b>{escape(facts.recipe)}</b>, trained {_length(facts)} of "
        f"{short(facts.batch_tokens)} tokens, in {escape(facts.precision)} on {escape(facts.device)}."
        if facts
        else "A pretraining run."
    )
    if summary.parent:
        what += f" Forked from <b>{escape(summary.parent)}</b>, whose curves come first."
    sentences = "".join(f"<p>{escape(text)}</p>" for text in health.sentences)
    return (
        f"<h1>{escape(summary.name)}</h1><p>{what}</p>"
        f'<div class="verdict {health.tone}"><b>{escape(health.headline)}</b>{sentences}</div>'
    )


def _length(facts: RunFacts) -> str:
    if not facts.steps:
        return f"for {duration(facts.bound_s)} in steps"
    return f"on {short(facts.tokens)} tokens in {facts.steps:,} steps"


def _figures(summary: Summary) -> str:
    goal = f" of {summary.steps:,}" if summary.steps > summary.step else ""
    shown = [
        (f"{summary.step:,}{goal}", "steps (updates of the weights)"),
        (short(summary.tokens), "tokens read"),
        (_number(summary.final_loss), "training loss, nats per token, mean of the last updates"),
        (duration(max(summary.wall_s, summary.train_s)), "time at work"),
        (short(summary.tokens_per_s) if math.isfinite(summary.tokens_per_s) else "", "tokens a second (median)"),
        (
            short(summary.critical_batch) if math.isfinite(summary.critical_batch) else "",
            "tokens: critical batch size, by the gradient noise scale",
        ),
        (percent(summary.mfu) if math.isfinite(summary.mfu) else "", "of the device's best matrix-product speed (MFU)"),
        (f"{summary.memory_gib:.1f} GiB" if math.isfinite(summary.memory_gib) else "", "memory at most"),
        (f"{summary.skipped}", "skipped steps (updates refused)"),
        (f"{summary.rollbacks}", "rollbacks"),
        (f"{len(summary.excluded)}", "documents left out"),
    ]
    cells = [f'<div class="figure"><b>{value}</b><span>{label}</span></div>' for value, label in shown if value]
    return f'<div class="figures">{"".join(cells)}</div>'


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else ""


def _domains(domains: tuple[Domain, ...]) -> str:
    if not domains:
        return "<h2>How good is it?</h2><p>No held-out evaluation yet.</p>"
    parts = [
        "<h2>How good is it?</h2><p>Bits needed per byte of text the model has never seen: lower is better, 8 is no "
        "compression at all. General-purpose compressors on the same text are the yardstick.</p>"
    ]
    for domain in domains:
        better = f" {escape(domain.yardstick[0].upper() + domain.yardstick[1:])}." if domain.yardstick else ""
        bars = [
            ("model", domain.bits_per_byte),
            ("zlib -9", domain.zlib_bits_per_byte),
            ("xz", domain.xz_bits_per_byte),
        ]
        known = [(name, value) for name, value in bars if math.isfinite(value)]
        most = max([value for _, value in known] + [v for v in (domain.first_bits_per_byte,) if math.isfinite(v)])
        rows = "".join(_bar(name, value, most) for name, value in known)
        first = (
            f" At the first evaluation it was {domain.first_bits_per_byte:.2f}."
            if domain.first_bits_per_byte > domain.bits_per_byte
            else ""
        )
        parts.append(
            f'<div class="domain"><b>{escape(domain.name)}</b> <span class="soft">{better}{first}</span>{rows}</div>'
        )
    return "".join(parts)


def _bar(name: str, value: float, most: float) -> str:
    width = 100 * value / most
    css = "bar model" if name == "model" else "bar"
    return (
        f'<div class="{css}"><span>{name}</span><span class="track"><span class="fill" style="width:{width:.1f}%">'
        f"</span></span><span>{value:.3f}</span></div>"
    )


def _chart(place: int, chart: Chart) -> str:
    height = f'<div class="chart" id="chart-{place}"></div>'
    return f'<h2>{escape(chart.title)}</h2><p class="soft small">{escape(chart.sentence)}</p>{height}'


def _events(moments: list[Moment]) -> str:
    rows = []
    for m in told_briefly(moments):
        css = {"warning": "warning-text", "good": "good-text", "plain": ""}[m.tone]
        undone = "" if m.survives else ' <span class="soft small">(taken back since)</span>'
        faded = "" if m.survives else ' class="undone"'
        where = f"step {m.step:,}"
        rows.append(
            f'<li{faded}><span class="where">{where}</span><span class="{css}">{escape(m.text)}{undone}</span></li>'
        )
    legend = "The marks under each chart, the gravest where several meet: ◀ start, resume or rollback, ✕ skipped step, ▼ another learning rate, ○ something noted, ● checkpoint, ◆ certified, ★ end. Yellow is a fault, pale was taken back."
    return f'<h2>What happened</h2><p class="soft small">{legend}</p><ol class="events">{"".join(rows)}</ol>'


def _samples(summary: Summary) -> str:
    if not summary.samples:
        return ""
    parts = [
        "<h2>What it writes</h2><p>The beginning is held-out text; the coloured part is the model's continuation.</p>"
    ]
    for sample in summary.samples:
        text = f'{escape(sample.prompt)}<span class="model-text">{escape(sample.text)}</span>'
        parts.append(f"<b>{escape(sample.domain)}</b><pre>{text}</pre>")
    return "".join(parts)


def _going_on(summary: Summary) -> str:
    parts = []
    if summary.how_to_continue:
        parts.append(f"<h2>Going on</h2><pre>{escape(summary.how_to_continue)}</pre>")
    if summary.excluded:
        names = ", ".join(escape(name) for name in summary.excluded)
        parts.append(f"<p>Trained without {several(len(summary.excluded), 'document')}: <code>{names}</code></p>")
    if summary.facts:
        prints = f"data {summary.facts.data_fingerprint}, config {summary.facts.config_fingerprint}"
        parts.append(f'<p class="soft small">Fingerprints: {escape(prints)}. Folder: {escape(summary.folder)}.</p>')
    return "".join(parts)


def _config(config: dict[str, Any]) -> str:
    if not config:
        return ""
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in flat(config))
    return f"<details><summary>The whole config</summary><table>{rows}</table></details>"
