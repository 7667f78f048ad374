"""Where a run is going: its last step, its time, the batch size that its noise asks for."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.monitor.console import ConsoleWatcher
from surefoot.monitor.facts import RunFacts
from surefoot.monitor.report import write_report
from surefoot.monitor.run import Run
from surefoot.monitor.sentences import sentence
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore
from surefoot.monitor.summary import summarise
from surefoot.monitor.summary_text import summary_text


@pytest.fixture
def timed(finished: Path) -> RunFacts:
    """Of a run bounded by two hours whose clock has not decided its last step."""
    return replace(RunFacts.read(Run(finished).last_event("facts")), tokens=0, steps=0, bound_s=7200.0)


def test_the_first_line_of_a_run_bounded_by_time_says_the_time(timed: RunFacts) -> None:
    assert "parameters · 2:00:00 of 16.4k tokens a step · bf16" in timed.line()


def test_the_console_counts_down_the_time_and_then_the_steps(timed: RunFacts) -> None:
    stream = io.StringIO()
    watcher = ConsoleWatcher(timed, print_every=1, stream=stream, terminal=False)
    metrics = {"perf/train_s": 3600.0, "train/noise_scale": 51_234.0, "perf/step_s": 2.0}
    watcher.step(StepReport(7, 8, 131_072, False, "", metrics, "", ()))
    watcher.event("horizon", {"step": 8, "last_step": 10, "batch_index": 7})
    watcher.step(StepReport(8, 9, 147_456, False, "", metrics, "", ()))
    first, said, second = stream.getvalue().splitlines()
    assert first == "step 8  critical batch 51.2k tokens  131k tokens  ETA 1:00:00"
    assert said == "The decay begins at step 8, so that the run ends with its bound: at step 10."
    assert second.startswith("step 9/10  ")
    assert "ETA 0" in second or "ETA 1" in second or "ETA 2" in second


@pytest.mark.parametrize(
    ("length", "asked", "told"),
    [
        (2.4, 2, "The decay begins at step 8, so that the run ends with its bound: at step 10."),
        (
            22,
            1500,
            "The time of the bound does not suffice: its decay is cut from 1,500 to 22 steps, which begin at step 8; the run ends at step 10.",
        ),
        (0.0, 0, "The time of the bound is over: the run ends at step 10."),
    ],
)
def test_what_the_clock_decided_is_said_as_it_is(length: float, asked: int, told: str) -> None:
    assert sentence("horizon", {"step": 8, "last_step": 10, "decay_steps": length, "decay_asked": asked}) == told


def bounded(folder: Path, timed: RunFacts, *, decided: bool) -> Run:
    with RunStore(folder, print) as store:
        store.write_config('recipe = "tiny"\nsteps = 999\n[bound]\nkind = "hours"\nhours = 2.0\n')
        store.write_environment({"argv": ["surefoot", "train", "tiny"], "python": "3.11.9", "torch": "2.13.0"})
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        timed.write(store)
        for batch in range(4):
            noise = {"train/noise_scale": 1000.0 * batch} if batch else {}
            store.write_step(StepReport(batch, batch + 1, 100, False, "", {"train/loss": 3.0, **noise}, "", ()))
        if decided:
            store.record("horizon", step=4, batch_index=3, last_step=5, train_s=7000.0)
    return Run(folder)


def test_the_summary_knows_the_end_once_it_is_decided_and_never_before(timed: RunFacts, tmp_path: Path) -> None:
    open_end, decided = (bounded(tmp_path / str(n), timed, decided=bool(n)) for n in range(2))
    assert (summarise(open_end).steps, summarise(decided).steps) == (0, 5)
    assert " at step 4 of 5" in summary_text(summarise(decided))
    assert " of 999" not in summary_text(summarise(open_end))
    write_report(tmp_path / "0")
    page = (tmp_path / "0" / "report.html").read_text()
    assert "trained for 2:00:00 in steps of 16.4k tokens" in page
    assert "tokens: critical batch size, by the gradient noise scale" in page


def test_the_last_critical_batch_size_is_in_the_summary(timed: RunFacts, finished: Path, tmp_path: Path) -> None:
    found = summarise(bounded(tmp_path / "run", timed, decided=True))
    assert found.critical_batch == 3000
    assert "critical batch 3.00k tokens, by the gradient noise scale; the first batch has 16.4k" in summary_text(found)
    assert "critical batch" not in summary_text(summarise(Run(finished)))
    assert summarise(Run(finished)).to_dict()["critical_batch"] is None


def test_a_finished_run_that_was_bounded_by_time_is_continued_by_steps(
    timed: RunFacts, tmp_path: Path, make_synthetic: Callable[..., Path]
) -> None:
    bounded(tmp_path / "run", timed, decided=True)
    with RunStore(tmp_path / "run", print) as store:
        store.record("finish", step=5, batch_index=5, digest="0")
    found = summarise(Run(tmp_path / "run"))
    assert found.how_to_continue.endswith("--set bound.kind=steps --set steps=10")
    plain = summarise(Run(make_synthetic(tmp_path / "plain", 120)))
    assert "bound" not in plain.how_to_continue
