"""What a step pays for its row: building the report, checking its names, JSON and the file, amortised over flushes.

    .venv/bin/python benchmarks/rows.py [--json]

Target: under 100 microseconds a step. Reported are wall and CPU time, the best of several repeats; the sync figure
adds a ``flush(sync=True)`` every 200 steps, as checkpoints do.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

from surefoot.monitor.step_report import StepReport
from surefoot.monitor.store import RunStore

STEPS = 20_000
REPEATS = 5
METRICS = {
    "train/loss": 3.0123456789,
    "train/loss_smoothed": 3.0456789,
    "train/objective": 3.0123456789,
    "train/gradient_norm": 0.71234567,
    "train/clipped": 0.0,
    "train/lr": 0.0029123456,
    "train/z_loss": 61.23456,
    "train/logsumexp_mean": 7.8123,
    "train/logsumexp_max": 13.2345,
    "train/num_targets": 32698.0,
    "train/tokens_excluded": 0.0,
    "train/skipped": 0.0,
    "train/document_loss_max": 6.1234,
    "train/document_loss_p999": 6.0123,
    "perf/tokens_per_s": 41234.5678,
    "perf/mfu": 0.5123,
    "perf/step_s": 0.79123,
    "perf/data_wait_s": 0.00012,
    "perf/memory_gib": 1.2345,
}


def one_repeat(folder: Path, sync_every: int) -> tuple[float, float]:
    """Wall and CPU microseconds a step."""
    with RunStore(folder, print) as store:
        store.open_attempt(reason="start", from_step=0, from_batch=0)
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in range(STEPS):
            metrics = {name: value + batch * 1e-7 for name, value in METRICS.items()}
            store.write_step(
                StepReport(batch, batch + 1, 32768 * (batch + 1), False, "", metrics, "0123456789abcdef", ())
            )
            store.heartbeat(batch + 1, batch + 1)
            if sync_every and batch % sync_every == sync_every - 1:
                store.flush(sync=True)
        store.flush()
        return tuple(1e6 * t / STEPS for t in (time.perf_counter() - wall, time.process_time() - cpu))  # type: ignore[return-value]


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for name, sync_every in (("rows", 0), ("rows and sync every 200", 200)):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            times = [one_repeat(Path(folder) / f"run-{n}", sync_every) for n in range(REPEATS)]
        results[name] = {"wall_us": min(t[0] for t in times), "cpu_us": min(t[1] for t in times)}
    facts = {"metrics": len(METRICS), "steps": STEPS, "python": platform.python_version(), "results": results}
    if arguments.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
        return
    print(f"{len(METRICS)} metrics a row, {STEPS:,} steps, best of {REPEATS}, microseconds a step")
    for name, figures in results.items():
        print(f"  {name:26s} wall {figures['wall_us']:6.1f}   cpu {figures['cpu_us']:6.1f}")


if __name__ == "__main__":
    main()
