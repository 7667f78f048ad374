"""A run begun, taken up again, or forked: from what the ledger and the disk say."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from surefoot.config.fingerprint import layout_settings
from surefoot.config.run import RunConfig
from surefoot.guard.ledger import Checkpoint
from surefoot.guard.ledger_row import KINDS
from surefoot.monitor.run import Run
from surefoot.parallel.machine import cpu_name, num_cores
from surefoot.train.checkpoint import verify
from surefoot.train.keeping import Keeping
from surefoot.train.manifest import CheckpointError
from surefoot.train.rollback import restore_checkpoint
from surefoot.train.state import TrainState
from surefoot.train.stock import FORKED, ResumeRefused, newest_good, set_aside, take_stock


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
    take_stock(keeping)
    found = newest_good(keeping)
    checkpoint = found.checkpoint
    cause = f"with changed {', '.join(changed)}" if changed else ""
    if checkpoint is None:
        if keeping.ledger.surviving_checkpoints() or keeping.ledger.lineage:
            what = found.problem or "their folders are gone"
            raise CheckpointError(
                f"{keeping.folder}: none of its checkpoints can be used ({what}), and starting again from step 0 would be another run "
                "under its name. Restore one, or start over with --fresh"
            )
        first = keeping.ledger.attempt == 0
        keeping.open_attempt("start" if first else "resume", from_step=0, from_batch=0, cause=cause)
        return "starting" if first else "no checkpoint was written yet: starting again from step 0"
    # Loaded first: a state that does not fit is refused before anything is written about it.
    restore_checkpoint(checkpoint.name, state, keeping)
    keeping.open_attempt(
        "resume", from_step=checkpoint.step, from_batch=checkpoint.batch_index, checkpoint=checkpoint.name, cause=cause
    )
    set_aside(keeping, found.refused)
    return f"continuing from {checkpoint.name} at step {checkpoint.step:,} (batch {checkpoint.batch_index:,})"


def begin_fork(
    state: TrainState,
    keeping: Keeping,
    parent: Run,
    checkpoint: Checkpoint,
    changes: Sequence[tuple[str, str, str]],
    knows: Callable[[str], bool],
) -> str:
    """Begin a fork: the parent's checkpoint copied so that the fork stands alone, lineage in the ledger, its state restored.

    Parameters that the fork's model shares with the parent's (by name and shape) are restored, with their moments where the optimiser is
    of the same kind; what could not be taken over is said. Documents that the parent excluded stay excluded, where ``knows`` says that the
    fork's data hold them; so do its LR events that had begun.
    Collective over ranks. Raises CheckpointError, before anything is written, when the checkpoint is damaged or does not fit.
    """
    keeping.share_ledger()
    source = parent.folder / "checkpoints" / checkpoint.name
    if problems := verify(source, group=keeping.save_group):
        raise CheckpointError(f"{source} cannot be forked: {problems[0]}")
    # Loaded first: a state that does not fit is refused before anything is written about it.
    taken = keeping.load_shared(source, state)
    name = FORKED + checkpoint.name
    if keeping.world.leads:
        partial = keeping.path(f".{name}.partial")
        # What a command left that ended before it had begun is another parent's, maybe.
        for left in (partial, keeping.path(name)):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(source, partial)
        partial.rename(keeping.path(name))
    keeping.record(
        "lineage",
        parent=os.path.relpath(parent.folder.resolve(), keeping.folder.resolve()),
        step=checkpoint.step,
        batch_index=checkpoint.batch_index,
        checkpoint=checkpoint.name,
        diff=[list(change) for change in changes],
    )
    take_over_rates(keeping, parent, checkpoint)
    excluded = [item for item in parent.ledger.exclusions if knows(item.document)]
    keeping.open_attempt(
        "fork",
        from_step=checkpoint.step,
        from_batch=checkpoint.batch_index,
        checkpoint=checkpoint.name,
        exclude=tuple(excluded),
    )
    keeping.record(
        "checkpoint",
        name=name,
        step=checkpoint.step,
        batch_index=checkpoint.batch_index,
        attempt=keeping.ledger.attempt,
        digest=checkpoint.digest,
    )
    return f"forked from {parent.name} at step {checkpoint.step:,} (batch {checkpoint.batch_index:,}){taken.sentence()}"


def take_over_rates(keeping: Keeping, parent: Run, checkpoint: Checkpoint) -> None:
    """Note the parent's LR events that had begun when the checkpoint was taken, or would have with its next update: they stay in force.

    They are no part of what the fork's own guard has spent. Their batch is put before the fork's first, so that no resume takes them back.
    """
    for decision in parent.ledger.decisions.all():
        row = decision.row
        if row["kind"] != "lr_event":
            continue
        ordered_before = row["start_step"] == checkpoint.step and row["batch_index"] < checkpoint.batch_index
        if row["start_step"] < checkpoint.step or ordered_before:
            fields = {name: row[name] for name in KINDS["lr_event"]}
            fields["batch_index"] = min(row["batch_index"], checkpoint.batch_index - 1)
            keeping.record("lr_event", **fields, inherited=True)


def environment(config: RunConfig, fingerprints: dict[str, str]) -> dict[str, Any]:
    """env.json: what strict determinism is promised under, and what helps to explain a difference."""
    return {
        "versions": {name: _version(name) for name in ("surefoot", "torch", "numpy", "tokenizers", "safetensors")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "precision": config.parallel.precision,
        "layout": layout_settings(config),
        "commit": commit_of(),
        "argv": sys.argv,
        **fingerprints,
    }


DECIDES_BITS = ("versions", "python", "cpu", "threads", "devices", "world_size")
"""Keys of env.json whose change may change bits; said at resume."""


def environment_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Sentences about what differs between the environment a run was written under and this one."""
    changes = [
        f"{key} was {before[key]}, is {now[key]}"
        for key in DECIDES_BITS
        if key in before and key in now and before[key] != now[key]
    ]
    # a run of an earlier version wrote none down
    layouts = [part.get("layout", {}) for part in (before, now)]
    return changes + [
        f"{key} was {layouts[0][key]}, is {value}"
        for key, value in layouts[1].items()
        if layouts[0].get(key, value) != value
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
