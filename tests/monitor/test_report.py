"""The report: offline, thinned without losing a spike, and telling what happened."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.monitor.charts import charts
from surefoot.monitor.envelope import BUCKETS, envelope, missing
from surefoot.monitor.health import health
from surefoot.monitor.report import report_html, write_report
from surefoot.monitor.run import Run
from surefoot.monitor.sentences import story, told_briefly
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore
from surefoot.monitor.summary import domains, summarise


def embedded(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found.group(1))


@pytest.mark.parametrize("seed", range(5))
def test_each_of_a_hundred_one_step_spikes_in_a_hundred_thousand_steps_is_drawn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = np.arange(100_000), rng.normal(3.0, 0.05, 100_000)
    places = rng.choice(100_000, 100, replace=False)
    y[places] += np.where(rng.random(100) < 0.5, 4.0, -2.0)
    xs, ys = envelope(x, y)
    drawn: dict[int, list[float]] = {}
    for place, value in zip(xs, ys, strict=True):
        assert value == y[place]
        drawn.setdefault(place * BUCKETS // 100_000, []).append(value)
    for place in places.tolist():
        there = drawn[place * BUCKETS // 100_000]
        assert max(there) >= y[place] if y[place] > 3 else min(there) <= y[place]
    assert len(xs) <= 2 * BUCKETS
    assert xs == sorted(xs)


def test_one_spike_in_a_hundred_thousand_steps_is_in_the_page(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        for batch in range(100_000):
            metrics = {"train/loss": 9.75 if batch == 77_777 else 3.0}
            store.write_step(StepReport(batch, batch + 1, 8 * (batch + 1), False, "", metrics, "", ()))
    run = Run(tmp_path / "x")
    (loss,) = [chart for chart in charts(run, ()) if chart.title == "Training loss"]
    raw = next(line for line in loss.lines if line.look == "raw")
    assert [x for x, y in zip(raw.x, raw.y, strict=True) if y == 9.75] == [77_777]
    assert len(raw.x) <= 2 * BUCKETS
    assert "lowest and highest of every 100 batches" in loss.sentence


def test_short_series_are_drawn_whole_and_gaps_break_the_line() -> None:
    x, y = np.array([0, 1, 2, 6, 7]), np.array([1.0, np.nan, 3.0, 4.0, np.inf])
    assert envelope(x, y) == ([0, 1, 2, 3, 6, 7], [1.0, None, 3.0, None, 4.0, None])
    assert envelope(np.array([], np.int64), np.array([])) == ([], [])
    assert missing(x) == [(3, 5)]


def test_a_gap_of_a_bucket_breaks_a_thinned_line() -> None:
    x = np.concatenate([np.arange(50_000), np.arange(60_000, 100_000)])
    xs, ys = envelope(x, np.ones(len(x)))
    assert [a for a, b in zip(xs, ys, strict=True) if b is None] == [60_000]
    assert envelope(np.arange(5000), np.full(5000, np.nan)) == ([], [])


def test_the_report_loads_nothing_from_anywhere_and_fits_a_phone(finished: Path) -> None:
    html = report_html(Run(finished))
    own = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r'(src|href)\s*=\s*"', own)
    assert "url(" not in own
    assert "@import" not in own
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in own
    assert "prefers-color-scheme: dark" in own
    assert "Plotly.react" in html
    assert 4_000_000 < len(html) < 7_000_000


def test_the_report_says_what_happened_in_words_and_marks_it_on_the_charts(finished: Path) -> None:
    html = report_html(Run(finished))
    for text in (
        "Healthy again: it met faults and recovered.",
        "Skipped the update of batch 487: loss nan, gradient norm inf, not finite.",
        "Rolled back to step 599 (batch 600), from step-000599-attempt-0002, because the loss rose 3.0 above its band; "
        "from there on without 1 document: 5eedf00ddeadbeef.",
        "Resumed at step 240 (batch 240) from step-000240-attempt-0001.",
        "Finished at step 1,200.",
        "Steps that were taken back cost 1:59.",
        "12 % fewer bits than the better compressor",
        "surefoot fork",
    ):
        assert text.replace("'", "&#x27;") in html, text
    marks = {mark["batch"]: mark for mark in embedded(html)["moments"]}
    assert marks[487]["kind"] == "skip"
    assert (marks[600]["kind"], marks[600]["tone"], marks[600]["line"]) == ("attempt", "warning", True)
    assert "Saved checkpoint step-000599-attempt-0002." in marks[600]["hover"].replace("<br>", " ")
    assert marks[1201]["kind"] == "finish"


def test_every_chart_of_the_issue_is_there_with_what_was_taken_back(finished: Path) -> None:
    run = Run(finished)
    drawn = {chart.title: chart for chart in charts(run, domains(run, run.metrics()))}
    assert list(drawn) == ["Training loss", "Held-out text", "Gradient norm", "Learning rate", "Throughput"]
    loss = drawn["Training loss"].lines
    assert {line.look for line in loss} == {"raw", "main", "abandoned"}
    assert max(y for line in loss if line.look == "abandoned" for y in line.y if y) > 5
    assert (
        max(y for line in loss if line.look == "raw" for y, x in zip(line.y, line.x, strict=True) if y and x > 1000) < 3
    )
    held_out = drawn["Held-out text"].lines
    assert [line.name for line in held_out] == ["code", "code, best compressor", "prose", "prose, best compressor"]
    assert held_out[1].y == [1.724, 1.724]


def test_the_report_of_a_killed_run_and_of_an_empty_one_can_be_drawn(
    tmp_path: Path, make_synthetic: Callable[..., Path]
) -> None:
    killed = make_synthetic(tmp_path / "killed", 120, finish=False)
    metrics = killed / "attempts" / "0003" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    ledger = killed / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b'{"n":')
    path = write_report(killed)
    assert path == killed / "report.html"
    assert "Interrupted: nothing is lost up to step-000120-attempt-0003." in path.read_text()
    RunStore(tmp_path / "empty", print).close()
    assert "Not started." in write_report(tmp_path / "empty", tmp_path / "other.html").read_text()
    assert (tmp_path / "other.html").exists()


def test_text_from_the_run_cannot_become_markup(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", print) as store:
        store.write_config('recipe = "</script><b>"\n')
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        store.write_event("note", 0, 0, text="</script><script>alert(1)</script>")
        store.write_metrics(0, 1, {"eval/<!--<script>/bits_per_byte": 2.0})
    html = report_html(Run(tmp_path / "x"))
    assert "<script>alert(1)" not in html
    assert "</script><b>" not in html
    assert "<!--<script>" not in html
    assert embedded(html)["moments"][0]["hover"].count("&lt;/script&gt;") == 2


def test_a_halted_run_is_called_halted(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        for batch in range(5):
            store.record("skip", batch_index=batch, step=0, cause=f"batch {batch}: loss nan")
            store.write_step(StepReport(batch, 0, 8, True, "loss nan", {"train/skipped": 1.0}, "", ()))
        store.record("verdict", action="halt", text="5 skipped steps in a row", batch_index=4)
        store.record("stop", reason="5 skipped steps in a row")
    run = Run(tmp_path / "x")
    found = health(run, summarise(run), run.status())
    assert (found.tone, found.headline) == ("bad", "Halted: the guard gave up.")
    told = [moment.text for moment in told_briefly(story(run))]
    assert (
        "Skipped 5 updates in a row, batches 0 to 4. The first: loss nan. The weights are as they were before it."
        in told
    )
    assert sum("Skipped" in text for text in told) == 1


def test_lost_rows_are_said(tmp_path: Path) -> None:
    with RunStore(tmp_path / "x", print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        for batch in (0, 1, 2, 6, 7, 9):
            store.write_step(StepReport(batch, batch + 1, 8, False, "", {"train/loss": 3.0}, "", ()))
    run = Run(tmp_path / "x")
    sentences = health(run, summarise(run), run.status()).sentences
    assert "Rows are missing for batches 3 to 5, 8: the curves have gaps there." in sentences


def test_a_fork_is_drawn_with_its_parents_curve_and_marked_where_it_left(
    tmp_path: Path, make_synthetic: Callable[..., Path]
) -> None:
    parent = make_synthetic(tmp_path / "parent", 120)
    with RunStore(tmp_path / "child", print) as store:
        store.record("lineage", parent=str(parent), step=59, diff=[["optim.lr", "3e-3", "1e-3"]])
        source = Run(parent).ledger.checkpoints[1]
        batch, step = source.batch_index, source.step
        store.open_attempt(reason="fork", from_step=step, from_batch=batch, checkpoint=source.name)
        store.write_step(StepReport(batch, step + 1, 8, False, "", {"train/loss": 2.0}, "", ()))
    html = report_html(Run(tmp_path / "child"))
    data = embedded(html)
    raw = next(line for line in data["charts"][0]["lines"] if line["look"] == "raw")
    assert raw["x"] == list(range(batch + 1))
    assert raw["y"][-1] == 2.0
    assert [(mark["batch"], mark["line"]) for mark in data["moments"]] == [(batch, True)]
    assert "whose curves come first" in html
