"""report.html: one file that opens offline, drawn from the run folder alone, also of a run that is running or was killed."""

from pathlib import Path

from surefoot.monitor.charts import charts
from surefoot.monitor.durable import write_atomic
from surefoot.monitor.guard_charts import guard_charts, with_deeds
from surefoot.monitor.guard_story import deeds
from surefoot.monitor.health import health
from surefoot.monitor.page import page
from surefoot.monitor.role_section import role_charts
from surefoot.monitor.run import Run
from surefoot.monitor.sentences import story
from surefoot.monitor.summary import summarise


def report_html(run: Run) -> str:
    """The report as one HTML document."""
    summary = summarise(run)
    batches = run.history()["batch_index"]
    span = (int(batches[0]), int(batches[-1])) if len(batches) else (0, 1)
    moments = story(run)
    drawn = [*with_deeds(charts(run, summary.domains), run, moments), *guard_charts(run), *role_charts(run)]
    return page(summary, health(run, summary, run.status()), drawn, moments, deeds(run), run.config, span)


def write_report(folder: str | Path, path: Path | None = None) -> Path:
    """Write the report of a run beside its ledger, or to ``path``, and return where it is. StoreError."""
    run = Run(folder)
    target = path or run.folder / "report.html"
    write_atomic(target, report_html(run), sync=False)
    return target
