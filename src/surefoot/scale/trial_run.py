"""One trial from its start, or from where it was left, to its ``trial.json``: what a forked child does."""

import dataclasses
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.config.fingerprint import changed_computation
from surefoot.config.run import RunConfig
from surefoot.monitor.rows import number
from surefoot.monitor.run import Run
from surefoot.monitor.sentences import sentence
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import move_aside
from surefoot.parallel.digest import combine, digest_tensors
from surefoot.parallel.mesh import join_world
from surefoot.train.acting import Ending
from surefoot.train.evaluate import evaluate
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.run import OpenRun, open_run, stored_config

HOPELESS = 3
"""Applied updates in a row whose loss is not finite, after which a trial is cut short: no weight of it is a number any more."""
TAIL = 0.1
"""Share of the run's steps, the last ones, that ``train_loss`` is a mean over."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a trial's run came to, before it is judged."""

    halted: str
    """Why the guard, or hopelessness, ended it; empty where it ran to its end."""
    domains: dict[str, float]
    """Held-out loss by domain."""
    initial_loss: float
    train_loss: float
    steps: int
    seconds: float
    num_params: int
    data_fingerprint: str


def measure(config: RunConfig, folder: Path) -> Measured | None:
    """Run or continue a trial's run in ``folder`` and evaluate it; None when it was asked to stop and saved instead."""
    if not _goes_on(config, folder):
        move_aside(folder)
    world = join_world(config.parallel, strict=config.determinism == "strict")
    with open_run(config, folder, world, notify=_write_down, peak=0.0) as run, StopRequest() as stop:
        print(f"{folder.name}: {run.opening}")
        hopeless = _Hopeless(stop)
        ending = train(run.state, run.setup, run.data, run.keeping, stop=stop, watchers=(hopeless,))
        if ending.reason == "stopped" and not hopeless.text:
            run.keeping.record("stop", reason=stop.signal.name if stop.signal else "a signal")
            return None
        domains = {rows.name: evaluate(run.setup, rows, config.eval.final_rows).loss for rows in run.data.held_out}
        _close(run, ending, hopeless.text, domains)
        num_params = sum(p.numel() for p in run.state.parameters.values())
        print_of_data = run.data.prepared.fingerprint
    told = hopeless.text or (ending.text or "the guard halted it" if ending.reason == "halted" else "")
    return Measured(told, domains, *_losses(folder), num_params, print_of_data)


def _goes_on(config: RunConfig, folder: Path) -> bool:
    """Whether what the folder holds, if anything, can be continued: a run of this config that has its checkpoints."""
    before = stored_config(folder)
    if before is None:
        return True
    written = Run(folder).ledger.surviving_checkpoints()
    return not changed_computation(before, config) and (not written or any((folder / "checkpoints").glob("step-*")))


def _close(run: OpenRun, ending: Ending, hopeless: str, domains: Mapping[str, float]) -> None:
    """The run's last ledger row. What ``train/finishing`` adds, compressors and continuations, is the same for, or no use to, a trial."""
    state, keeping = run.state, run.keeping
    if hopeless:
        keeping.record("stop", reason=hopeless)
    elif ending.reason == "done":
        digest = combine(digest_tensors(state.tensors()))
        loss = {name: value for name, value in domains.items() if math.isfinite(value)}
        keeping.record("finish", step=state.step, batch_index=state.batch_index, digest=digest, loss=loss)
    if keeping.store:
        keeping.store.flush(sync=True)
        done = ending.reason == "done"
        keeping.store.heartbeat(state.step, state.batch_index, "finished" if done else "stopped", force=True)


def _losses(folder: Path) -> tuple[float, float, int, float]:
    """Initial loss, mean of the last steps, updates applied, seconds in steps: from the rows of the surviving run."""
    rows = Run(folder).rows
    losses = [number(row["train/loss"]) for row in rows if "train/loss" in row]
    kept = [number(row["train/loss"]) for row in rows if "train/loss" in row and not row.get("skipped", False)]
    tail = kept[-max(1, round(TAIL * len(kept))) :]
    seconds = sum(number(row.get("perf/step_s", 0.0)) for row in rows)
    return losses[0] if losses else math.nan, sum(tail) / len(tail) if tail else math.nan, len(kept), seconds


def _write_down(kind: str, row: Mapping[str, Any]) -> None:
    if kind not in ("attempt", "eval"):
        print(sentence(kind, row))


class _Hopeless:
    """Asks a run to stop whose weights are no numbers any more. Updates that were refused are the guard's to count."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop, self.lost, self.text = stop, 0, ""

    def step(self, report: StepReport) -> None:
        """After each batch."""
        if report.skipped:
            return
        self.lost = 0 if math.isfinite(report.metrics.get("train/loss", 0.0)) else self.lost + 1
        if self.lost == HOPELESS:
            self.text = f"training loss not finite from step {report.step - HOPELESS + 1} on"
            self.stop.signal = self.stop.signal or signal.SIGTERM
