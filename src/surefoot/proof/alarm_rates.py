"""The table of false alarms: counts per detector over all healthy steps, and their rates with exact intervals."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.proof.exact_intervals import count_interval
from surefoot.proof.false_alarms import step_counts
from surefoot.proof.tables import markdown_table

PER = 100_000
"""Steps that rates are given for."""
HEADS = ("detector", "alarms", "warnings", "notes", f"alarms and warnings per {PER:,} steps, 95 % interval")


def read_segments(folder: Path) -> list[dict[str, Any]]:
    """Every finished healthy run, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def rate(count: int, steps: int) -> str:
    """Events per 100,000 steps, with the exact interval."""
    low, high = count_interval(count)
    return f"{count / steps * PER:.2f} ({low / steps * PER:.2f} to {high / steps * PER:.2f})"


def alarm_rows(segments: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row per detector that said anything, one for all together, one for actions."""
    steps = sum(segment["steps"] for segment in segments)
    counts: dict[str, Counter[str]] = {}
    acted: Counter[str] = Counter()
    for segment in segments:
        for what, count in segment["findings"].items():
            kind, severity = what.rsplit(" ", 1)
            counts.setdefault(kind, Counter())[severity] += count
        acted.update(segment["actions"])
    body = [_row(kind, found, steps) for kind, found in sorted(counts.items())]
    every = sum(counts.values(), Counter())
    body.append(_row("all detectors", every, steps))
    told = ", ".join(f"{count} {what}" for what, count in sorted(acted.items())) or "none"
    body.append((f"actions: {told}", "", "", "", rate(sum(acted.values()), steps)))
    return body


def _row(name: str, found: Counter[str], steps: int) -> tuple[str, ...]:
    serious = found["alarm"] + found["warning"]
    return (name, str(found["alarm"]), str(found["warning"]), str(found["note"]), rate(serious, steps))


def alarms_section(segments: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; empty without any healthy run."""
    if not segments:
        return ""
    steps = sum(segment["steps"] for segment in segments)
    kinds = ", ".join(f"{count:,} of kind {kind}" for kind, count in sorted(step_counts(segments).items()))
    most = max(segment["epochs"] for segment in segments)
    dearest = max(segment["dearest"] or 0 for segment in segments)
    unfinished = sum(segment["ending"] != "done" for segment in segments)
    return "\n\n".join(
        [
            "## False alarms",
            f"{steps:,} healthy steps of {len(segments)} runs through the real loop ({kinds}): decays of the rate, batch ramps, a mixture "
            f"switch, a dip and re-warm-up, resumes, up to {most:.0f} epochs of one text. {unfinished} did not come to their end; the one that "
            f"lost most lost {dearest} batches.",
            markdown_table(HEADS, alarm_rows(segments)),
        ]
    )
