"""The report's guard section: every deed with its evidence, newest first, marked where it happened, and nothing of it markup."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from surefoot.config.data import Exclusion
from surefoot.monitor.guard_charts import guard_charts
from surefoot.monitor.guard_section import SHOWN, guard_section
from surefoot.monitor.guard_story import deeds
from surefoot.monitor.health import health
from surefoot.monitor.report import report_html
from surefoot.monitor.run import Run
from surefoot.monitor.sentences import sentence, story
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore
from surefoot.monitor.summary import summarise

SPIKE = {
    "kind": "loss_spike",
    "severity": "alarm",
    "text": "loss 9.31, 41 sigmas above its trend of 3.02",
    "batch_index": 60,
    "onset": 57,
    "value": 9.31,
    "normal": 3.02,
    "z": 41.2,
    "where": "",
}
NOTE = SPIKE | {"kind": "throughput", "severity": "note", "text": "throughput down by a third", "z": 0.0, "onset": 20}
SUSPECT = {
    "document": "5eedf00ddeadbeef",
    "domain": "prose",
    "row": 3,
    "loss": math.inf,
    "z": math.inf,
    "repetition": 0.98,
    "entropy": 0.07,
    "compression": 0.021,
    "reasons": ["98 % of it is one n-gram repeated", "loss 40 sigmas above prose"],
    "text": "</pre><script>alert(1)</script> aaaaaaaa",
}
PASSES = [
    {"kind": "same_batch", "loss": 9.31, "gradient_norm": 88.0, "same_bits": True, "excess": 6.29},
    {"kind": "without_suspects", "loss": 3.05, "gradient_norm": 0.61, "same_bits": False, "excess": 0.03},
    {"kind": "full_precision", "loss": math.nan, "gradient_norm": math.inf, "same_bits": False, "excess": math.nan},
]
DIAGNOSIS = {"cause": "data", "text": "without 1 document the batch is healthy", "state_is_broken": False}
RATE = {"start_step": 74, "factor": 0.1, "hold_steps": 20, "ramp_steps": 100, "settle": 0.5}


def step(store: RunStore, batch: int, updates: int, *, skipped: bool = False, loss: float = 3.0) -> None:
    metrics = {
        "train/loss": loss,
        "train/loss_smoothed": 3.0,
        "train/gradient_norm": 0.5 + 0.01 * batch,
        "train/skipped": float(skipped),
        "train/document_loss_max": loss + 1.5,
        "train/document_loss_p999": loss + 1.5,
        "train/update_size": 0.0 if skipped else 1e-4,
        "guard/loss_zscore": 0.1 * (batch % 7),
    }
    if batch % 10 == 0:
        metrics |= {f"inside/layer_{layer}/attention_logit_max": 5.0 + layer + 0.1 * batch for layer in range(8)}
    store.write_step(StepReport(batch, updates, 64 * (batch + 1), skipped, "x" * skipped, metrics, "", ()))


def guarded_run(folder: Path) -> Path:
    """A note, a skipped document, three NaNs in a row, a clipped gradient, a rollback with a dip of the rate, another dip, a halt."""
    with RunStore(folder, print) as store:
        store.write_config('recipe = "tiny"\nsteps = 200\n')
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        for batch in range(60):
            step(store, batch, batch + 1)
        store.record("verdict", action="proceed", text=NOTE["text"], batch_index=20, step=21, findings=[NOTE])
        store.record(
            "skip",
            batch_index=60,
            step=60,
            cause="batch 60: loss 9.31 is 41 sigmas above its trend; without document 5eedf00ddeadbeef it is healthy",
            findings=[SPIKE],
            diagnosis=DIAGNOSIS,
            suspects=[SUSPECT],
            passes=PASSES,
        )
        step(store, 60, 60, skipped=True, loss=9.31)
        for batch in (61, 62, 63):
            store.record("skip", batch_index=batch, step=60, cause=f"batch {batch}: loss nan, not finite")
            step(store, batch, 60, skipped=True, loss=math.nan)
        for batch in range(64, 80):
            step(store, batch, batch - 3)
        clipped = SPIKE | {"kind": "gradient_spike", "where": "embedding"}
        store.record(
            "verdict", action="clip_harder", text="gradient clipped", batch_index=70, step=67, findings=[clipped]
        )
        slow = SPIKE | {"kind": "slow_spike", "batch_index": 79, "onset": 65}
        broken = DIAGNOSIS | {"cause": "optimiser", "state_is_broken": True}
        cause = "the loss rose slowly"
        store.record(
            "verdict",
            action="rollback",
            text="Rolling back: it rose.",
            batch_index=79,
            to_batch=64,
            findings=[slow],
            diagnosis=broken,
        )
        store.record("lr_event", batch_index=79, cause=cause, **RATE)
        exclude = [Exclusion(document="5eedf00ddeadbeef", from_batch=64)]
        store.open_attempt(
            reason="rollback", from_step=60, from_batch=64, checkpoint="snapshot", exclude=exclude, cause=cause
        )
        for batch in range(64, 90):
            step(store, batch, batch - 3)
        store.record("verdict", action="lr_event", text="logits grow", batch_index=89, step=86, findings=[SPIKE])
        store.record("lr_event", batch_index=89, cause="logits grow", **(RATE | {"start_step": 86, "settle": 1.0}))
        store.record(
            "verdict", action="halt", text="The budget is spent: fork with a lower rate.", batch_index=90, step=86
        )
        store.record("stop", reason="halted")
    return folder


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(guarded_run(tmp_path_factory.mktemp("guarded") / "tiny-1"))


def test_deeds_come_newest_first_each_once_with_what_became_of_it(guarded: Run) -> None:
    told = [(deed.what, deed.batch_index, deed.survives, deed.grave) for deed in deeds(guarded)]
    assert told == [
        ("halted", 90, True, True),
        ("learning rate", 89, True, True),
        ("rolled back", 79, True, True),
        ("learning rate", 79, True, True),
        ("clipped harder", 70, False, True),
        ("skipped", 61, True, True),
        ("skipped", 60, True, True),
        ("noted", 20, True, False),
    ]


def test_the_deed_that_was_ordered_has_the_evidence_of_its_verdict(guarded: Run) -> None:
    _, rate, back, _, _, nans, bad, _ = deeds(guarded)
    assert rate.findings[0]["kind"] == "loss_spike"
    assert rate.text == (
        "From step 86 on the learning rate is 0.1 of the scheduled one for 20 steps, then over 100 steps back to all of it, "
        "because logits grow."
    )
    assert (back.diagnosis["cause"], back.findings[0]["onset"]) == ("optimiser", 65)
    assert back.text.startswith(
        "Rolled back to step 60 (batch 64), from a snapshot in memory, because the loss rose slowly"
    )
    assert nans.text.startswith(
        "3 updates in a row skipped, batches 61 to 63. The first: Skipped the update of batch 61"
    )
    assert nans.bare
    assert len(bad.passes) == 3


def test_a_rollback_stands_while_the_attempt_it_began_does(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        for at, to in ((79, 64), (90, 70), (95, 60)):
            store.record("verdict", action="rollback", text="Rolling back: it rose.", batch_index=at, to_batch=to)
            store.open_attempt(reason="rollback", from_step=to, from_batch=to, checkpoint="snapshot", cause="it rose")
            told = [(deed.batch_index, deed.survives) for deed in deeds(Run(tmp_path / "x"))]
            if at == 90:
                assert told == [(90, True), (79, True)]
    assert told == [(95, True), (90, False), (79, False)]


def test_the_page_shows_the_evidence_and_none_of_it_becomes_markup(guarded: Run) -> None:
    html = report_html(guarded)
    section = html[html.index("What the guard saw and did") : html.index("<h2>What happened")]
    for text in (
        "Evidence: likely cause data, 1 finding, 3 extra passes, 1 suspect",
        "<b>Likely cause: data.</b> without 1 document the batch is healthy.",
        "alarm: loss spike</b> loss 9.31, 41 sigmas above its trend of 3.02.",
        "(9.31, normally 3.02, 41.2 sigmas off, traced back to batch 57)",
        "<td>the same batch again, same bits</td><td>9.31</td><td>88</td><td>6.29</td>",
        "<td>the same batch in fp32</td><td>nan</td><td>inf</td><td>nan</td>",
        "98 % of it is one n-gram repeated; loss 40 sigmas above prose",
        "prose, row 3; loss inf, inf sigmas from its domain; 98 % repeated; 0.07 bits a token; compresses to 2 %",
        "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt; aaaaaaaa",
        "only going back helps",
        "alarm: gradient spike embedding",
        '<span class="badge bad">halted</span> The budget is spent',
        '<span class="badge plain">noted</span>',
        "skipped 2, noted 1",
    ):
        assert text in section, text
    assert "<script>" not in section
    assert section.index("halted</span>") < section.index("noted</span>")


def test_the_headline_counts_what_was_done(guarded: Run) -> None:
    summary = summarise(guarded)
    assert (summary.skipped, summary.rollbacks, summary.lr_events) == (4, 1, 2)
    assert "The learning rate was changed 2 times to calm it." in health(guarded, summary, guarded.status()).sentences


def test_what_changed_the_course_is_marked_on_the_loss_curve(guarded: Run) -> None:
    html = report_html(guarded)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found.group(1))
    (loss,) = [chart for chart in data["charts"] if chart["title"] == "Training loss"]
    marks = {(mark["batch"], mark["kind"]): mark for mark in loss["marks"]}
    assert set(marks) == {
        (60, "skip"),
        (61, "skip"),
        (62, "skip"),
        (63, "skip"),
        (79, "lr_event"),
        (64, "attempt"),
        (89, "lr_event"),
        (90, "verdict"),
    }
    assert marks[60, "skip"]["y"] == 9.31
    assert marks[62, "skip"]["y"] == 3.0  # itself NaN: on the smoothed curve
    assert marks[79, "lr_event"]["y"] == 3.0
    assert "Skipped the update of batch 60" in marks[60, "skip"]["hover"].replace("<br>", " ")
    assert all(not chart["marks"] for chart in data["charts"] if chart["title"] != "Training loss")


def test_signals_are_drawn_where_the_rows_have_them(guarded: Run, finished: Path) -> None:
    drawn = {chart.title: chart for chart in guard_charts(guarded)}
    assert list(drawn) == ["Hardest documents", "Size of the update", "Distance from the trend", "Attention logits"]
    largest, median = drawn["Attention logits"].lines
    assert (largest.name, largest.x[:2], largest.y[0]) == ("largest of 8 layers", [0, 10], 12.0)
    assert median.y[0] == 8.5
    (update,) = drawn["Size of the update"].lines
    assert (update.y[59], update.y[60]) == (1e-4, None)
    # Here the 99.9th percentile is the largest loss itself.
    assert [line.name for line in drawn["Hardest documents"].lines] == ["largest of the batch"]
    assert guard_charts(Run(finished)) == []


def test_a_note_is_neither_yellow_nor_a_line_through_the_charts(guarded: Run) -> None:
    by_batch = {moment.batch_index: moment for moment in story(guarded) if moment.kind == "noted"}
    assert (by_batch[20].tone, by_batch[70].tone) == ("plain", "warning")
    html = report_html(guarded)
    assert '"batch":20,"kind":"noted","tone":"plain","survives":true,"line":false' in html


def test_a_rate_that_is_changed_for_good_at_once_is_said_so() -> None:
    text = sentence("lr_event", RATE | {"hold_steps": 0, "ramp_steps": 0, "cause": "it grew."})
    assert text == "From step 74 on the learning rate is 0.1 of the scheduled one, because it grew."


def test_an_unharmed_run_says_so_and_a_long_story_is_cut_aloud(guarded: Run) -> None:
    assert "Nothing stood out, and nothing had to be done." in guard_section([])
    (first, *_) = deeds(guarded)
    html = guard_section([first] * (SHOWN + 5))
    assert f"The newest {SHOWN} of {SHOWN + 5}; ledger.jsonl has them all." in html
    assert html.count("<li") == SHOWN


def test_a_batch_read_again_without_a_document_is_told_as_that_and_is_no_rollback(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", print) as store:
        store.write_config('recipe = "tiny"\nsteps = 20\n')
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        for batch in range(6):
            step(store, batch, min(batch + 1, 5), skipped=batch == 5)
        row = {
            "text": "Leaving out 1 document: it did it.",
            "batch_index": 5,
            "to_batch": 5,
            "exclude": ["5eedf00ddeadbeef"],
        }
        store.record("verdict", action="exclude", **row, diagnosis=DIAGNOSIS, suspects=[SUSPECT])
        left_out = (Exclusion(document="5eedf00ddeadbeef", from_batch=5),)
        store.open_attempt(
            reason="rollback", from_step=5, from_batch=5, checkpoint="in place", exclude=left_out, cause="it did it"
        )
        for batch in range(5, 12):
            step(store, batch, batch + 1)
    run = Run(tmp_path / "run")
    summary = summarise(run)
    assert (summary.read_again, summary.rollbacks, summary.skipped, len(summary.excluded)) == (1, 0, 0, 1)
    told = health(run, summary, run.status()).sentences
    assert "1 batch was read again without documents that had spoilt it." in told
    assert not any("nothing had to be undone" in text for text in told)
    (deed,) = deeds(run)
    assert (deed.what, deed.batch_index, deed.diagnosis["cause"]) == ("left out", 5, "data")
    assert deed.text.startswith("Reading batch 5 again at step 5, because it did it; from there on without 1 document")
    assert "left out" in guard_section([deed])
