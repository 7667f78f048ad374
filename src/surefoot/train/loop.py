"""The loop: a page. Batch, step, verdict, row, deed, and what is due."""

import time
from collections.abc import Sequence
from dataclasses import replace

from surefoot.data.loader import Batch
from surefoot.guard.actions import Investigate
from surefoot.guard.guard import Judge, conclude, judge, judge_evaluation, limits
from surefoot.guard.signals import EvalSignals, ProbeSignals
from surefoot.monitor.step_report import StepReport
from surefoot.optim.schedule import Landing
from surefoot.train.acting import Ending, Judged, act, noted
from surefoot.train.agree import agree
from surefoot.train.evaluate import TrainingData
from surefoot.train.first_batch import prove_first_batch
from surefoot.train.horizon import Clock, Horizon
from surefoot.train.interrupt import StopRequest
from surefoot.train.investigate import Recent, investigate
from surefoot.train.keeping import Keeping
from surefoot.train.manifest import CheckpointError
from surefoot.train.probes import probe_metrics, probe_rows, take_probe
from surefoot.train.replicas import Replicas
from surefoot.train.row_memory import RowMemory
from surefoot.train.rows import Pace, Watcher, describe, due, regime, speed, tell
from surefoot.train.setup import Setup
from surefoot.train.snapshot import SnapshotRing
from surefoot.train.state import TrainState
from surefoot.train.step import StepOutcome, train_step
from surefoot.train.stock import certify, prune


def train(
    state: TrainState,
    setup: Setup,
    data: TrainingData,
    keeping: Keeping,
    *,
    stop: StopRequest,
    watchers: Sequence[Watcher] = (),
    judge: Judge = judge,
    clock: Clock = time.monotonic,
) -> Ending:
    """Consume batches until the run's last step is applied, the run is asked to stop, or the guard halts it.

    ``clock``: seconds, what a bound in hours or money is held against.
    Every ending but a halt leaves a checkpoint of its last state; CheckpointError when that cannot be written.
    """
    config, world = setup.config, setup.world
    snapshots, memory = SnapshotRing(config.guard.snapshots), RowMemory()
    # A fault right after a resume has a state to go back to.
    snapshots.take(state)
    recent, pace, replicas = Recent(), Pace(), Replicas(state.batch_index)
    horizon = Horizon(setup, data.loader.batch_starts, keeping, clock)
    first = True
    while state.step < horizon.steps:
        begun = time.perf_counter()
        batch = data.loader.batch(state.batch_index, keeping.ledger.exclusions, world.data_rank, world.data_size)
        waited = time.perf_counter() - begun
        if first:
            prove_first_batch(batch, data.loader, keeping.ledger.exclusions, world)
            first = False
        outcome = step_within_limits(state, batch, setup, data, keeping, stop, memory, horizon.end)
        probe, probing = look_inside(state, setup, data, outcome)
        spent = keeping.ledger.record_at(batch.batch_index)
        verdict = judge(state.guard, outcome.signals, config.guard, spent, probe, horizon.steps)
        seconds = time.perf_counter() - begun - probing
        judged = settle(Judged(batch, outcome, state.guard, verdict), recent, state, setup, data, keeping)
        ending = state.step >= horizon.steps or outcome.stop_asked
        judged = replicas.look(judged, state, setup, keeping, last=ending)
        state.guard = judged.verdict.state
        state.optimizer.zero_grad()
        measured = speed(setup, batch, seconds, waited) | horizon.spent() | (inside := probe_metrics(probe))
        report = describe(state, setup, data, judged, measured, replicas.digest)
        tell(report, state, setup, keeping, watchers)
        judge_held_out(report, state, setup, keeping)
        pace.watch(report, batch.samples_B3.shape[0] * config.data.seq_len, state, keeping)
        done = act(judged, state, setup, data.loader, keeping, snapshots)
        if isinstance(done, Ending):
            return done
        if done == "back":
            recent.forget()
            replicas.went_back(state)
            continue
        recent.note(outcome, inside)
        horizon.watch(state)
        last = state.step >= horizon.steps or outcome.stop_asked
        keep_up(state, setup, keeping, snapshots, last=last, skipped=outcome.skipped, digest=replicas.digest)
        if outcome.stop_asked:
            break
    save_last(state, keeping)
    return Ending("done") if state.step >= horizon.steps else Ending("stopped")


def save_last(state: TrainState, keeping: Keeping) -> None:
    """The checkpoint that an ending leaves. Raises CheckpointError when it cannot be written."""
    if not keeping.save(state, asynchronous=False):
        raise CheckpointError(
            f"{keeping.folder}: the state at step {state.step} could not be written, see above; the same command continues from the "
            "checkpoint before it once there is room"
        )
    prune(keeping)


def step_within_limits(
    state: TrainState,
    batch: Batch,
    setup: Setup,
    data: TrainingData,
    keeping: Keeping,
    stop: StopRequest,
    memory: RowMemory,
    end: Landing,
) -> StepOutcome:
    """One step under the guard's limits and the ledger's LR events, its rows compared with those read lately."""
    number = regime(setup.config.data, data.loader.batch_starts, batch.batch_index)
    return train_step(
        state,
        replace(batch, duplicated=memory.duplicated(batch, data.loader, keeping.ledger.exclusions, setup.world)),
        setup,
        limits=limits(state.guard, setup.config.guard, number),
        lr_changes=keeping.ledger.lr_events,
        regime=number,
        stop_asked=stop.asked,
        end=end,
    )


def look_inside(
    state: TrainState, setup: Setup, data: TrainingData, outcome: StepOutcome
) -> tuple[ProbeSignals | None, float]:
    """The probe that is due on the cadence, while the gradients are there, and the seconds it took."""
    begun = time.perf_counter()
    every = setup.config.guard.probe_every
    # The first update is looked at too: what grows needs something to be compared with.
    if outcome.skipped or not (due(state.step, every) or (every and state.step == 1)):
        return None, 0.0
    return take_probe(state, setup, probe_rows(data, setup), outcome.signals.lr), time.perf_counter() - begun


def settle(
    judged: Judged, recent: Recent, state: TrainState, setup: Setup, data: TrainingData, keeping: Keeping
) -> Judged:
    """The last word on a batch: after an investigation where the guard asks for one, and the same on every rank. Collective."""
    first = judged.first
    agree(first, setup.world)
    if not isinstance(first.action, Investigate):
        return judged
    evidence = investigate(judged, first.action.passes, recent, state, setup, data, keeping)
    spent = keeping.ledger.record_at(judged.batch.batch_index)
    concluded = conclude(first.state, evidence, setup.config.guard, spent)
    agree(concluded, setup.world)
    return replace(judged, concluded=concluded, evidence=evidence)


def judge_held_out(report: StepReport, state: TrainState, setup: Setup, keeping: Keeping) -> None:
    """What the guard makes of the evaluation in a row, if there is one: said, never acted on."""
    losses = tuple(
        (source.name, report.metrics[name])
        for source in setup.config.data.sources
        if (name := f"eval/{source.name}/loss") in report.metrics
    )
    if not losses:
        return
    verdict = judge_evaluation(state.guard, EvalSignals(step=report.step, losses=losses), setup.config.guard)
    state.guard = verdict.state
    if verdict.findings:
        findings = [finding.to_dict() for finding in verdict.findings]
        place = {"batch_index": report.batch_index, "step": report.step}
        keeping.record("verdict", action="proceed", text=noted(verdict.findings), **place, findings=findings)


def keep_up(
    state: TrainState,
    setup: Setup,
    keeping: Keeping,
    snapshots: SnapshotRing,
    *,
    last: bool,
    skipped: bool,
    digest: str,
) -> None:
    """Snapshots and checkpoints that are due after a batch; after the last one the loop's end saves."""
    config = setup.config
    if due(state.batch_index, config.guard.snapshot_every):
        snapshots.take(state)
    if keeping.save_ended():
        keeping.wait()
        prune(keeping)
    certify(keeping, state)
    if due(state.step, config.checkpoint.every) and not skipped and not last:
        keeping.save(state, asynchronous=config.checkpoint.asynchronous, digest=digest)
        prune(keeping)
