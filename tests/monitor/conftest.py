"""A made-up run with everything in it that a report must show."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config.data import Exclusion
from surefoot.monitor.facts import RunFacts, Sample, Yardstick
from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore

BATCH_TOKENS = 16_384
BAD = "5eedf00ddeadbeef"


class Synthetic:
    """Writes a run as training would, with losses of a made-up curve."""

    def __init__(self, store: RunStore, steps: int) -> None:
        self.store, self.steps = store, steps
        self.smoothed = 8.3
        self.rng = random.Random(0)
        self.step = 0

    def report(self, batch: int, *, spike: float = 0.0, skipped: bool = False) -> StepReport:
        share = batch / self.steps
        loss = 2.6 + 5.7 * math.exp(-9 * share) + 0.06 * self.rng.gauss(0, 1) + spike
        if not skipped:
            self.step += 1
            self.smoothed += 0.05 * (loss - self.smoothed)
        lr = 3e-3 * min(1.0, (self.step + 1) / (self.steps / 12)) * min(1.0, 5 * (1 - share))
        metrics = {
            "train/loss": math.nan if skipped else loss,
            "train/loss_smoothed": self.smoothed,
            "train/gradient_norm": math.inf
            if skipped
            else 0.4 + math.exp(-12 * share) + spike + 0.04 * self.rng.random(),
            "train/lr": lr,
            "train/skipped": float(skipped),
            "perf/tokens_per_s": 33_000 + 900 * self.rng.gauss(0, 1) - (9000 if batch % 200 == 0 else 0),
            "perf/mfu": 0.52 + 0.01 * self.rng.gauss(0, 1),
            "perf/step_s": BATCH_TOKENS / 33_000,
            "perf/memory_gib": 1.23,
        }
        cause = f"batch {batch}: loss nan, gradient norm inf, not finite" if skipped else ""
        tokens = BATCH_TOKENS * (batch + 1)
        return StepReport(batch, self.step, tokens, skipped, cause, metrics, f"{batch:016x}", ())

    def batches(self, batches: range, *, spikes: tuple[int, ...] = (), nans: tuple[int, ...] = ()) -> None:
        for batch in batches:
            report = self.report(batch, spike=3.0 if batch in spikes else 0.0, skipped=batch in nans)
            if report.skipped:
                self.store.record("skip", batch_index=batch, step=self.step, cause=report.cause)
            self.store.write_step(report)
            if batch % max(1, self.steps // 12) == 0 or batch == self.steps:
                self.evaluate(batch)

    def evaluate(self, batch: int) -> None:
        share = batch / self.steps
        bits = {"code": 1.52 + 2.9 * math.exp(-8 * share), "prose": 1.78 + 2.6 * math.exp(-7 * share)}
        metrics = {f"eval/{name}/bits_per_byte": value for name, value in bits.items()}
        metrics |= {f"eval/{name}/loss": 2.1 * value for name, value in bits.items()}
        self.store.write_metrics(batch, self.step, metrics)

    def save(self, batch: int) -> str:
        name = f"step-{self.step:06d}-attempt-{self.store.attempt:04d}"
        self.store.flush(sync=True)
        fields = {"name": name, "step": self.step, "batch_index": batch, "attempt": self.store.attempt}
        self.store.record("checkpoint", digest="0123456789abcdef", **fields)
        return name


FACTS = RunFacts(
    recipe="tiny",
    model="6 layers, d_model 192",
    num_params=2_104_320,
    tokens=1200 * BATCH_TOKENS,
    steps=1200,
    batch_tokens=BATCH_TOKENS,
    precision="bf16",
    device="cpu, 2 threads",
    data_fingerprint="3fa29c1d0b7e4455",
    config_fingerprint="9ae21b07c3d2aa10",
    folder="runs/tiny-9ae21b",
)


def synthetic_run(folder: Path, steps: int = 1200, *, finish: bool = True) -> Path:
    """Killed and resumed, one NaN batch, a spike that is rolled back with a document excluded, then the end."""
    tenth = steps // 10
    with RunStore(folder, print) as store:
        run = Synthetic(store, steps)
        store.write_config(f'recipe = "tiny"\nsteps = {steps}\nseed = 0\n[optim]\nlr = 3e-3\n')
        store.write_environment(
            {"argv": [".venv/bin/surefoot", "train", "tiny"], "python": "3.11.9", "torch": "2.13.0"}
        )
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        FACTS.write(store)
        run.batches(range(2 * tenth))
        first, smoothed = run.save(2 * tenth), run.smoothed
        run.batches(range(2 * tenth, 3 * tenth))
        store.open_attempt(reason="resume", from_step=2 * tenth, from_batch=2 * tenth, checkpoint=first)
        run.step, run.smoothed = 2 * tenth, smoothed
        run.batches(range(2 * tenth, 5 * tenth), nans=(4 * tenth + 7,))
        store.record("certified", name=first)
        second = run.save(5 * tenth)
        at, smoothed = run.step, run.smoothed
        run.batches(range(5 * tenth, 6 * tenth), spikes=tuple(range(6 * tenth - 12, 6 * tenth)))
        bad = Exclusion(document=BAD, from_batch=5 * tenth)
        cause = "the loss rose 3.0 above its band"
        store.open_attempt(
            reason="rollback", from_step=at, from_batch=5 * tenth, checkpoint=second, exclude=[bad], cause=cause
        )
        run.step, run.smoothed = at, smoothed
        run.batches(range(5 * tenth, steps + 1), spikes=(8 * tenth,))
        run.save(steps + 1)
        sizes = {"num_bytes": 1_800_000}
        Yardstick(domain="code", zlib_bits_per_byte=2.021, xz_bits_per_byte=1.724, **sizes).write(store, steps)
        Yardstick(domain="prose", zlib_bits_per_byte=2.642, xz_bits_per_byte=2.310, **sizes).write(store, steps)
        code = "        if self._closed:\n            raise ValueError('I/O operation on closed file')\n        return self._buffer"
        Sample(domain="code", prompt="    def read(self, size=-1):\n", text=code).write(store, steps)
        prose = " a new object of the same type. If the argument is omitted, the default is used instead, and the value"
        Sample(domain="prose", prompt="Return", text=prose).write(store, steps)
        store.heartbeat(run.step, steps + 1, force=True)
        if finish:
            store.record("finish", step=run.step, batch_index=steps + 1, digest="0123456789abcdef")
    return folder


@pytest.fixture(scope="session")
def make_synthetic() -> Callable[..., Path]:
    """The builder, for tests that want their own."""
    return synthetic_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, only read by tests."""
    return synthetic_run(tmp_path_factory.mktemp("runs") / "tiny-9ae21b")
