"""The part of a report that says what the guard saw and did, with its evidence folded under each deed."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from surefoot.monitor.guard_story import Deed
from surefoot.monitor.rows import number
from surefoot.monitor.wording import percent, several

SHOWN = 200
"""Most deeds in a page; the older ones stay in the ledger."""

PASSES: Mapping[str, str] = {
    "same_batch": "the same batch again",
    "healthy_batch": "the last healthy batch, at these weights",
    "without_suspects": "the batch without the suspects",
    "first_half": "the first half of the rows",
    "second_half": "the second half of the rows",
    "full_precision": "the same batch in fp32",
}
"""Extra passes of an investigation (guard/evidence.py) in words."""


def guard_section(deeds: Sequence[Deed]) -> str:
    """HTML of the section, newest deed first. Everything that came from the run is escaped."""
    if not deeds:
        return "<h2>What the guard saw and did</h2><p>Nothing stood out, and nothing had to be done.</p>"
    counts: dict[str, int] = {}
    for deed in deeds:
        counts[deed.what] = counts.get(deed.what, 0) + 1
    listed = ", ".join(f"{what} {count}" for what, count in counts.items())
    more = f" The newest {SHOWN} of {len(deeds)}; ledger.jsonl has them all." if len(deeds) > SHOWN else ""
    items = "".join(_deed(deed) for deed in deeds[:SHOWN])
    return (
        f'<h2>What the guard saw and did</h2><p class="soft small">Newest first; open one for its evidence. In all: '
        f'{listed}.{more}</p><ol class="deeds">{items}</ol>'
    )


def _deed(deed: Deed) -> str:
    tone = "bad" if deed.what == "halted" else "warning" if deed.grave else "plain"
    undone = "" if deed.survives else ' <span class="soft small">(taken back since)</span>'
    faded = "" if deed.survives else ' class="undone"'
    return (
        f'<li{faded}><span class="where">batch {deed.batch_index:,}</span><div><span class="badge {tone}">{deed.what}</span> '
        f"{escape(deed.text)}{undone}{_evidence(deed)}</div></li>"
    )


def _evidence(deed: Deed) -> str:
    if deed.bare:
        return ""
    parts = [
        f"likely cause {deed.diagnosis['cause']}" if deed.diagnosis.get("cause") else "",
        several(len(deed.findings), "finding") if deed.findings else "",
        f"{len(deed.passes)} extra {'pass' if len(deed.passes) == 1 else 'passes'}" if deed.passes else "",
        several(len(deed.suspects), "suspect") if deed.suspects else "",
    ]
    summary = escape(", ".join(part for part in parts if part))
    body = _diagnosis(deed.diagnosis) + _findings(deed.findings) + _passes(deed.passes) + _suspects(deed.suspects)
    return f"<details><summary>Evidence: {summary}</summary>{body}</details>"


def _diagnosis(diagnosis: Mapping[str, Any]) -> str:
    if not diagnosis:
        return ""
    broken = (
        " Healthy batches are bad at these weights too: only going back helps."
        if diagnosis.get("state_is_broken")
        else ""
    )
    return (
        f"<p><b>Likely cause: {escape(str(diagnosis.get('cause', 'unknown')))}.</b> "
        f"{escape(_ended(str(diagnosis.get('text', ''))))}{broken}</p>"
    )


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for finding in findings:
        facts = []
        if finding.get("value") is not None:
            facts.append(f"{_figure(finding['value'])}")
        if finding.get("normal"):
            facts.append(f"normally {_figure(finding['normal'])}")
        if finding.get("z"):
            facts.append(f"{_figure(finding['z'])} sigmas off")
        if finding.get("onset", finding.get("batch_index")) != finding.get("batch_index"):
            facts.append(f"traced back to batch {finding['onset']}")
        kind = str(finding.get("kind", "")).replace("_", " ")
        where = f" {finding['where']}" if finding.get("where") else ""
        shown = f' <span class="soft">({escape(", ".join(facts))})</span>' if facts else ""
        label = escape(f"{finding.get('severity', 'note')}: {kind}{where}")
        rows.append(f"<li><b>{label}</b> {escape(_ended(str(finding.get('text', ''))))}{shown}</li>")
    return f"<ul>{''.join(rows)}</ul>" if rows else ""


def _passes(passes: Sequence[Mapping[str, Any]]) -> str:
    if not passes:
        return ""
    rows = []
    for taken in passes:
        kind = str(taken.get("kind", ""))
        name = PASSES.get(kind, kind.replace("_", " ")) + (", same bits" if taken.get("same_bits") else "")
        cells = [_figure(taken.get(key)) for key in ("loss", "gradient_norm", "excess")]
        rows.append(f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>extra pass</th><th>loss</th><th>gradient norm</th><th>loss above normal</th></tr>"
    return f'<div class="wide"><table class="passes">{head}{"".join(rows)}</table></div>'


def _suspects(suspects: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for suspect in suspects:
        facts = [f"{suspect.get('domain', '')}, row {suspect.get('row', '?')}".lstrip(", ")]
        facts.append(f"loss {_figure(suspect.get('loss'))}, {_figure(suspect.get('z'))} sigmas from its domain")
        facts.append(f"{percent(_value(suspect.get('repetition')))} repeated")
        facts.append(f"{_figure(suspect.get('entropy'))} bits a token")
        facts.append(f"compresses to {percent(_value(suspect.get('compression')))}")
        why = "; ".join(str(reason) for reason in suspect.get("reasons", ()))
        because = f" <b>{escape(why)}</b>" if why else ""
        text = f"<pre>{escape(str(suspect['text']))}</pre>" if suspect.get("text") else ""
        name = escape(str(suspect.get("document", "")))
        parts.append(
            f"<p>Suspect <code>{name}</code>{because}<br><span class='soft'>{escape('; '.join(facts))}</span></p>{text}"
        )
    return "".join(parts)


def _value(value: Any) -> float:
    return math.nan if value is None else number(value)


def _figure(value: Any) -> str:
    known = _value(value)
    return f"{known:.4g}" if math.isfinite(known) else "?" if value is None else str(known)


def _ended(text: str) -> str:
    """With a full stop, if there is anything."""
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."
