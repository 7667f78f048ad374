"""sweep.html: the best setting, loss against each leaf as pictures and tables, and every setting that was tried; one file, offline."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import surefoot.monitor.page as report_page
from surefoot.recipes.index import RECIPES
from surefoot.scale.loss_charts import COLOURS, Axis, Dot, Series, legend, loss_chart, round_numbers
from surefoot.scale.sweep_axes import exact_text, flags_of, value_text
from surefoot.scale.sweep_score import Line, Score, is_number
from surefoot.scale.sweep_table import LEAF_HEADS, SHOWN_VALUES, leaf_rows, setting_heads, setting_rows

DECADES = 0.9
"""A setting whose positive values span more powers of ten than this is drawn on a logarithmic axis."""
_CSS = """
.wide table { font-variant-numeric: tabular-nums; font-size: .8125rem; }
.wide th { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 2px solid var(--line); }
.wide td { padding-right: .7rem; } .wide td:first-child { width: auto; color: var(--text); }
svg.losses { width: 100%; max-width: 720px; height: auto; display: block; }
"""


def sweep_page(score: Score, *, title: str, recipe: str, command: str, common: str = "") -> str:
    """The whole document. ``common``: flags that all runs have."""
    body = [f"<h1>{escape(title)}</h1>", _verdict(score, recipe, common)]
    for key in score.keys:
        body += [f"<h2>Loss against {escape(key)}</h2>", leaf_chart(score, key)]
        values = score.leaf(key)
        if len(values) <= SHOWN_VALUES:
            body.append(html_table(LEAF_HEADS, leaf_rows(values, score.best)))
    body += [
        "<h2>Every setting</h2><p class='soft small'>Held-out loss at the end, nats per token, mean over domains; best first.</p>",
        html_table(setting_heads(score), setting_rows(score)),
        f"<h2>Going on</h2><p>The same command runs what is missing, or more:</p><pre>{escape(command)}</pre>",
    ]
    css = (Path(report_page.__file__).parent / "page.css").read_text() + _CSS
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head><body>"
    )
    return "\n".join([head, *body, "</body></html>\n"])


def _verdict(score: Score, recipe: str, common: str) -> str:
    best = score.best
    remarks = "".join(f"<p>{escape(text[0].upper() + text[1:])}.</p>" for text in score.remarks())
    if best is None:
        return f'<div class="verdict warning"><b>No best setting yet.</b>{remarks}</div>'
    flags = best_command(best, recipe, common)
    loss = f"{best.spread.mean:.4f} nats per token"
    tone = "warning" if remarks else ""
    return f'<div class="verdict {tone}"><b>Best: {loss}</b><pre>{escape(flags)}</pre>{remarks}</div>'


def best_command(best: Line, recipe: str, common: str) -> str:
    """The best setting, after what all runs have, as a command to paste; of a config that is no recipe, its flags."""
    flags = best_flags(best, common)
    return f"surefoot train {recipe} {flags}" if recipe in RECIPES else flags


def best_flags(best: Line, common: str) -> str:
    """What all runs have, then the best setting."""
    return f"{common} {flags_of(best.values)}" if common else flags_of(best.values)


def html_table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table that scrolls where the screen is narrow."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def leaf_chart(score: Score, key: str) -> str:
    """Every run against one setting, and a line through the best mean of each value; in colours of another setting where that has few values."""
    places, axis = _axis(score, key)
    other = next((k for k in score.keys if k != key and 1 < len(score.leaf(k)) <= len(COLOURS)), None)
    groups: dict[str, list[tuple[float, Line]]] = {}
    for place, line in zip(places, score.lines, strict=True):
        groups.setdefault(exact_text(line.values[other]) if other else key, []).append((place, line))
    series = [_series(name, group) for name, group in groups.items()]
    told = "Each dot is a run; a line joins the best mean over seeds at each value, whatever the settings not named here are."
    names = [f"{other} = {name}" for name in groups] if other else [key]
    picture = loss_chart(series, axis, title=f"loss against {key}")
    return f'<p class="soft small">{told}</p>{legend(names)}{picture}'


def _series(name: str, group: Sequence[tuple[float, Line]]) -> Series:
    dots = [
        Dot(
            x=place,
            y=result.loss,
            diverged=result.ending == "diverged",
            hover=_hover(line, each.seed, result.loss, result.reason),
        )
        for place, line in group
        for each, result in line.runs
        if result is not None and result.ending != "failed"
    ]
    best: dict[float, float] = {}
    for place, line in group:
        if line.whole:
            best[place] = min(best.get(place, math.inf), line.spread.mean)
    return Series(name=name, dots=dots, line=sorted(best.items()))


def _hover(line: Line, seed: int, loss: float, reason: str) -> str:
    what = ", ".join(f"{key.rpartition('.')[2]}={value_text(value)}" for key, value in line.values.items())
    return f"{what}, seed {seed}: {reason or f'{loss:.4f}'}"


def _axis(score: Score, key: str) -> tuple[list[float], Axis]:
    """Where each setting of the score stands, and the axis."""
    values = [line.values[key] for line in score.lines]
    if not all(map(is_number, values)):
        words = list(dict.fromkeys(value_text(value) for value in values))
        ticks = [(float(n), word) for n, word in enumerate(words)]
        return [float(words.index(value_text(value))) for value in values], Axis(label=key, scale="words", ticks=ticks)
    numbers = [float(value) for value in values]
    low, high = min(numbers), max(numbers)
    logarithmic = low > 0 and math.log10(high / low) > DECADES
    distinct = sorted(set(numbers))
    if len(distinct) <= 8:
        shown = distinct
    elif logarithmic:
        shown = [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    else:
        shown = round_numbers(low, high, 6)
    ticks = [(number, f"{number:g}") for number in shown]
    return numbers, Axis(label=key, scale="log" if logarithmic else "linear", ticks=ticks)
