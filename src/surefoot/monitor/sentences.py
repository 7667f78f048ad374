"""What happened in a run, as sentences for a tired person: rows of the ledger and events in, words out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.monitor.run import Run
from surefoot.monitor.wording import several

Tone = Literal["good", "plain", "warning"]

QUIET = ("facts", "yardstick", "sample", "eval")
"""Events that have their own place in console and report."""

VERDICTS: Mapping[str, str] = {
    "proceed": "noted",
    "clip_harder": "noted",
    "rollback": "ordered",
    "exclude": "ordered",
    "lr_event": "ordered",
}
"""Kind of the moment of a verdict that leaves the course of the run as it is, or that another row carries out."""


@dataclass(frozen=True)
class Moment:
    """Something that happened at a batch of the run."""

    time: float
    attempt: int
    batch_index: int
    step: int
    kind: str
    text: str
    tone: Tone
    survives: bool
    """Its batch is part of the run as it stands."""


def sentence(kind: str, row: Mapping[str, Any]) -> str:
    """One ledger row or event in words; the row has the fields of its kind."""
    match kind:
        case "attempt":
            return _attempt(row)
        case "skip":
            cause = str(row["cause"]).removeprefix(f"batch {row['batch_index']}: ")
            return f"Skipped the update of batch {row['batch_index']}: {cause}. The weights are as they were before it."
        case "checkpoint":
            return f"Saved checkpoint {row['name']}."
        case "certified":
            return f"Checkpoint {row['name']} is certified: the run stayed healthy after it, so a rollback may use it."
        case "eval":
            return _eval(row)
        case "stop":
            return f"Stopped in good order: {row['reason']}."
        case "finish":
            return f"Finished at step {row['step']:,}."
        case "lineage":
            changes = several(len(row["diff"]), "change")
            return f"Forked from {row['parent']} at step {row['step']:,} with {changes} of the config."
        case "lr_event":
            return _lr_event(row)
        case "horizon":
            return _horizon(row)
        case "verdict":
            return str(row.get("text") or row.get("reason") or f"The guard gave a verdict: {_rest(row)}")
        case _:
            return str(row.get("text") or f"{kind}: {_rest(row)}")


def _horizon(row: Mapping[str, Any]) -> str:
    """What the clock decided. Rows of before decays were cut do not say how long theirs is."""
    step, last, length = row["step"], row["last_step"], row.get("decay_steps")
    if length == 0:
        return f"The time of the bound is over: the run ends at step {last:,}."
    asked = row.get("decay_asked", 0)
    if length is None or asked <= length + 1:
        return f"The decay begins at step {step:,}, so that the run ends with its bound: at step {last:,}."
    cut = f"its decay is cut from {asked:,} to {several(round(length), 'step')}"
    return (
        f"The time of the bound does not suffice: {cut}, which begin at step {step:,}; the run ends at step {last:,}."
    )


def tone(kind: str, row: Mapping[str, Any]) -> Tone:
    """Whether a person should worry."""
    if kind == "verdict" and row.get("action") == "proceed":
        return "plain" if all(item.get("severity") == "note" for item in row.get("findings", ())) else "warning"
    if kind in ("skip", "verdict", "lr_event", "warning") or (kind == "attempt" and row["reason"] == "rollback"):
        return "warning"
    return "good" if kind in ("finish", "certified") else "plain"


def _attempt(row: Mapping[str, Any]) -> str:
    where = f"step {row['from_step']:,} (batch {row['from_batch']})"
    source = {"": "the beginning", "snapshot": "a snapshot in memory"}.get(row["checkpoint"], row["checkpoint"])
    match row["reason"]:
        case "start":
            return "Started from step 0."
        case "resume":
            text = f"Resumed at {where} from {source}"
        case "fork":
            text = f"Forked: starts at {where} from {source}"
        case _ if row["checkpoint"] == "in place":
            text = f"Reading batch {row['from_batch']} again at step {row['from_step']:,}"
        case _:
            text = f"Rolled back to {where}, from {source}"
    cause = f", because {row['cause']}" if row["cause"] else ""
    names = [item["document"] for item in row["exclude"]]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    without = f"; from there on without {several(len(names), 'document')}: {shown}" if names else ""
    return f"{text}{cause}{without}."


def _lr_event(row: Mapping[str, Any]) -> str:
    text = f"From step {row['start_step']:,} on the learning rate is {row['factor']:g} of the scheduled one"
    if row["hold_steps"] or row["ramp_steps"]:
        settled = "back to all of it" if row["settle"] == 1 else f"to {row['settle']:g} of it, for good"
        text += f" for {row['hold_steps']:,} steps, then over {row['ramp_steps']:,} steps {settled}"
    return f"{text}, because {row['cause']}.".replace("..", ".")


def _eval(row: Mapping[str, Any]) -> str:
    parts = [f"{name.split('/')[1]} {value:.3f}" for name, value in row.items() if name.endswith("/bits_per_byte")]
    where = "on all held-out text" if row.get("whole") else f"at step {row['step']:,}"
    return f"Held-out bits per byte {where}: {', '.join(parts)}."


def _rest(row: Mapping[str, Any]) -> str:
    hidden = ("n", "kind", "time", "hash", "batch_index", "step", "attempt", "survives")
    return ", ".join(f"{key} {value}" for key, value in row.items() if key not in hidden)


def _start(run: Run) -> tuple[int, int]:
    """Batch and step the run began at: not 0 in a fork."""
    return (run.attempts[0].from_batch, run.attempts[0].from_step) if run.attempts else (0, 0)


def story(run: Run) -> list[Moment]:
    """Everything that happened, in order of time: the ledger's rows and the events it does not hold."""
    moments, attempt, batch, step = [], 0, 0, 0
    saved = {c.name: c for c in run.ledger.checkpoints}
    for row in run.ledger.rows:
        kind = row["kind"]
        if kind == "attempt":
            attempt, batch, step = row["attempt"], row["from_batch"], row["from_step"]
        elif kind == "certified" and row["name"] in saved:
            # A certificate belongs to where its checkpoint is, not to when it was given.
            batch, step = saved[row["name"]].batch_index, saved[row["name"]].step
        elif kind == "lineage":
            batch, step = _start(run)
        else:
            batch, step = row.get("batch_index", batch), row.get("step", step)
        survives = not attempt or run.ledger.row_survives(attempt, batch - (kind in ("attempt", "checkpoint")))
        text, feeling = sentence(kind, row), tone(kind, row)
        if kind == "verdict":
            kind = VERDICTS.get(str(row.get("action")), kind)
        moments.append(Moment(row["time"], attempt, batch, step, kind, text, feeling, survives))
    for event in run.events:
        kind = event["kind"]
        if kind not in QUIET:
            text, feeling = sentence(kind, event), tone(kind, event)
            place = (event["time"], event["attempt"], event["batch_index"], event["step"])
            moments.append(Moment(*place, kind, text, feeling, event["survives"]))
    return sorted(moments, key=lambda moment: moment.time)


def told_briefly(moments: list[Moment]) -> list[Moment]:
    """The same with skipped steps of consecutive batches, one after the other, told in one sentence."""
    told: list[Moment] = []
    first: Moment | None = None
    count = 0
    for moment in moments:
        follows = first and moment.kind == "skip" == told[-1].kind and moment.batch_index == first.batch_index + count
        if not first or not follows or moment.attempt != first.attempt:
            first, count = moment, 1
            told.append(moment)
            continue
        count += 1
        cause = first.text.split(": ", 1)[1]
        batches = f"batches {first.batch_index} to {moment.batch_index}"
        told[-1] = replace(first, text=f"Skipped {count} updates in a row, {batches}. The first: {cause}")
    return told
