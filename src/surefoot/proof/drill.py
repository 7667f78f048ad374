"""One run of the drill: a small real pretraining run with one fault in it, or none, and what became of it."""

import dataclasses
import math
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from surefoot.config.data import BytesTokenizer, DataConfig, PythonInstallation, SourceConfig
from surefoot.config.fingerprint import fingerprint
from surefoot.config.guard import GuardConfig
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import WSD, OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import CheckpointConfig, EvalConfig, LogConfig, RunConfig
from surefoot.monitor.step_report import StepReport
from surefoot.parallel.mesh import join_world
from surefoot.proof.data_faults import skip_healthy
from surefoot.proof.fault_catalogue import FAULTS
from surefoot.proof.faults import Bench, Dose
from surefoot.proof.step_faults import forget_step_count
from surefoot.proof.witness import Witness
from surefoot.train.evaluate import evaluate
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.opening import commit_of
from surefoot.train.run import OpenRun, open_run

Base = Literal["A", "B"]
"""A is the model that thresholds are calibrated on, B the one that the score is taken on."""
EVAL_ROWS = 256
"""Held-out rows per domain at the end, always the same."""
AFTERMATH = 50
"""Batches after a fault's end in which what the guard says is about it; what comes later is neither a detection nor a false alarm."""
HOPELESS = 3
"""Losses in a row that are not finite, after which an unguarded run is cut short: no weight of it is a number any more."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One cell of the drill."""

    name: str
    """Its result's file name, without the ending."""
    fault: str = ""
    """Of the catalogue; empty is none."""
    share: float = 1.0
    """Of a batch's tokens, for faults of the data."""
    seed: int = 0
    guarded: bool = False
    skips: tuple[int, ...] = ()
    """Healthy batches that a control run consumes without an update."""
    base: Base = "B"


def base_config(base: Base, seed: int, cache: Path, *, guarded: bool = True) -> RunConfig:
    """A run of seconds on the Python installation's own text, bytes as tokens."""
    width, layers, rows, steps = {"A": (32, 2, 16, 220), "B": (40, 3, 12, 230)}[base]
    return RunConfig(
        recipe=f"drill-{base}",
        steps=steps,
        seed=seed,
        model=ModelConfig(
            vocab_size=257,
            d_model=width,
            num_layers=layers,
            attention=GroupedQueryAttention(num_heads=2, num_kv_heads=2, d_head=16, qk_norm=True),
            feed_forward=SwiGLU(d_ff=5 * width // 2),
        ),
        data=DataConfig(
            sources=(
                SourceConfig(name="code", documents=PythonInstallation(part="code")),
                SourceConfig(name="prose", documents=PythonInstallation(part="prose")),
            ),
            tokenizer=BytesTokenizer(),
            seq_len=64,
            batch_size=rows,
            cache_dir=str(cache),
        ),
        optim=OptimConfig(lr=5e-3, warmup_steps=40, schedule=WSD(decay_fraction=0.5)),
        parallel=ParallelConfig(device="cpu", precision="fp32", threads=1),
        guard=GuardConfig(
            policy="guarded" if guarded else "observe",
            probe_every=10,
            snapshots=4,
            snapshot_every=20,
            certify_after=25,
        ),
        checkpoint=CheckpointConfig(every=100, asynchronous=False),
        eval=EvalConfig(every=0, rows=EVAL_ROWS, batch_size=64),
        log=LogConfig(sample_tokens=0),
    )


def cell_config(task: Task, cache: Path) -> tuple[RunConfig, Dose]:
    """The config of a cell, and its fault's dose."""
    config = base_config(task.base, task.seed, cache, guarded=task.guarded)
    if not task.fault:
        return config, Dose(onset=config.steps + 1, length=0, magnitude=0.0)
    fault = FAULTS[task.fault]
    dose = fault.dose(task.seed, config.steps, task.share)
    return fault.configure(config, dose), dose


def run_cell(task: Task, cache: Path, command: str) -> dict[str, Any]:
    """Run a cell to its end in a folder of its own, which is then gone, and say what became of it, as plain JSON values."""
    config, dose = cell_config(task, cache)
    witness = Witness(dose.onset)
    with tempfile.TemporaryDirectory(prefix="surefoot-drill-") as folder:
        begun = time.monotonic()
        losses, ending = _run_to_its_end(task, config, dose, Path(folder) / "run", witness)
        seconds = time.monotonic() - begun
    rows = witness.surviving()
    mean = sum(losses.values()) / len(losses)
    return {
        **dataclasses.asdict(task),
        "command": command,
        "commit": commit_of(),
        "torch": torch.__version__,
        "fingerprint": fingerprint(config),
        "steps": config.steps,
        "dose": dataclasses.asdict(dose),
        "seconds": round(seconds, 2),
        "ending": ending,
        "finite": math.isfinite(mean),
        "loss": round(mean, 5) if math.isfinite(mean) else None,
        "domains": {name: round(loss, 5) if math.isfinite(loss) else None for name, loss in losses.items()},
        "consumed": len(witness.reports),
        "wasted": max(0, len(witness.reports) - config.steps) if ending == "done" else 0,
        "refused": [batch for batch, row in rows.items() if row.skipped and not row.idle],
        **seen(witness, dose, task),
        "events": [event.to_dict() for event in witness.events],
        "curve": " ".join(f"{row.loss:.3f}" for row in rows.values()),
    }


def seen(witness: Witness, dose: Dose, task: Task) -> dict[str, Any]:
    """What the guard said and when, against what it should have."""
    slows = bool(task.fault) and FAULTS[task.fault].slows
    until = dose.window.stop + AFTERMATH
    after = [e for e in witness.events if e.after_onset and (e.serious or slows) and e.batch_index < until]
    before = [event for event in witness.events if not event.after_onset and event.serious]
    first = after[0] if after and task.fault else None
    return {
        "detected": first is not None,
        "delay": max(0, first.batch_index - dose.onset) if first else None,
        "first_kind": first.what if first else "",
        "causes": [event.cause for event in after if event.cause],
        "actions": _in_order([event.action for event in after if event.action != "proceed"]),
        "false_alarms": len(before) if task.fault else sum(event.serious for event in witness.events),
    }


def _in_order(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _run_to_its_end(
    task: Task, config: RunConfig, dose: Dose, folder: Path, witness: Witness
) -> tuple[Mapping[str, float], str]:
    """Held-out loss by domain at the end, and how it ended."""
    if task.fault and FAULTS[task.fault].at_resume:
        with _opened(config, folder, witness) as run:
            stop = StopRequest()
            train(run.state, run.setup, run.data, run.keeping, stop=stop, watchers=(witness, _StopBefore(dose, stop)))
    with _opened(config, folder, witness) as run:
        bench = armed(task, Bench(run.setup, run.state, run.data), dose)
        stop = StopRequest()
        watchers = (witness,) if task.guarded else (witness, _StopWhenHopeless(stop))
        ending = train(run.state, bench.setup, bench.data, run.keeping, stop=stop, watchers=watchers)
        losses = {rows.name: evaluate(run.setup, rows, config.eval.rows).loss for rows in run.data.held_out}
    return losses, ending.reason


def armed(task: Task, bench: Bench, dose: Dose) -> Bench:
    """The bench with the cell's fault on it."""
    if task.skips:
        return skip_healthy(bench, task.skips)
    if not task.fault:
        return bench
    fault = FAULTS[task.fault]
    if fault.at_resume:
        forget_step_count(bench)
    return fault.arm(bench, dose)


def _opened(config: RunConfig, folder: Path, witness: Witness) -> AbstractContextManager[OpenRun]:
    return open_run(config, folder, join_world(config.parallel), notify=witness.notify, peak=0.0)


class _StopBefore:
    """Asks the run to stop once the batch before the onset is through."""

    def __init__(self, dose: Dose, stop: StopRequest) -> None:
        self.dose, self.stop = dose, stop

    def step(self, report: StepReport) -> None:
        """After each batch; the stop rides in the reduction of the next, so it is asked one batch early."""
        if report.batch_index == self.dose.onset - 2:
            self.stop.signal = signal.SIGTERM


class _StopWhenHopeless:
    """Asks a run to stop whose weights are no numbers any more."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop, self.lost = stop, 0

    def step(self, report: StepReport) -> None:
        """After each batch."""
        self.lost = 0 if math.isfinite(report.metrics.get("train/loss", 0.0)) else self.lost + 1
        if self.lost >= HOPELESS:
            self.stop.signal = signal.SIGTERM
