"""Back to an earlier state, in memory or from disk, without some documents."""

from dataclasses import replace
from typing import Any

from surefoot.config.data import Exclusion
from surefoot.data.loader import Loader
from surefoot.guard.actions import Rollback
from surefoot.guard.guard import GuardState
from surefoot.parallel.shard import fill_parameters
from surefoot.train.keeping import Keeping
from surefoot.train.setup import Setup
from surefoot.train.snapshot import SnapshotRing
from surefoot.train.state import TrainState


def roll_back(
    action: Rollback, state: TrainState, setup: Setup, loader: Loader, keeping: Keeping, snapshots: SnapshotRing
) -> None:
    """Carry out a rollback: decide the target, write it to the ledger, then restore.

    The target is the newest state at or before ``action.to_batch`` that every rank has in memory, else the newest good checkpoint of
    the surviving run, else the initial weights. The documents are blanked from the target's batch onward. A crash after the ledger row
    resumes from disk at or before the same batch with the same exclusions, which is the same run.
    """
    keeping.wait()
    snapshot = snapshots.newest_common(action.to_batch, setup.world)
    checkpoint = keeping.newest_good(action.to_batch)
    if snapshot is not None and (checkpoint is None or snapshot.batch_index >= checkpoint.batch_index):
        from_batch, from_step, source = snapshot.batch_index, int(snapshot.counters["step"]), "snapshot"
    elif checkpoint is not None:
        from_batch, from_step, source = checkpoint.batch_index, checkpoint.step, checkpoint.name
    else:
        from_batch, from_step, source = 0, 0, ""
    spans_before = {doc: loader.spans_read_before(doc, from_batch) for doc in action.exclude}
    keeping.record(
        "verdict",
        action="rollback",
        text=f"Rolling back: {action.cause}.",
        batch_index=state.batch_index,
        from_batch=from_batch,
        exclude=list(action.exclude),
        spans_read_before=spans_before,
    )
    keeping.open_attempt(
        "rollback",
        from_step=from_step,
        from_batch=from_batch,
        checkpoint=source,
        exclude=tuple(Exclusion(document=document, from_batch=from_batch) for document in action.exclude),
        cause=action.cause,
    )
    if source == "snapshot" and snapshot is not None:
        snapshots.restore(snapshot, state)
    elif checkpoint is not None and source:
        keeping.load(checkpoint.name, state)
        snapshots.forget_after(from_batch)
    else:
        restore_initial(state, setup)
        snapshots.forget_after(0)


FIRST: dict[str, Any] = {"step": 0, "batch_index": 0, "smoothed_loss": 0.0, "guard": GuardState()}


def restore_initial(state: TrainState, setup: Setup) -> None:
    """The state before the first batch: initial weights drawn again from (seed, name), zero moments and counters."""
    fill_parameters(state.parameters, setup.draw)
    for name, tensor in state.tensors().items():
        if not name.startswith("weights/"):
            tensor.zero_()
    state.restore_counters(replace(state, **FIRST).counters())
