"""Long proofs in parts: every part one result file, those that exist are not run again, a few processes at a time."""

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

Job = Callable[[], Mapping[str, Any]]
"""Makes one result, plain JSON values; must be picklable."""


def run_missing(
    jobs: Mapping[str, Job],
    folder: Path,
    *,
    workers: int = 2,
    say: Callable[[str], None],
    describe: Callable[[Mapping[str, Any]], str],
) -> list[str]:
    """Run the jobs of which ``folder`` has no ``<name>.json``; returns what went wrong, a sentence per job that made no result."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: job for name, job in jobs.items() if not (folder / f"{name}.json").exists()}
    if not missing:
        return []
    say(f"{len(missing)} of {len(jobs)} to do, {workers} at a time")
    problems: list[str] = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin_worker) as pool:
        waiting = {pool.submit(_run_and_keep, job, folder / f"{name}.json"): name for name, job in missing.items()}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                name = waiting[future]
                if error := future.exception():
                    problems.append(f"{name}: {type(error).__name__}: {error}")
                told = problems[-1] if error else f"{name}: {describe(future.result())}"
                say(f"[{done}/{len(missing)}] {told}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return problems


def begin_worker() -> None:
    """One thread per process: two processes share two cores."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _run_and_keep(job: Job, path: Path) -> Mapping[str, Any]:
    result = job()
    written = path.with_suffix(".part")
    written.write_text(json.dumps(result, indent=1) + "\n")
    written.replace(path)
    return result
