"""What a person sees: lines, sentences, the summary."""

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.monitor.console import ConsoleWatcher, print_summary
from surefoot.monitor.facts import RunFacts, Sample
from surefoot.monitor.run import Run
from surefoot.monitor.sentences import sentence
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore
from surefoot.monitor.summary import Summary, summarise
from surefoot.monitor.summary_text import summary_text
from surefoot.monitor.wording import duration, percent, rate, several, short

METRICS = {
    "train/loss": 2.8124,
    "train/loss_smoothed": 2.7941,
    "train/gradient_norm": 0.713,
    "train/lr": 2.4e-3,
    "perf/tokens_per_s": 41_234.0,
    "perf/mfu": 0.523,
    "perf/memory_gib": 1.23,
    "perf/step_s": 0.4,
}


@pytest.fixture
def facts(finished: Path) -> RunFacts:
    return RunFacts.read(Run(finished).last_event("facts"))


def report(step: int) -> StepReport:
    return StepReport(step - 1, step, 16_384 * step, False, "", METRICS, "", ())


def watched(facts: RunFacts, *, terminal: bool) -> str:
    stream = io.StringIO()
    watcher = ConsoleWatcher(facts, print_every=10, stream=stream, terminal=terminal)
    watcher.start()
    for step in range(1, 31):
        watcher.step(report(step))
    watcher.event("checkpoint", {"name": "step-000030-attempt-0001"})
    watcher.close()
    watcher.close()
    return stream.getvalue()


def test_the_first_line_says_what_runs_on_what_and_where(facts: RunFacts) -> None:
    assert facts.line() == (
        "tiny: 6 layers, d_model 192, 2.10M parameters · 19.7M tokens in 1,200 steps of 16.4k · bf16 on cpu, 2 threads · "
        "data 3fa29c1d · config 9ae21b07 · runs/tiny-9ae21b"
    )


def test_a_log_gets_a_plain_line_every_few_steps_and_no_control_codes(facts: RunFacts) -> None:
    lines = watched(facts, terminal=False).splitlines()
    assert lines[0] == facts.line()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["step 10/1,200", "step 20/1,200", "step 30/1,200"]
    for text in ("loss 2.812", "smoothed 2.794", "gradient norm 0.71", "lr 2.4e-3", "41.2k tokens/s", "MFU 52 %"):
        assert text in lines[1]
    assert "1.2 GiB  164k tokens  ETA " in lines[1]
    assert lines[4] == "Saved checkpoint step-000030-attempt-0001."
    assert "\x1b" not in "".join(lines)


def test_a_terminal_gets_a_live_line_that_leaves_only_events_behind(facts: RunFacts) -> None:
    text = watched(facts, terminal=True)
    assert "loss 2.812" in text
    assert "\x1b" in text
    assert "Saved checkpoint step-000030-attempt-0001." in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_live_line_breaks_between_figures_and_drops_none(facts: RunFacts, width: int) -> None:
    watcher = ConsoleWatcher(facts, print_every=10, stream=io.StringIO())
    lines = watcher.line(report(40), width).split("\n")
    assert all(len(line) <= width for line in lines)
    assert "  ".join(lines) == watcher.line(report(40), 0)
    assert len(lines) <= {40: 4, 60: 3, 80: 2, 120: 2, 200: 1}[width]


def test_skipped_batches_do_not_print_the_same_step_twice(facts: RunFacts) -> None:
    stream = io.StringIO()
    watcher = ConsoleWatcher(facts, print_every=10, stream=stream)
    for _ in range(3):
        watcher.step(report(10))
    assert len(stream.getvalue().splitlines()) == 1


def test_events_are_sentences() -> None:
    rollback = {
        "reason": "rollback",
        "from_step": 40,
        "from_batch": 41,
        "checkpoint": "snapshot",
        "exclude": [{"document": d * 16, "from_batch": 41} for d in "abcde"],
        "cause": "the loss rose 3.0 above its band",
    }
    a, b, c = ("a" * 16, "b" * 16, "c" * 16)
    assert sentence("attempt", rollback) == (
        "Rolled back to step 40 (batch 41), from a snapshot in memory, because the loss rose 3.0 above its band; "
        f"from there on without 5 documents: {a}, {b}, {c} and 2 more."
    )
    assert sentence("skip", {"batch_index": 7, "step": 7, "cause": "batch 7: loss nan"}) == (
        "Skipped the update of batch 7: loss nan. The weights are as they were before it."
    )
    assert sentence("eval", {"step": 4, "eval/code/bits_per_byte": 1.5, "eval/code/loss": 2.0}) == (
        "Held-out bits per byte at step 4: code 1.500."
    )
    assert sentence("lineage", {"parent": "runs/a", "step": 400, "diff": [["optim.lr", "1", "2"]]}) == (
        "Forked from runs/a at step 400 with 1 change of the config."
    )
    assert sentence("stop", {"reason": "SIGTERM"}) == "Stopped in good order: SIGTERM."
    assert sentence("warning", {"text": "The disk is full."}) == "The disk is full."
    assert sentence("novelty", {"n": 3, "colour": "blue"}) == "novelty: colour blue"


def test_the_summary_has_the_figures_of_the_surviving_run(finished: Path) -> None:
    run = Run(finished)
    summary = summarise(run)
    losses = run.metrics()["train/loss"]
    assert summary.final_loss == pytest.approx(losses[-50:].mean(), abs=1e-12)
    assert (summary.step, summary.batch_index, summary.skipped, summary.rollbacks, summary.resumes) == (
        1200,
        1201,
        1,
        1,
        1,
    )
    assert summary.tokens == 1201 * 16_384
    assert summary.train_s == pytest.approx(1201 * 16_384 / 33_000)
    assert summary.lost_s == pytest.approx(240 * 16_384 / 33_000)
    assert summary.excluded == ("5eedf00ddeadbeef",)
    assert summary.checkpoint == "step-001200-attempt-0003"
    assert [(d.name, d.zlib_bits_per_byte, d.xz_bits_per_byte) for d in summary.domains] == [
        ("code", 2.021, 1.724),
        ("prose", 2.642, 2.310),
    ]
    assert summary.how_to_continue == f"surefoot fork {finished} --at 1200 --set steps=2400"


def test_the_summary_in_words_shows_the_model_beside_the_compressors(finished: Path) -> None:
    text = summary_text(summarise(Run(finished)), "report.html")
    assert text.startswith("tiny-9ae21b finished after step 1,200.\n")
    assert "  code     1.521    2.021    1.724  12 % fewer bits than the better compressor\n" in text
    assert "1 skipped step, 1 rollback, 1 resume, 1 excluded document" in text
    assert "prose, continued by the model from ▮:\n  | Return▮ a new object" in text
    assert "report     report.html" in text
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 80


def test_a_sample_keeps_its_lines_but_not_its_deserts(finished: Path) -> None:
    desert = Sample(domain="code", prompt="\n\nimport os\n", text="\n  \n\nimport re\n\n\n" + "x " * 60 + "\n")
    text = summary_text(replace(summarise(Run(finished)), samples=(desert,)))
    shown = [line for line in text.splitlines() if line.startswith("  |")]
    assert shown[:4] == ["  | import os", "  | ▮", "  |", "  | import re"]
    assert len(shown) == 7
    assert max(map(len, shown)) <= 78


def test_the_summary_as_json_is_strict_and_says_null_where_nothing_is_known(finished: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    print_summary(summarise(Run(finished)), as_json=True, report="r.html", stream=out)
    facts = json.loads(out.getvalue())
    assert facts["step"] == 1200
    assert facts["domains"][0]["bits_per_byte"] == pytest.approx(1.521, abs=1e-3)
    assert facts["report"] == "r.html"
    RunStore(tmp_path / "x", print).close()
    out = io.StringIO()
    print_summary(summarise(Run(tmp_path / "x")), as_json=True, stream=out)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    facts = json.loads(out.getvalue(), parse_constant=refuse)
    assert (facts["final_loss"], facts["state"], facts["domains"]) == (None, "empty", [])
    assert "has not started, at step 0" in summary_text(summarise(Run(tmp_path / "x")))


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path, make_synthetic: Callable[..., Path]) -> None:
    folder = make_synthetic(tmp_path / "x", 120, finish=False)
    summary = summarise(Run(folder))
    assert summary.how_to_continue == "surefoot train tiny"
    assert summary_text(summary).startswith("x ended without a word at step 120.\n")


def test_a_model_that_compresses_worse_than_xz_is_told_so(finished: Path) -> None:
    summary: Summary = summarise(Run(finished))
    domain = replace(summary.domains[0], bits_per_byte=1.9)
    assert domain.yardstick == "a general-purpose compressor still does better"
    assert replace(domain, zlib_bits_per_byte=math.nan).yardstick == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1.00k"),
        (41_234, "41.2k"),
        (999_999, "1.00M"),
        (2.5e9, "2.50B"),
        (0.5, "0.5"),
    ],
)
def test_large_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_durations_rates_shares_and_counts_read_well() -> None:
    assert [duration(s) for s in (0.4, 42, 727, 12_310, 187_800)] == ["0:00", "0:42", "12:07", "3:25:10", "2 d 04:10"]
    assert duration(math.inf) == "?"
    assert [rate(x) for x in (3e-3, 2.41e-3, 0.0, 1e-10)] == ["3e-3", "2.41e-3", "0", "1e-10"]
    assert percent(0.523) == "52 %"
    assert percent(math.nan) == "? %"
    assert [several(n, "step") for n in (0, 1, 2)] == ["no steps", "1 step", "2 steps"]
