"""How parameters move, in the report: a line and a row for every role, and QK-clip where it was on."""

import math
from pathlib import Path

import pytest

from surefoot.monitor.console import ConsoleWatcher
from surefoot.monitor.facts import RunFacts
from surefoot.monitor.guard_charts import guard_charts
from surefoot.monitor.report import report_html
from surefoot.monitor.role_figures import RoleFigures
from surefoot.monitor.role_section import role_charts, role_table
from surefoot.monitor.run import Run
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore
from surefoot.monitor.summary import summarise

ROLES = ("embedding", "hidden", "norm", "output", "bias", "router", "expert", "latent")


def written(folder: Path, *, rates: bool = True, clipping: bool = True) -> Run:
    """Twenty steps, a probe every fifth."""
    with RunStore(folder, print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        for batch in range(20):
            metrics = {"train/loss": 3.0, "train/skipped": 0.0}
            if batch % 5 == 0:
                for place, role in enumerate(ROLES):
                    metrics[f"inside/{role}/update_ratio"] = 1e-3 * (place + 1) / (batch + 1)
                    if rates:
                        metrics[f"inside/{role}/lr"] = 1e-3 * (place + 1)
                        metrics[f"inside/{role}/weight_decay"] = 2.5e-5 * place
            if clipping:
                metrics["train/heads_clipped"] = float(batch < 3)
                if batch < 7:
                    metrics["train/attention_logit_max"] = 200.0 - 10 * batch
            store.write_step(StepReport(batch, batch + 1, 8 * (batch + 1), False, "", metrics, "", ()))
    return Run(folder)


def test_every_role_has_a_line_of_its_updates_and_the_seventh_is_told_from_the_first(tmp_path: Path) -> None:
    (chart,) = role_charts(written(tmp_path / "run"))
    assert chart.title == "How parameters move"
    assert [line.name for line in chart.lines] == list(ROLES)
    assert all(line.x == [0, 5, 10, 15] and line.dots for line in chart.lines)
    assert chart.lines[1].y == [2e-3, pytest.approx(2e-3 / 6), pytest.approx(2e-3 / 11), pytest.approx(2e-3 / 16)]
    assert len({(line.look, line.dashed) for line in chart.lines}) == len(ROLES)


def test_the_table_holds_the_last_rate_decay_and_update_of_every_role(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    html = report_html(run)
    assert "At step 16, the last that was looked at." in html
    assert "<td>hidden</td><td>2e-3</td><td>2.5e-5</td><td>1.25e-4</td>" in html
    assert "<td>embedding</td><td>1e-3</td><td>0</td><td>6.25e-5</td>" in html
    assert html.count('<table class="roles">') == 1
    assert html.index("<h2>How parameters move</h2>") < html.index('<table class="roles">')
    roles = summarise(run).roles
    assert roles[1] == RoleFigures(role="hidden", step=16, lr=2e-3, weight_decay=2.5e-5, update_ratio=2e-3 / 16)


def test_rows_of_before_there_were_rates_show_none_and_a_run_without_probes_has_no_section(tmp_path: Path) -> None:
    old = written(tmp_path / "old", rates=False)
    assert "<td>hidden</td><td>–</td><td>–</td><td>1.25e-4</td>" in report_html(old)
    assert summarise(old).to_dict()["roles"][0]["lr"] is None
    with RunStore(tmp_path / "bare", print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        store.write_step(StepReport(0, 1, 8, False, "", {"train/loss": 3.0}, "", ()))
    bare = Run(tmp_path / "bare")
    assert role_charts(bare) == []
    assert role_table(summarise(bare).roles) == ""
    assert "How parameters move" not in report_html(bare)


def test_a_role_cannot_become_markup() -> None:
    figures = RoleFigures(role="<b>", step=1, lr=math.nan, weight_decay=0.0, update_ratio=1.0)
    assert "<td>&lt;b&gt;</td>" in role_table([figures])


def test_what_qk_clip_saw_and_did_is_drawn_where_it_was_on(tmp_path: Path) -> None:
    drawn = {chart.title: chart for chart in guard_charts(written(tmp_path / "on"))}
    (line,) = drawn["Attention logits"].lines
    assert (line.name, line.x, line.y[0], line.y[-1]) == ("largest of a batch", list(range(7)), 200.0, 140.0)
    (line,) = drawn["Heads clipped"].lines
    assert line.y == [1.0] * 3 + [0.0] * 17
    off = {chart.title for chart in guard_charts(written(tmp_path / "off", clipping=False))}
    assert not off & {"Attention logits", "Heads clipped"}


def test_the_live_line_says_how_many_heads_were_clipped(tmp_path: Path) -> None:
    facts = RunFacts(
        recipe="x", model="m", num_params=1, tokens=1, steps=2, batch_tokens=1, precision="fp32", device="CPU",
        data_fingerprint="a", config_fingerprint="b", folder="c",
    )  # fmt: skip
    watcher = ConsoleWatcher(facts, print_every=1)
    for count, text in ((0.0, "no heads clipped"), (1.0, "1 head clipped"), (12.0, "12 heads clipped")):
        report = StepReport(0, 1, 8, False, "", {"train/heads_clipped": count}, "", ())
        assert f"  {text}  " in watcher.line(report, 0)
