"""A run of seconds that does everything a run can do: skips, rolls back, excludes, checkpoints. For proofs and tests."""

import math
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from surefoot.config.data import BytesTokenizer, DataConfig, SourceConfig, TextFiles
from surefoot.config.guard import GuardConfig
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import Cosine, OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import CheckpointConfig, EvalConfig, LogConfig, RunConfig
from surefoot.guard.actions import Rollback
from surefoot.guard.guard import GuardState, Judge, Verdict, judge
from surefoot.guard.record import Record
from surefoot.guard.signals import ProbeSignals, StepSignals
from surefoot.monitor.step_report import StepReport
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.mesh import join_world
from surefoot.proof.data_faults import skip_healthy
from surefoot.proof.faults import Bench, Dose, with_nan_activations, with_nan_gradients
from surefoot.proof.step_faults import flip_bit, strike_weight
from surefoot.train.finishing import finish
from surefoot.train.interrupt import StopRequest
from surefoot.train.keeping import Keeping
from surefoot.train.loop import train
from surefoot.train.run import open_run
from surefoot.train.state import TrainState

FLIPPED_BIT = 30.0
"""The highest bit of the exponent: a weight below 2 becomes one beyond 1e30."""
WORDS = [
    "the",
    "step",
    "holds",
    "when",
    "the",
    "ground",
    "moves",
    "and",
    "what",
    "was",
    "lost",
    "is",
    "counted",
    "before",
    "it",
    "is",
    "mended",
    "so",
    "that",
    "a",
    "run",
    "which",
    "fell",
    "stands",
    "where",
    "it",
    "would",
    "have",
    "stood",
    "had",
    "it",
    "never",
    "fallen",
    "and",
    "every",
    "row",
    "it",
    "read",
    "is",
    "read",
    "once",
    "and",
    "none",
    "is",
    "read",
    "twice",
]


def write_corpus(folder: Path, *, documents: int = 40, seed: int = 0) -> None:
    """Small texts of our own in two domains, ``<folder>/calm`` and ``<folder>/busy``; the same bytes for the same seed."""
    draw = random.Random(seed)
    for domain, length in (("calm", 60), ("busy", 25)):
        (folder / domain).mkdir(parents=True, exist_ok=True)
        for number in range(documents):
            text = " ".join(draw.choice(WORDS) for _ in range(length + draw.randrange(length)))
            (folder / domain / f"{number:04d}.txt").write_text(f"{domain} {number}. {text}.\n")


def rehearsal(corpus: Path, cache: Path, *, steps: int = 24, precision: str = "fp32") -> RunConfig:
    """The config of a run on ``write_corpus``'s texts: about 20 thousand parameters, bytes as tokens."""
    domains = ("calm", "busy")
    return RunConfig(
        recipe="rehearsal",
        steps=steps,
        seed=7,
        model=ModelConfig(
            vocab_size=257,
            d_model=32,
            num_layers=2,
            attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8),
            feed_forward=SwiGLU(d_ff=48),
        ),
        data=DataConfig(
            sources=tuple(
                SourceConfig(name=d, documents=TextFiles(glob=f"{corpus}/{d}/*.txt"), weight=w)
                for d, w in zip(domains, (2.0, 1.0), strict=True)
            ),
            tokenizer=BytesTokenizer(),
            seq_len=64,
            batch_size=4,
            cache_dir=str(cache),
        ),
        optim=OptimConfig(lr=3e-3, schedule=Cosine(), warmup_steps=4),
        parallel=ParallelConfig(device="cpu", precision=precision, threads=1),  # type: ignore[arg-type]
        guard=GuardConfig(snapshots=2, snapshot_every=4, certify_after=4),
        checkpoint=CheckpointConfig(every=5, keep_last=3),
        eval=EvalConfig(every=10, rows=4, batch_size=4),
        log=LogConfig(sample_tokens=0),
    )


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is done to a rehearsed run on purpose."""

    nan_batches: tuple[int, ...] = ()
    """Batches whose gradient gets a NaN."""
    nan_activation_batches: tuple[int, ...] = ()
    """Batches in which a rank's embeddings come out as NaN."""
    nan_ranks: tuple[int, ...] = (0,)
    """Ranks on which it does."""
    empty_batches: tuple[int, ...] = ()
    """Batches that predict nothing: consumed, and nothing else."""
    flipped_at: int = -1
    """Batch before whose forward an exponent bit of a weight flips, once in the life of the process; -1 is never."""
    poison_token: int = -1
    """Token that comes out of the embedding as NaN, by no fault of the weights; -1 is none."""
    rollback_after: int = -1
    """Batch after which the run rolls back; -1 is never."""
    rollbacks: int = 1
    """Rollbacks of the run, earlier ones included, after which there are no more."""
    rollback_to: int = 0
    """Batch that the rollback goes to or before."""
    exclude: tuple[str, ...] = ()
    """Documents that the rollback excludes."""
    stop_after: int = -1
    """Batch after which the run is asked to stop, as by SIGTERM; -1 is never."""
    die_after: int = -1
    """Batch after which the process raises, as a crash would; -1 is never."""


class Crashed(Exception):
    """The script said so."""


@dataclass(frozen=True)
class Rehearsed:
    """What is left of a rehearsed run, in plain values that cross processes."""

    reason: str
    opening: str
    step: int
    batch_index: int
    digests: dict[str, int]
    """Of every weight and moment, by name."""
    tensors: dict[str, npt.NDArray[np.float64]]
    """The same, whole, as fp64."""
    guard: dict[str, Any]
    """What the guard remembers."""
    ledger: str
    """Hash over all rows of this rank's ledger, times left out."""
    warnings: tuple[str, ...]


def rehearse(
    config: RunConfig, folder: Path, script: Script = Script(), clock: Callable[[], float] = time.monotonic
) -> Rehearsed:
    """Run a config in ``folder`` to its end, or continue it, under a script; on the ranks that there are."""
    world = join_world(config.parallel)
    told: list[str] = []

    def notify(kind: str, row: Mapping[str, Any]) -> None:
        if kind == "warning":
            told.append(str(row["text"]))

    stop = StopRequest()
    with open_run(config, folder, world, notify=notify, peak=0.0) as run:
        if script.poison_token >= 0:
            _poison(run.state, script.poison_token)
        setup = with_nan_gradients(run.setup, run.state, script.nan_batches, script.nan_ranks)
        with_nan_activations(run.setup, run.state, script.nan_activation_batches, script.nan_ranks)
        bench = Bench(setup, run.state, run.data)
        if script.flipped_at >= 0:
            dose = Dose(onset=script.flipped_at, length=1, magnitude=FLIPPED_BIT, seed=3)
            bench = strike_weight(flip_bit, bench, dose)
        if script.empty_batches:
            bench = skip_healthy(bench, script.empty_batches)
        watcher = _ScriptedWatcher(script, stop)
        judge = scripted_judge(run.keeping, script)
        held = (run.state, bench.setup, bench.data, run.keeping)
        ending = train(*held, stop=stop, watchers=(watcher,), judge=judge, clock=clock)
        if ending.reason == "done":
            finish(run)
        live = run.state.tensors()
        return Rehearsed(
            reason=ending.reason,
            opening=run.opening,
            step=run.state.step,
            batch_index=run.state.batch_index,
            digests=digest_tensors(live),
            tensors={name: _whole(tensor) for name, tensor in live.items()},
            guard=run.state.guard.to_dict(),
            ledger=run.keeping.ledger.prefix_hash(len(run.keeping.ledger.rows)),
            warnings=tuple(told),
        )


def rehearse_on_rank(rank: int, world: int, config: RunConfig, folder: Path, script: Script = Script()) -> Rehearsed:
    """``rehearse`` in the form that the fork launcher calls."""
    return rehearse(config, folder, script)


def scripted_judge(keeping: Keeping, script: Script) -> Judge:
    """The guard's own judge, and the script's one rollback."""

    def decide(
        state: GuardState,
        signals: StepSignals,
        config: GuardConfig,
        record: Record,
        probe: ProbeSignals | None = None,
        total_steps: int = 0,
    ) -> Verdict:
        verdict = judge(state, signals, config, record, probe, total_steps)
        done = sum(a.reason == "rollback" for a in keeping.ledger.attempts)
        if signals.batch_index != script.rollback_after or done >= script.rollbacks:
            return verdict
        cause = f"rehearsed: what batch {signals.batch_index} holds is declared bad"
        action = Rollback(to_batch=script.rollback_to, exclude=script.exclude, cause=cause)
        return Verdict(state=verdict.state, action=action)

    return decide


class _ScriptedWatcher:
    """Carries out what the script says should come from outside: a signal, a crash."""

    def __init__(self, script: Script, stop: StopRequest) -> None:
        self.script, self.stop = script, stop

    def step(self, report: StepReport) -> None:
        """After each batch."""
        # The stop rides in the reduction of the next step, so it is asked for one batch early.
        if report.batch_index == self.script.stop_after - 1:
            self.stop.signal = signal.SIGTERM
        if report.batch_index == self.script.die_after:
            raise Crashed(f"after batch {report.batch_index}")


def _poison(state: TrainState, token: int) -> None:
    def spoil(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return torch.where((inputs[0] == token)[..., None], math.nan, output)

    state.model.get_submodule("embedding").register_forward_hook(spoil)


def _whole(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    whole: npt.NDArray[np.float64] = full.detach().double().cpu().numpy().copy()
    return whole
