"""From an open folder to an exit code: what ``train`` and ``fork`` share."""

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import exit_codes
from surefoot.config.codec import from_toml, to_dict
from surefoot.config.fingerprint import refuse_changes
from surefoot.config.layout import in_words
from surefoot.config.layout_search import check_layout
from surefoot.config.run import RunConfig
from surefoot.monitor.console import ConsoleWatcher, print_summary
from surefoot.monitor.facts import RunFacts
from surefoot.monitor.report import write_report
from surefoot.monitor.run import Run
from surefoot.monitor.sentences import sentence
from surefoot.monitor.store import log_path
from surefoot.monitor.summary import summarise
from surefoot.monitor.trackers import Tracker, open_trackers
from surefoot.monitor.wording import several

if TYPE_CHECKING:
    from surefoot.train.run import ForkOf, OpenRun


LOG = logging.getLogger("surefoot")


class Notices:
    """Where sentences go: to standard error until there is a console, then to it."""

    def __init__(self) -> None:
        self.console: ConsoleWatcher | None = None
        self.trackers: Sequence[Tracker] = ()

    def __call__(self, kind: str, row: Mapping[str, Any]) -> None:
        """One ledger row or event."""
        if self.console:
            self.console.event(kind, row)
        elif kind != "attempt":
            print(sentence(kind, row), file=sys.stderr)
        for tracker in self.trackers:
            tracker.event(kind, row)
        LOG.info("%s", sentence(kind, row))

    def say(self, text: str) -> None:
        """A sentence that is no row."""
        self("warning", {"text": text})


def keep_log(run: "OpenRun", folder: Path) -> logging.Handler:
    """Begin this rank's log of the attempt: sentences, and warnings of libraries."""
    path = log_path(folder, run.keeping.ledger.attempt, run.setup.world.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    for logger in (LOG, logging.getLogger("py.warnings")):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    LOG.info("rank %d of %d: %s", run.setup.world.rank, run.setup.world.size, run.opening)
    return handler


def end_log(handler: logging.Handler, text: str) -> None:
    """Close a rank's log with how the attempt ended."""
    LOG.info("%s", text)
    for logger in (LOG, logging.getLogger("py.warnings")):
        logger.removeHandler(handler)
    logging.captureWarnings(False)
    handler.close()


class BuildProgress:
    """A line on standard error while shards are built; overwritten on a terminal, one line per part in a log."""

    def __init__(self) -> None:
        self.last = ""
        self.open = False

    def __call__(self, what: str, share: float) -> None:
        """``what`` is under way, ``share`` of it done."""
        if sys.stderr.isatty():
            bar = "█" * round(20 * share) + "░" * (20 - round(20 * share))
            print(f"\r\x1b[2K{bar} {what}", end="", file=sys.stderr, flush=True)
            self.open = True
        elif what != self.last:
            print(what, file=sys.stderr, flush=True)
        self.last = what

    def end(self) -> None:
        """Clear the line."""
        if self.open:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self.open = False


def say_finished(config: RunConfig, folder: Path, *, as_json: bool) -> bool:
    """Whether the folder holds a finished run; if so, says it and shows its summary. ConfigError when it was run with another config."""
    if not (folder / "ledger.jsonl").exists():
        return False
    run = Run(folder)
    if run.status().state != "finished":
        return False
    before = from_toml(RunConfig, folder / "config.toml")
    refuse_changes(before, decided_as(config, before), str(folder))
    if os.environ.get("RANK", "0") != "0":
        return True
    report = folder / "report.html"
    print(
        f"{folder} is finished: nothing to do. --fresh starts it over, `surefoot fork` goes on from it.",
        file=sys.stderr,
    )
    print_summary(summarise(run), as_json=as_json, report=str(report) if report.exists() else "")
    return True


def decided_as(config: RunConfig, before: RunConfig) -> RunConfig:
    """The config with every ``auto`` of its layout as a run decided it before."""
    names = ("precision", "compile", "device")
    decided = {n: getattr(before.parallel, n) for n in names if getattr(config.parallel, n) == "auto"}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **decided))


def run_to_end(
    config: RunConfig, folder: Path, *, as_json: bool, allow_change: Sequence[str] = (), fork: "ForkOf | None" = None
) -> int:
    """Open the run, train, finish, report; the exit code says how it ended."""
    from surefoot.parallel.mesh import join_world, leave_world
    from surefoot.train.finishing import finish
    from surefoot.train.interrupt import StopRequest
    from surefoot.train.loop import train
    from surefoot.train.run import open_run

    notices, progress = Notices(), BuildProgress()
    check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))  # before ranks wait for each other
    world = join_world(config.parallel, strict=config.determinism == "strict")
    try:
        with (
            open_run(
                config, folder, world, notify=notices, progress=progress, allow_change=allow_change, fork=fork
            ) as run,
            StopRequest() as stop,
        ):
            progress.end()
            handler = keep_log(run, folder)
            console = _console(run) if world.leads else None
            notices.console = console
            if config.parallel.compile == "auto" and run.config.parallel.compile == "off":
                notices.say("parallel.compile=auto: there is no C++ compiler, so blocks are not compiled")
            if world.leads:
                names = run.config.log.trackers
                notices.trackers = open_trackers(names, folder, run.keeping.ledger, to_dict(run.config), notices.say)
            try:
                watchers = (*([console] if console else []), *notices.trackers)
                ending = train(run.state, run.setup, run.data, run.keeping, stop=stop, watchers=watchers)
                if ending.reason == "done" and not finish(run, lambda: stop.asked):
                    ending = dataclasses.replace(ending, reason="stopped")
                if ending.reason == "done":
                    pass
                elif ending.reason == "stopped":
                    name = stop.signal.name if stop.signal else "another rank's signal"
                    run.keeping.record("stop", reason=name)
            finally:
                if console:
                    console.close()
                for tracker in notices.trackers:
                    tracker.close()
                end_log(handler, f"ended at step {run.state.step}, batch {run.state.batch_index}")
    finally:
        progress.end()
        leave_world()
    code = {"done": exit_codes.DONE, "halted": exit_codes.GAVE_UP, "stopped": stop.exit_code}[ending.reason]
    if world.leads:
        report = write_report(folder)
        print_summary(summarise(Run(folder)), as_json=as_json, report=str(report))
        if ending.reason == "halted":
            print(ending.text, file=sys.stderr)
    return code


def _console(run: "OpenRun") -> ConsoleWatcher:
    facts = run_facts(run)
    store = run.keeping.store
    if store:
        facts.write(store, run.state.batch_index, run.state.step)
    console = ConsoleWatcher(facts, print_every=run.config.log.print_every)
    console.start()
    if run.opening != "starting":
        console.say(run.opening)
    if run.snapshot_gib > 0:
        console.say(f"snapshots in memory take {run.snapshot_gib:.2f} GiB")
    return console


def run_facts(run: "OpenRun") -> RunFacts:
    """What the first line says."""
    import torch

    from surefoot.train.budget import OPEN_END, bound_seconds

    config, starts = run.config, run.data.loader.batch_starts
    known = run.setup.num_steps != OPEN_END
    steps = run.setup.num_steps if known else run.keeping.ledger.horizon
    rows = starts.rows_of(0)
    model = config.model
    device = run.setup.world.device.type
    where = several(torch.get_num_threads(), "thread") if device == "cpu" else f"{torch.cuda.get_device_name()}"
    world = run.setup.world
    ranks = f"{world.size} ranks ({in_words(config.parallel, world.layout)}), " if world.size > 1 else ""
    return RunFacts(
        recipe=config.recipe,
        model=f"{several(model.num_layers, 'layer')}, d_model {model.d_model}",
        num_params=sum(run.setup.sizes),
        tokens=run.data.tokens_before(steps),
        steps=steps,
        bound_s=bound_seconds(config),
        batch_tokens=(rows[1] - rows[0]) * config.data.seq_len,
        precision=config.parallel.precision,
        device=f"{ranks}{device}, {where}",
        data_fingerprint=run.data.prepared.fingerprint,
        config_fingerprint=run.fingerprint,
        folder=str(run.keeping.folder),
    )
