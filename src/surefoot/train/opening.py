"""A run begun, taken up again, or forked: from what the ledger and the disk say."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from surefoot.config.run import RunConfig
from surefoot.guard.ledger import Checkpoint
from surefoot.train.checkpoint_match import read_record
from surefoot.train.keeping import Keeping
from surefoot.train.state import TrainState

FORKED = "fork-"
"""Prefix of the parent's checkpoint in a fork's folder."""


class ResumeRefused(Exception):
    """The folder holds a run that this config does not continue; the text names what differs and the way out (exit code 2)."""


def begin_or_resume(state: TrainState, keeping: Keeping, *, changed: Sequence[str] = ()) -> str:
    """Open the next attempt and bring ``state`` to where the surviving run stands; returns a sentence about it.

    The newest checkpoint of the surviving lineage that is whole on disk is restored; one that a crash left without its ledger row is
    adopted first. ``changed`` names config keys that were allowed to change. Collective over ranks.
    """
    keeping.share_ledger()
    if keeping.ledger.lineage and keeping.ledger.attempt == 0:
        raise ResumeRefused(
            f"{keeping.folder} is a fork that was interrupted before it began; run the same `surefoot fork` again with --fresh"
        )
    adopt_unrecorded(keeping)
    checkpoint = keeping.newest_good()
    cause = f"with changed {', '.join(changed)}" if changed else ""
    if checkpoint is None:
        first = keeping.ledger.attempt == 0
        keeping.open_attempt("start" if first else "resume", from_step=0, from_batch=0, cause=cause)
        return "starting" if first else "no checkpoint was written yet: starting again from step 0"
    keeping.open_attempt(
        "resume", from_step=checkpoint.step, from_batch=checkpoint.batch_index, checkpoint=checkpoint.name, cause=cause
    )
    keeping.load(checkpoint.name, state)
    return f"continuing from {checkpoint.name} at step {checkpoint.step:,} (batch {checkpoint.batch_index:,})"


def adopt_unrecorded(keeping: Keeping) -> None:
    """Note whole checkpoints that a crash left on disk before their ledger row was written, where they belong to the surviving run."""
    rows: list[dict[str, Any]] = []
    if keeping.world.leads:
        known = {c.name for c in keeping.ledger.checkpoints}
        root = keeping.folder / "checkpoints"
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            if folder.name not in known and (folder / "manifest.json").exists():
                row = _recorded(folder, keeping)
                if row is not None:
                    rows.append(row)
    for row in keeping.from_leader(rows):
        keeping.record("checkpoint", **row)


def _recorded(folder: Path, keeping: Keeping) -> dict[str, Any] | None:
    """The ledger row of a checkpoint on disk, if this run's surviving lineage wrote it."""
    ledger = keeping.ledger
    try:
        record = read_record(folder)
        row, prefix = dict(record["checkpoint"]), record["ledger"]
        if ledger.lineage and folder.name == FORKED + row["name"]:
            return row | {"name": folder.name, "attempt": 1}
        belongs = (
            row["name"] == folder.name
            and prefix["rows"] <= len(ledger.rows)
            and ledger.prefix_hash(prefix["rows"]) == prefix["hash"]
            and 1 <= row["attempt"] <= ledger.attempt
            and row["batch_index"] <= ledger.end_of(row["attempt"])
        )
    except (OSError, KeyError, ValueError, TypeError):
        return None
    return row if belongs else None


def begin_fork(
    state: TrainState,
    keeping: Keeping,
    source: Path,
    checkpoint: Checkpoint,
    parent: Path,
    changes: Sequence[tuple[str, str, str]],
) -> str:
    """Begin a fork: lineage in the ledger, the parent's checkpoint copied so that the fork stands alone, its state restored.

    Parameters that the fork's model shares with the parent's (by name and shape) are restored with their moments; others keep their
    initial draw, and are named. Collective over ranks.
    """
    keeping.share_ledger()
    keeping.record(
        "lineage",
        parent=os.path.relpath(parent.resolve(), keeping.folder.resolve()),
        step=checkpoint.step,
        batch_index=checkpoint.batch_index,
        checkpoint=checkpoint.name,
        diff=[list(change) for change in changes],
    )
    name = FORKED + checkpoint.name
    if keeping.world.leads and not keeping.path(name).exists():
        partial = keeping.path(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        partial.rename(keeping.path(name))
    keeping.open_attempt(
        "fork", from_step=checkpoint.step, from_batch=checkpoint.batch_index, checkpoint=checkpoint.name
    )
    keeping.record(
        "checkpoint",
        name=name,
        step=checkpoint.step,
        batch_index=checkpoint.batch_index,
        attempt=keeping.ledger.attempt,
        digest=checkpoint.digest,
    )
    fresh = keeping.load_shared(name, state)
    new = f"; drawn anew: {', '.join(fresh)}" if fresh else ""
    return f"forked from {parent.name} at step {checkpoint.step:,} (batch {checkpoint.batch_index:,}){new}"


def environment(config: RunConfig, fingerprints: dict[str, str]) -> dict[str, Any]:
    """env.json: what strict determinism is promised under, and what helps to explain a difference."""
    return {
        "versions": {name: _version(name) for name in ("surefoot", "torch", "numpy", "tokenizers", "safetensors")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "precision": config.parallel.precision,
        "commit": commit_of(),
        "argv": sys.argv,
        **fingerprints,
    }


DECIDES_BITS = ("versions", "python", "cpu", "threads", "devices", "world_size")
"""Keys of env.json whose change may change bits; said at resume."""


def environment_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Sentences about what differs between the environment a run was written under and this one."""
    return [
        f"{key} was {before[key]}, is {now[key]}"
        for key in DECIDES_BITS
        if key in before and key in now and before[key] != now[key]
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def commit_of() -> str:
    """The git commit of the code that runs; empty outside a checkout."""
    git = shutil.which("git")
    if git is None:
        return ""
    here = Path(__file__).parent
    done = subprocess.run([git, "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
