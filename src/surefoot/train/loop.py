"""The loop: a page. Batch, step, verdict, rows, and what is due."""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from surefoot.data.loader import Batch
from surefoot.guard.actions import ClipHarder, Halt, Investigate, LrEvent, Proceed, Rollback, SkipUpdate
from surefoot.guard.guard import Judge, Verdict, judge
from surefoot.guard.record import Record
from surefoot.monitor.step_report import StepReport
from surefoot.parallel.digest import combine, digest_tensors
from surefoot.train.evaluate import TrainingData, cadence_metrics
from surefoot.train.first_batch import doubt_initial_loss, prove_first_batch
from surefoot.train.interrupt import StopRequest
from surefoot.train.keeping import Keeping
from surefoot.train.manifest import CheckpointError
from surefoot.train.rollback import NoTarget, roll_back
from surefoot.train.setup import Setup
from surefoot.train.snapshot import SnapshotRing
from surefoot.train.state import TrainState
from surefoot.train.step import StepOutcome, train_step
from surefoot.train.stock import certify, prune


class Watcher(Protocol):
    """Sees what happened; returns nothing and changes nothing."""

    def step(self, report: StepReport) -> None:
        """One batch was consumed."""


@dataclass(frozen=True)
class Ending:
    """Why the loop ended."""

    reason: Literal["done", "stopped", "halted"]
    text: str = ""


def train(
    state: TrainState,
    setup: Setup,
    data: TrainingData,
    keeping: Keeping,
    *,
    stop: StopRequest,
    watchers: Sequence[Watcher] = (),
    judge: Judge = judge,
) -> Ending:
    """Consume batches until ``steps`` updates are applied, the run is asked to stop, or the guard halts it.

    Every ending but a halt leaves a checkpoint of its last state; CheckpointError when that cannot be written.
    """
    config, world = setup.config, setup.world
    snapshots = SnapshotRing(config.guard.snapshots)
    first = True
    while state.step < config.steps:
        begun = time.perf_counter()
        batch = data.loader.batch(state.batch_index, keeping.ledger.exclusions, world.rank, world.size)
        waited = time.perf_counter() - begun
        if first:
            prove_first_batch(batch, data.loader, keeping.ledger.exclusions, world)
            first = False
        outcome = train_step(state, batch, setup, stop_asked=stop.asked)
        verdict = judge(state.guard, outcome.signals, config.guard, Record())
        state.guard = verdict.state
        state.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - begun
        report = describe(state, setup, data, batch, outcome, verdict, seconds, waited)
        tell(report, state, setup, keeping, watchers)
        match verdict.action:
            case Proceed() | ClipHarder() | Investigate() | LrEvent():
                pass
            case SkipUpdate(cause=cause):
                keeping.record("skip", batch_index=batch.batch_index, step=state.step, cause=cause)
            case Rollback() as action:
                try:
                    roll_back(action, state, setup, data.loader, keeping, snapshots)
                except NoTarget as nowhere:
                    return halt(keeping, batch, f"{action.cause}; {nowhere}")
                continue
            case Halt(reason=reason):
                return halt(keeping, batch, reason)
        keep_up(state, setup, keeping, snapshots, outcome)
        if outcome.stop_asked:
            break
    if not keeping.save(state, asynchronous=False):
        raise CheckpointError(
            f"{keeping.folder}: the state at step {state.step} could not be written, see above; the same command continues from the "
            "checkpoint before it once there is room"
        )
    prune(keeping)
    return Ending("done") if state.step >= config.steps else Ending("stopped")


def halt(keeping: Keeping, batch: Batch, reason: str) -> Ending:
    """End the run with a diagnosis in the ledger."""
    keeping.wait()
    keeping.record("verdict", action="halt", text=reason, batch_index=batch.batch_index)
    keeping.record("stop", reason=reason)
    return Ending("halted", reason)


def describe(
    state: TrainState,
    setup: Setup,
    data: TrainingData,
    batch: Batch,
    outcome: StepOutcome,
    verdict: Verdict,
    seconds: float,
    waited: float,
) -> StepReport:
    """The record of one consumed batch, with the evaluation and the state digest where they are due."""
    config = setup.config
    metrics = outcome.metrics | speed(setup, batch.samples_B3.shape[0], seconds, waited)
    if due(state.step, config.eval.every) and not outcome.skipped:
        metrics |= cadence_metrics(state.model, setup, data)
    digest = ""
    if due(state.step, config.log.digest_every) and not outcome.skipped:
        digest = combine(digest_tensors(state.tensors()))
    return StepReport(
        batch_index=batch.batch_index,
        step=state.step,
        tokens=data.tokens_before(state.batch_index),
        skipped=outcome.skipped,
        cause=verdict.action.cause if isinstance(verdict.action, SkipUpdate) else "",
        metrics=metrics,
        sample_digest=batch.digest,
        excluded=batch.excluded,
        state_digest=digest,
    )


def tell(report: StepReport, state: TrainState, setup: Setup, keeping: Keeping, watchers: Sequence[Watcher]) -> None:
    """Write the row, then show it."""
    if keeping.store:
        keeping.store.write_step(report)
        keeping.store.heartbeat(report.step, report.batch_index)
        evaluated = {name: value for name, value in report.metrics.items() if name.startswith("eval/")}
        if evaluated:
            keeping.notify("eval", {"step": report.step, **evaluated})
    for watcher in watchers:
        watcher.step(report)
    if report.batch_index == 0 and (doubt := doubt_initial_loss(report.metrics, setup.config.model)):
        keeping.warn(state, doubt)


def keep_up(state: TrainState, setup: Setup, keeping: Keeping, snapshots: SnapshotRing, outcome: StepOutcome) -> None:
    """Snapshots and checkpoints that are due after a batch."""
    config = setup.config
    if due(state.batch_index, config.guard.snapshot_every):
        snapshots.take(state)
    if keeping.save_ended():
        keeping.wait()
        prune(keeping)
    certify(keeping, state)
    last = state.step >= config.steps or outcome.stop_asked
    if due(state.step, config.checkpoint.every) and not outcome.skipped and not last:
        keeping.save(state, asynchronous=config.checkpoint.asynchronous)
        prune(keeping)


def due(count: int, every: int) -> bool:
    """Whether a cadence of ``every`` falls on ``count``; 0 is never."""
    return every > 0 and count > 0 and count % every == 0


def speed(setup: Setup, rows: int, seconds: float, waited: float) -> dict[str, float]:
    """The ``perf/*`` metrics of a step; of rank 0's clock."""
    per_second = rows * setup.config.data.seq_len / seconds
    figures = {
        "perf/step_s": seconds,
        "perf/tokens_per_s": per_second,
        "perf/data_wait_s": waited,
        "perf/memory_gib": memory_gib(setup.world.device),
    }
    if setup.peak_flops > 0:
        figures["perf/mfu"] = per_second * setup.flops_per_token / (setup.peak_flops * setup.world.size)
    return figures


def memory_gib(device: torch.device) -> float:
    """Most memory held so far, GiB: of the GPU by torch, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1024**3
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1024**3
