"""What ``drill --quick`` says and draws: which document did it, and three curves."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from surefoot.monitor.wording import several
from surefoot.proof.curves import Curve, chart, legend
from surefoot.proof.drill_page import document
from surefoot.proof.drill_quick import FROM_BATCH, VERSIONS

Result = Mapping[str, Any]
SHOWN = 48
"""Characters of a document's beginning that are shown."""
LABELS = {"clean": "without it", "unguarded": "unguarded", "guarded": "guarded"}
NAMES = {"clean": "without the document", "unguarded": "with it, unguarded", "guarded": "with it, guarded"}


def named(result: Result) -> dict[str, Any] | None:
    """The suspect that is the bad document, if the guard named it."""
    guarded = result["guarded"]
    return next((s for s in guarded["suspects"] if s["document"] == guarded["document"]), None)


def first_verdict(result: Result) -> dict[str, Any] | None:
    """The first thing that the guard said or did once the document had come."""
    return next((e for e in result["guarded"]["events"] if e["after_onset"] and e["action"] != "proceed"), None)


def excluded(result: Result) -> list[str]:
    """Documents that the guard left out from then on."""
    events = [e for e in result["guarded"]["events"] if e["after_onset"] and e["action"] == "exclude"]
    return list(dict.fromkeys(name for e in events for name in e["suspects"]))


def story_of(result: Result) -> str:
    """What the page says first; empty where the guard did not act."""
    guarded, clean = result["guarded"], result["clean"]
    harm = result["unguarded"]["loss"] / clean["loss"] - 1
    spoiled = [batch for batch in guarded["skipped"] if batch >= FROM_BATCH]
    cost = (
        f"One document of {guarded['bytes']:,} bytes, half of {guarded['spoils']} batches in a row, costs this run {100 * harm:.1f} % of its "
        "held-out loss. "
    )
    if excluded(result) and not spoiled and guarded["loss"] == clean["loss"]:
        return f"{cost}The guard finds it before it touches a weight, leaves it out, and ends where the run without it ends, to the last digit."
    if excluded(result):
        return f"{cost}The guard finds it before it touches a weight, and leaves it out."
    return f"{cost}The guard refuses its batches before they touch a weight." if spoiled else ""


def sentences(result: Result) -> list[tuple[str, str]]:
    """(label, text): the whole story in a few lines."""
    guarded, clean = result["guarded"], result["clean"]
    verdict, suspect = first_verdict(result), named(result)
    told = [
        (
            "planted",
            f"document {guarded['document']} ({guarded['domain']}/{guarded['file']}, {guarded['bytes']:,} bytes) from batch {FROM_BATCH} on",
        ),
        ("guard", f"{verdict['text']}" if verdict else "saw nothing"),
    ]
    if suspect:
        told.append(
            (
                "named",
                f"document {suspect['document']} ({suspect['domain']}), which begins {beginning(suspect['text'])}",
            )
        )
    else:
        others = len({s["document"] for s in guarded["suspects"]})
        told.append(("named", f"not the document itself; {others} others" if others else "no document"))
    left_out = len(excluded(result))
    spoiled = sum(1 for batch in guarded["skipped"] if batch >= FROM_BATCH)
    told.append(
        (
            "cost",
            f"{several(left_out, 'document')} left out, {spoiled or 'none'} of the {guarded['spoils']} batches that hold it lost; "
            f"cause named: {verdict['cause'] if verdict else 'none'}",
        )
    )
    early = [e for e in guarded["events"] if not e["after_onset"] and e["action"] != "proceed"]
    if early:
        told.append(
            ("too early", f"{len(early)} other actions before the document came, the first: {early[0]['text']}")
        )
    told += [(LABELS[version], _end(result[version], clean)) for version in VERSIONS]
    return told


def beginning(text: str) -> str:
    """The first characters of a document, quoted."""
    whole = text.strip("\N{REPLACEMENT CHARACTER}")
    return repr(whole[:SHOWN]) + ("..." if len(whole) > SHOWN else "")


def text_summary(result: Result, width: int = 100) -> str:
    """For a terminal of so many columns."""
    told = sentences(result)
    wide = max(len(label) for label, _ in told)
    lines: list[str] = []
    for label, text in told:
        first, *more = textwrap.wrap(text, max(40, width - wide - 2), break_long_words=False) or [""]
        lines += [f"{label:>{wide}}  {first}", *(f"{'':>{wide}}  {line}" for line in more)]
    return "\n".join(lines)


def quick_page(result: Result) -> str:
    """drill.html."""
    order = ("unguarded", "clean", "guarded")
    curves = [
        Curve(
            name=NAMES[version],
            look=version,
            batches=result[version]["batches"],
            losses=result[version]["losses"],
            refused=result[version]["skipped"],
        )
        for version in order
    ]
    last = FROM_BATCH + result["guarded"]["spoils"] - 1
    closer = [_smooth(curve) for curve in curves]
    calm = [x for b, x in zip(closer[1].batches, closer[1].losses, strict=True) if b >= FROM_BATCH - 20]
    after = max(calm) + 0.4
    rows = "".join(f"<tr><td>{escape(label)}</td><td>{escape(text)}</td></tr>" for label, text in sentences(result))
    story = story_of(result)
    return document(
        "Surefoot drill",
        [
            "<h1>One bad document</h1>",
            f'<div class="verdict {"" if story else "bad"}"><b>{escape(story or "The guard did not act on the bad document.")}</b></div>',
            "<h2>Training loss</h2><p class='soft small'>Nats per byte, every batch. The document is in the shaded part.</p>",
            chart(
                curves, width=980, height=360, window=range(FROM_BATCH, last + 1), title="training loss of three runs"
            ),
            legend(curves),
            "<h2>What it does afterwards</h2><p class='soft small'>The same, close up: mean of 8 batches, refused ones left out.</p>",
            chart(
                closer, width=980, height=300, window=range(FROM_BATCH, last + 1), title="the same, close up", top=after
            ),
            f"<h2>What happened</h2><table class='story'>{rows}</table>",
            "<p class='soft small'>All three runs have the same config, seed and data. `without the document` has it excluded from the start: "
            "its tokens are blank, nothing else moves.</p>".replace("`", "“", 1).replace("`", "”", 1),
        ],
    )


def _smooth(curve: Curve, width: int = 8) -> Curve:
    """The part around the document and after it, each point the mean of the last ``width`` batches that were not refused."""
    kept = [
        (b, x) for b, x in zip(curve.batches, curve.losses, strict=True) if b not in curve.refused and math.isfinite(x)
    ]
    means = [(b, math.fsum(x for _, x in kept[at - width + 1 : at + 1]) / width) for at, (b, _) in enumerate(kept)]
    near = [(b, x) for b, x in means[width - 1 :] if FROM_BATCH - 20 <= b <= FROM_BATCH + 80]
    return replace(curve, batches=[b for b, _ in near], losses=[x for _, x in near], refused=())


def _end(run: Mapping[str, Any], clean: Mapping[str, Any]) -> str:
    if not math.isfinite(run["loss"]):
        return "held-out loss not finite"
    off = 100 * (run["loss"] / clean["loss"] - 1)
    far = "" if run is clean else f" ({off:+.2f} %)"
    stopped = "" if run["ending"] == "done" else f", {run['ending']}"
    return f"held-out loss {run['loss']:.4f} nats per byte{far}{stopped}"
