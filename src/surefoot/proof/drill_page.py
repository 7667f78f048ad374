"""drill.html: the drill's score, its table and its curves as one page that opens offline."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import surefoot.monitor.page as report_page
from surefoot.proof.alarm_rates import HEADS as ALARM_HEADS
from surefoot.proof.alarm_rates import alarm_rows, read_segments
from surefoot.proof.curves import Curve, chart, legend
from surefoot.proof.drill import Base
from surefoot.proof.drill_cells import read_cells, task_name
from surefoot.proof.drill_score import NAMES, Line, Pair, score
from surefoot.proof.drill_table import HEADS, confusion_rows, headline, method, misses, reading, rows

_HERE = Path(__file__).parent


def document(title: str, body: Iterable[str]) -> str:
    """A whole HTML document in the report's clothes."""
    css = (Path(report_page.__file__).parent / "page.css").read_text() + (_HERE / "drill.css").read_text()
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head><body>"
    )
    return "\n".join([head, *(part for part in body if part), "</body></html>\n"])


def html_table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table that scrolls where the screen is narrow."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def drill_page(folder: Path, base: Base = "B") -> str:
    """The page of all results in ``folder`` of one model."""
    cells = read_cells(folder)
    found = score(cells, base)
    by_name = {str(cell["name"]): cell for cell in cells}
    segments = read_segments(folder / "healthy")
    told = "".join(f"<p>{escape(sentence)}</p>" for sentence in headline(found))
    missed = "".join(f"<li>{escape(sentence)}</li>" for sentence in misses(found))
    return document(
        "Surefoot drill",
        [
            "<h1>The drill</h1><p>Faults put into small real runs on purpose: what the guard saw, when, what it called it, what it did, and how "
            "the run ended.</p>",
            f'<div class="verdict">{told}</div>',
            f'<p class="soft small">{escape(method(found))}</p>',
            "<h2>By fault</h2>",
            html_table(HEADS, rows(found)),
            f'<p class="soft small">{escape(reading().replace("`", ""))}</p>',
            "<h2>Curves</h2><p class='soft small'>Training loss, nats per byte, by batch; the fault is in the shaded part. One seed each.</p>",
            legend(_curves({}, {}, {"refused": [0], "curve": ""})),
            f'<div class="cards">{"".join(_card(line, by_name, base) for line in found.lines if line.share == 1.0)}</div>',
            "<h2>Causes</h2><p>Rows: what it was. Columns: what the guard called it. Harmful faults only.</p>",
            html_table(("truth", *NAMES), confusion_rows(found, found.harmful)),
            f"<h2>Missed or misnamed</h2><ul>{missed or '<li>none</li>'}</ul>",
            _alarms(segments),
        ],
    )


def _alarms(segments: Sequence[dict[str, Any]]) -> str:
    if not segments:
        return ""
    steps = sum(segment["steps"] for segment in segments)
    return f"<h2>False alarms in {steps:,} healthy steps</h2>{html_table(ALARM_HEADS, alarm_rows(segments))}"


def _card(line: Line, by_name: dict[str, Any], base: Base) -> str:
    pair = next(iter(line.harmful), line.pairs[0])
    clean = by_name[task_name("", 1.0, pair.seed, False, base)]
    dose = pair.guarded["dose"]
    window = range(dose["onset"], dose["onset"] + dose["length"])
    curves = _curves(clean, pair.unguarded, pair.guarded)
    picture = chart(curves, width=360, height=170, window=window, title=line.fault.title)
    return f'<div class="card"><h3>{escape(line.fault.title)}</h3><p>{escape(_sentence(pair))}</p>{picture}</div>'


def _sentence(pair: Pair) -> str:
    harm = "Harmful" if pair.harmful else "Harmless here"
    if not pair.detected:
        return f"{harm}; not seen."
    late = pair.guarded["delay"]
    when = "at once" if late == 0 else f"{late} batch{'es' if late != 1 else ''} late"
    did = ", ".join(pair.guarded["actions"]).replace("_", " ") or "only said"
    return f"{harm}; seen {when}, called {pair.named}; {did}."


def _curves(clean: Any, unguarded: Any, guarded: Any) -> list[Curve]:
    return [
        Curve(name=name, look=look, **_points(cell))
        for name, look, cell in (
            ("with the fault, unguarded", "unguarded", unguarded),
            ("without the fault", "clean", clean),
            ("with the fault, guarded", "guarded", guarded),
        )
    ]


def _points(cell: Any) -> dict[str, Any]:
    losses = [float(text) for text in str(cell.get("curve", "")).split()]
    return {"batches": list(range(len(losses))), "losses": losses, "refused": cell.get("refused", ())}


def write_page(folder: Path, path: Path, base: Base = "B") -> None:
    """drill.html from the results in ``folder``."""
    path.write_text(drill_page(folder, base))
