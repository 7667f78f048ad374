"""A small run on one rank, watched from outside: everything that layout must not change is written down."""

import dataclasses
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.config.guard import GuardConfig
from surefoot.config.run import RunConfig
from surefoot.guard.guard import GuardState, Verdict, judge
from surefoot.guard.record import Record
from surefoot.guard.signals import ProbeSignals, StepSignals
from surefoot.model.loss import LossSums
from surefoot.monitor.step_report import StepReport
from surefoot.optim.optimizer import Update
from surefoot.parallel.digest import ReplicasDiffer
from surefoot.parallel.forward_backward import ForwardBackward, MicroBatch
from surefoot.parallel.mesh import join_world
from surefoot.proof.parity_trace import BatchTrace, RankTrace, pieces_of, print_of
from surefoot.train.agree import VerdictsDiffer
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.run import OpenRun, open_run

CLOCKED = "perf/"
"""Metrics of the clock and of memory, which no two runs share."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One process's part of a run."""

    config: RunConfig
    folder: Path
    stop_after: int = -1
    """Batch after which the run is asked to stop, as by SIGTERM; -1 is never."""


def run_course(rank: int, world_size: int, course: Course) -> RankTrace:
    """Begin or continue the run in the folder and tell what it did, in the form that the fork launcher calls."""
    world = join_world(course.config.parallel)
    warnings: list[str] = []

    def notify(kind: str, row: Mapping[str, Any]) -> None:
        if kind == "warning":
            warnings.append(str(row["text"]))

    stop = StopRequest()
    with open_run(course.config, course.folder, world, notify=notify, peak=0.0, allow_change=("parallel",)) as run:
        trace = RankTrace(data_rank=world.data_rank, opening=run.opening)
        recorder = _Recorder(run, trace, stop, course.stop_after)
        setup = dataclasses.replace(run.setup, forward_backward=recorder.passes)
        try:
            train(run.state, setup, run.data, run.keeping, stop=stop, watchers=(recorder,), judge=recorder.judge)
        except (
            ReplicasDiffer,
            VerdictsDiffer,
        ) as error:  # on all ranks at once: what made them differ is in their traces
            trace.broken = f"{type(error).__name__}: {error}"
            recorder.note_batch({}, "")
        trace.states[run.state.step] = pieces_of(run.state.tensors())
        trace.memory = numbers(run.state.guard.to_dict(), "guard")
    trace.warnings = tuple(warnings)
    return trace


class _Passes:
    """The run's own passes, whose rows and token losses are kept until the update."""

    def __init__(self, inner: ForwardBackward) -> None:
        self.inner = inner
        self.micro_batches: Sequence[MicroBatch] = ()
        self.sums: Sequence[LossSums] = ()

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: float) -> list[LossSums]:
        self.micro_batches = micro_batches
        self.sums = sums = self.inner(micro_batches, num_targets)
        return sums

    def forward_only(self, micro_batches: Sequence[MicroBatch]) -> list[LossSums]:
        return self.inner.forward_only(micro_batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Recorder:
    """Stands between the run and its optimiser, its guard and its watchers; steers nothing but the stop it is told to ask for."""

    def __init__(self, run: OpenRun, trace: RankTrace, stop: StopRequest, stop_after: int) -> None:
        self.run, self.trace, self.stop, self.stop_after = run, trace, stop, stop_after
        self.passes = _Passes(run.setup.forward_backward)
        self.rows: tuple[str, ...] = ()
        self.token_losses_BT = torch.zeros(0, 0)
        self.signals: dict[str, float] = {}
        self.words: dict[str, str] = {}
        self.update = run.state.optimizer.apply
        run.state.optimizer.apply = self.apply  # type: ignore[method-assign]
        trace.states[run.state.step] = pieces_of(run.state.tensors())
        self.ask(run.state.batch_index - 1)

    def ask(self, consumed: int) -> None:
        """Ask for the stop, one batch early: it rides in the reduction of the next step."""
        if consumed == self.stop_after - 1:
            self.stop.signal = signal.SIGTERM

    def apply(self, update: Update) -> None:
        """What the optimiser is about to be given: gradients, and the rows that they came from."""
        self.rows = tuple(row for micro in self.passes.micro_batches for row in _row_prints(micro))
        self.token_losses_BT = torch.cat([sums.token_losses_BT.detach().cpu() for sums in self.passes.sums])
        if not self.trace.gradient:
            self.trace.gradient = pieces_of({name: p.grad for name, p in self.run.state.parameters.items()})
        self.update(update)

    def judge(
        self,
        state: GuardState,
        signals: StepSignals,
        config: GuardConfig,
        record: Record,
        probe: ProbeSignals | None = None,
        total_steps: int = 0,
    ) -> Verdict:
        """The guard's own verdict; its signals are noted."""
        verdict = judge(state, signals, config, record, probe, total_steps)
        told = {"signals": signals, "probe": probe}
        fields = {name: dataclasses.asdict(value) for name, value in told.items() if value is not None}
        self.signals = numbers(fields, "")
        self.words = words(fields, "") | {
            "verdict": type(verdict.action).__name__,
            "findings": ", ".join(finding.kind for finding in verdict.findings),
        }
        return verdict

    def step(self, report: StepReport) -> None:
        """One batch is through."""
        metrics = {name: value for name, value in report.metrics.items() if not name.startswith(CLOCKED)}
        self.words |= {"excluded": ", ".join(report.excluded), "cause": report.cause, "samples": report.sample_digest}
        self.note_batch(metrics, report.state_digest)
        if report.step == 1:
            self.trace.states[1] = pieces_of(self.run.state.tensors())
        self.ask(report.batch_index)

    def note_batch(self, metrics: dict[str, float], state_digest: str) -> None:
        """What is known of the batch that was judged last."""
        self.trace.batches.append(
            BatchTrace(
                batch_index=self.run.state.batch_index - 1,
                step=self.run.state.step,
                state_digest=state_digest,
                figures=metrics | self.signals,
                words=self.words,
                rows=self.rows,
                token_losses_BT=self.token_losses_BT,
            )
        )


def _row_prints(micro: MicroBatch) -> list[str]:
    columns: list[Tensor] = [micro.tokens_BT, micro.targets_BT, micro.positions_BT]
    if micro.documents_BT is not None:
        columns.append(micro.documents_BT)
    return [print_of(column[row].cpu() for column in columns) for row in range(len(micro.tokens_BT))]


def numbers(value: Any, key: str) -> dict[str, float]:
    """Every number inside tables and lists, by its path; a member of a list goes by its own name, where it has one."""
    if isinstance(value, bool | int | float):
        return {key: float(value)}
    if value is None:
        return {key: math.nan}
    return {at: number for name, item in _items(value, key) for at, number in numbers(item, name).items()}


def words(value: Any, key: str) -> dict[str, str]:
    """Every text likewise."""
    if isinstance(value, str):
        return {key: value}
    return {at: text for name, item in _items(value, key) for at, text in words(item, name).items()}


def _items(value: Any, key: str) -> list[tuple[str, Any]]:
    """The parts of a value with their paths."""
    if isinstance(value, dict):
        named = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list | tuple):
        named = [_named(item, at) for at, item in enumerate(value)]
    else:
        return []
    return [(f"{key}/{name}" if key else name, item) for name, item in named]


def _named(item: Any, at: int) -> tuple[str, Any]:
    """A member of a list by its own name, role or layer, or by its place."""
    if isinstance(item, dict):
        own = item.get("name", item.get("role", item.get("layer")))
        return str(at if own is None else own), item
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item
    return str(at), item
