"""What a consumed batch is told as: its numbers, its row, its place in the schedule of data."""

import math
import resource
import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import torch

from surefoot.config.data import DataConfig
from surefoot.data.loader import Batch
from surefoot.data.mixture import BLOCK, BatchStarts
from surefoot.guard.detectors import Scores
from surefoot.guard.pace import PaceState, observe_pace
from surefoot.guard.signals import PaceSignals
from surefoot.monitor.step_report import StepReport
from surefoot.train.acting import Judged
from surefoot.train.cutting import seq_len_at
from surefoot.train.evaluate import TrainingData, cadence_metrics
from surefoot.train.first_batch import doubt_initial_loss
from surefoot.train.keeping import Keeping
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState


class Watcher(Protocol):
    """Sees what happened; returns nothing and changes nothing."""

    def step(self, report: StepReport) -> None:
        """One batch was consumed."""


def describe(
    state: TrainState,
    setup: Setup,
    data: TrainingData,
    judged: Judged,
    measured: dict[str, float],
    digest: str = "",
) -> StepReport:
    """The record of one consumed batch, with the evaluation and the state's ``digest`` where they are due; ``measured`` are further metrics."""
    config, batch, outcome = setup.config, judged.batch, judged.outcome
    metrics = outcome.metrics | scored(judged.first.scores) | measured
    if due(state.step, config.eval.every) and not outcome.skipped:
        metrics |= cadence_metrics(setup, data)
    told = due(state.step, config.log.digest_every) and not outcome.skipped
    return StepReport(
        batch_index=batch.batch_index,
        step=state.step,
        tokens=data.tokens_before(state.batch_index),
        skipped=outcome.skipped,
        cause=judged.cause,
        metrics=metrics,
        sample_digest=batch.digest,
        excluded=batch.excluded,
        state_digest=digest if told else "",
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


class Pace:
    """Rank 0's clock: a run that became slow, or waits for its data, is told so. Neither saved nor agreed on, and nothing follows from it."""

    def __init__(self) -> None:
        self.lately = PaceState()

    def watch(self, report: StepReport, tokens: int, state: TrainState, keeping: Keeping) -> None:
        """One batch of ``tokens`` tokens, from the ``perf/*`` figures of its row."""
        if not keeping.store:
            return
        seconds, waited = report.metrics["perf/step_s"], report.metrics["perf/data_wait_s"]
        clock = PaceSignals(batch_index=report.batch_index, seconds=seconds, data_wait=waited, tokens=tokens)
        paced = observe_pace(self.lately, clock)
        self.lately = paced.state
        for finding in paced.findings:
            keeping.warn(state, f"At batch {finding.batch_index}: {finding.text}.", "note")


def scored(scores: Scores) -> dict[str, float]:
    """The ``guard/*`` metrics of a verdict, where there are any."""
    figures = {
        "guard/loss_zscore": scores.loss,
        "guard/document_zscore": scores.document_loss,
        "guard/gradient_zscore": scores.gradient_norm,
        "guard/update_zscore": scores.update_size,
    }
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def due(count: int, every: int) -> bool:
    """Whether a cadence of ``every`` falls on ``count``; 0 is never."""
    return every > 0 and count > 0 and count % every == 0


def regime(data: DataConfig, starts: BatchStarts, batch_index: int) -> int:
    """How many configured stages of mixture, batch size and row length have begun with this batch: the guard expects a new level at each.

    A mixture stage begins with the first block of its rows, wherever in a batch that falls.
    """
    by_size = bisect_right([stage.start_batch for stage in data.batch_stages], batch_index)
    by_length = bisect_right([stage.start_batch for stage in data.length_stages], batch_index)
    stop = starts.rows_of(batch_index)[1]
    by_mixture = sum(-(-stage.start_row // BLOCK) * BLOCK < stop for stage in data.mixture_stages)
    return by_size + by_length + by_mixture


def speed(setup: Setup, batch: Batch, seconds: float, waited: float) -> dict[str, float]:
    """The ``perf/*`` metrics of a step; of rank 0's clock."""
    data = setup.config.data
    per_second = len(batch.samples_B3) * data.seq_len / seconds
    figures = {
        "perf/step_s": seconds,
        "perf/tokens_per_s": per_second,
        "perf/data_wait_s": waited,
        "perf/memory_gib": memory_gib(setup.world.device),
    }
    if setup.peak_flops > 0:
        figures["perf/mfu"] = (
            per_second * setup.flops_at[seq_len_at(data, batch.batch_index)] / (setup.peak_flops * setup.world.size)
        )
    return figures


def memory_gib(device: torch.device) -> float:
    """Most memory held so far, GiB: of the GPU by torch, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1024**3
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1024**3
