"""False alarms: hundreds of thousands of healthy steps through the real loop, and what the guard said of them."""

import dataclasses
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from surefoot.config.data import BatchStage, BytesTokenizer, DataConfig, MixtureStage, SourceConfig, TextFiles
from surefoot.config.guard import GuardConfig
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import WSD, Cosine, OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import CheckpointConfig, EvalConfig, LogConfig, RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.monitor.step_report import StepReport
from surefoot.parallel.mesh import join_world
from surefoot.proof.drill import base_config
from surefoot.proof.rehearsal import write_corpus
from surefoot.proof.resumable import run_missing
from surefoot.proof.witness import Witness
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.opening import commit_of
from surefoot.train.run import open_run

SEGMENT_STEPS = 3000
KINDS = ("turns", "stops", "epochs")
"""turns: a mixture switch and batch ramps on real text. stops: resumes, with a dip and re-warm-up of the rate at one of them. epochs: a text
so small that it is read dozens of times and partly learned by heart. All end in a decay of the rate."""
NEVER = 1 << 40


def segment_config(kind: str, seed: int, steps: int, folder: Path, cache: Path) -> RunConfig:
    """A run of a model of a few thousand parameters; its rate, schedule and batches are drawn from the seed."""
    draw = random.Random(f"{kind}/{seed}")
    data = base_config("B", seed, cache).data
    if kind == "epochs":
        write_corpus(folder / "texts", documents=8, seed=seed)
        sources = tuple(
            SourceConfig(name=name, documents=TextFiles(glob=f"{folder}/texts/{name}/*.txt"))
            for name in ("calm", "busy")
        )
        data = DataConfig(
            sources=sources, tokenizer=BytesTokenizer(), seq_len=32, batch_size=4, cache_dir=str(folder / "cache")
        )
    data = dataclasses.replace(data, seq_len=32, batch_size=draw.choice((4, 6, 8)))
    if kind == "turns":
        data = _with_turns(data, draw, steps)
    schedule = draw.choice((WSD(decay_fraction=draw.uniform(0.1, 0.4)), Cosine()))
    return RunConfig(
        recipe=f"healthy-{kind}",
        steps=steps,
        seed=seed,
        model=ModelConfig(
            vocab_size=257,
            d_model=16,
            num_layers=1,
            attention=GroupedQueryAttention(num_heads=1, num_kv_heads=1, d_head=16, qk_norm=draw.random() < 0.5),
            feed_forward=SwiGLU(d_ff=32),
        ),
        data=data,
        optim=OptimConfig(lr=3e-3 * 4 ** draw.random(), warmup_steps=draw.randint(20, 200), schedule=schedule),
        parallel=ParallelConfig(device="cpu", precision="fp32", threads=1),
        guard=GuardConfig(),
        checkpoint=CheckpointConfig(every=1000, asynchronous=False),
        eval=EvalConfig(every=500, rows=8),
        log=LogConfig(sample_tokens=0),
    )


def _with_turns(data: DataConfig, draw: random.Random, steps: int) -> DataConfig:
    """Two steps of a batch ramp, and other weights of the domains from a row on."""
    first, second = sorted(draw.sample(range(steps // 10, steps), 2))
    stages = (
        BatchStage(start_batch=first, batch_size=data.batch_size + 2),
        BatchStage(start_batch=second, batch_size=data.batch_size + 6),
    )
    turn = MixtureStage(start_row=draw.randint(1, 6 * steps), weights=draw.choice(((1.0, 3.0), (3.0, 1.0))))
    return dataclasses.replace(data, batch_stages=stages, mixture_stages=(turn,))


def run_segment(kind: str, seed: int, steps: int, cache: Path, command: str) -> dict[str, Any]:
    """One healthy run, and everything the guard said or did, as plain JSON values."""
    with tempfile.TemporaryDirectory(prefix="surefoot-healthy-") as name:
        config = segment_config(kind, seed, steps, Path(name), cache)
        prepared = prepare(config.data)
        epochs = _epochs(Loader(config.data, prepared, seed), steps)
        witness = Witness(NEVER)
        begun = time.monotonic()
        ending = _run(kind, config, Path(name) / "run", witness)
    seconds = time.monotonic() - begun
    findings: Counter[str] = Counter()
    for row in witness.rows:
        findings.update(f"{finding['kind']} {finding['severity']}" for finding in row.get("findings") or ())
    acted = Counter(event.action for event in witness.events if event.action != "proceed")
    losses = [row.loss for _, row in witness.reports]
    return {
        "kind": kind,
        "seed": seed,
        "steps": config.steps,
        "batches": len(witness.reports),
        "ending": ending,
        "epochs": round(epochs, 2),
        "findings": dict(sorted(findings.items())),
        "actions": dict(sorted(acted.items())),
        "dearest": max([0, len(witness.reports) - config.steps]) if ending == "done" else None,
        "texts": [event.text for event in witness.events if event.serious][:20],
        "last_loss": round(sum(losses[-50:]) / len(losses[-50:]), 4),
        "seconds": round(seconds, 1),
        "command": command,
        "commit": commit_of(),
        "torch": torch.__version__,
    }


def _run(kind: str, config: RunConfig, folder: Path, witness: Witness) -> str:
    stops = [config.steps // 3, config.steps * 2 // 3] if kind == "stops" else []
    ending = ""
    for number, until in enumerate([*stops, NEVER]):
        with open_run(config, folder, join_world(config.parallel), notify=witness.notify, peak=0.0) as run:
            if number == 1:
                step = run.state.step
                event = {
                    "factor": 0.1,
                    "hold_steps": 0,
                    "ramp_steps": 100,
                    "settle": 1.0,
                    "cause": "re-warm-up, on purpose",
                }
                run.keeping.record("lr_event", batch_index=run.state.batch_index, start_step=step, **event)
            stop = StopRequest()
            watchers = (witness, _StopAt(until, stop))
            ending = train(run.state, run.setup, run.data, run.keeping, stop=stop, watchers=watchers).reason
    return ending


class _StopAt:
    """Asks a run to stop after a batch."""

    def __init__(self, batch_index: int, stop: StopRequest) -> None:
        self.batch_index, self.stop = batch_index, stop

    def step(self, report: StepReport) -> None:
        """After each batch."""
        if report.batch_index == self.batch_index:
            self.stop.signal = signal.SIGTERM


def _epochs(loader: Loader, steps: int) -> float:
    rows, _ = loader.batch_starts.rows_of(steps)
    return max(loader.mixture.rows_before(s, rows) / loader.mixture.num_rows[s] for s in range(len(loader.splits)))


def run_segments(
    steps: int, folder: Path, cache: Path, command: str, *, workers: int = 2, say: Callable[[str], None] = print
) -> list[str]:
    """Healthy runs of together at least ``steps`` steps, those that ``folder`` has a result of left out; what went wrong, a sentence each."""
    size = min(SEGMENT_STEPS, steps)
    names = [(KINDS[n % len(KINDS)], n) for n in range(-(-steps // size))]
    prepare(base_config("B", 0, cache).data)
    jobs = {f"{kind}-{seed:04d}-{size}": partial(run_segment, kind, seed, size, cache, command) for kind, seed in names}
    return run_missing(jobs, folder, workers=workers, say=say, describe=describe)


def describe(segment: Mapping[str, Any]) -> str:
    """One line for a log."""
    said = ", ".join(f"{count} {what}" for what, count in segment["findings"].items()) or "silent"
    acted = "".join(f", {count} {what}" for what, count in segment["actions"].items())
    return f"{segment['ending']}, {segment['epochs']:.1f} epochs, {said}{acted} ({segment['seconds']:.0f} s)"


def step_counts(segments: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Healthy steps by kind of run."""
    counts: Counter[str] = Counter()
    for segment in segments:
        counts[segment["kind"]] += segment["steps"]
    return dict(counts)
