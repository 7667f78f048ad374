"""Back to an earlier state, in memory or from disk, without some documents."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from surefoot.config.data import Exclusion
from surefoot.data.loader import Loader
from surefoot.guard.actions import Rollback
from surefoot.guard.guard import GuardState
from surefoot.monitor.run import Run
from surefoot.monitor.wording import several
from surefoot.optim.noise_scale import NoiseState
from surefoot.parallel.forward_backward import reshard
from surefoot.parallel.shard import fill_parameters
from surefoot.train.keeping import Keeping
from surefoot.train.setup import Setup
from surefoot.train.snapshot import SnapshotRing
from surefoot.train.state import TrainState
from surefoot.train.stock import FORKED, newest_good, set_aside

MOST_LOST = 2000
"""Batches that the guard may throw away on its own account by starting again."""
IN_PLACE = "in place"
"""What was restored where a refused batch is read again: nothing, the state is as it was."""
FIRST: dict[str, Any] = {
    "step": 0,
    "batch_index": 0,
    "smoothed_loss": 0.0,
    "guard": GuardState(),
    "noise": NoiseState(),
}
"""The counters before the first batch."""


class NoTarget(Exception):
    """There is no state to go back to; the text says why."""


def roll_back(
    action: Rollback,
    told: Mapping[str, Any],
    state: TrainState,
    setup: Setup,
    loader: Loader,
    keeping: Keeping,
    snapshots: SnapshotRing,
) -> None:
    """Carry out a rollback: choose the state to restore, write the decision to the ledger (with what was ``told`` of it), then restore.

    Restored is the newest state at or before ``action.to_batch`` that every rank has in memory, else the newest good checkpoint of the
    surviving run that is certified, else the state the run began with. The documents are blanked, and the rate changed, from ``to_batch``
    onward, whatever was restored: batches in between are read again as they were, so the run does not depend on which states happened to be
    kept, and a crash after the ledger rows resumes the same run from disk. Collective. Raises NoTarget.
    """
    keeping.wait()
    snapshot = snapshots.newest_common(action.to_batch, setup.world)
    found = newest_good(keeping, action.to_batch, certified=True)
    checkpoint = found.checkpoint
    if snapshot is not None and (checkpoint is None or snapshot.batch_index >= checkpoint.batch_index):
        from_batch, from_step, source = snapshot.batch_index, int(snapshot.counters["step"]), "snapshot"
    elif checkpoint is not None:
        from_batch, from_step, source = checkpoint.batch_index, checkpoint.step, checkpoint.name
    else:
        refuse_to_start_again(action, state, keeping)
        from_batch, from_step, source = 0, 0, ""
    keeping.record(
        "verdict",
        action="rollback",
        text=f"Rolling back: {action.cause}.",
        batch_index=state.batch_index - 1,
        to_batch=action.to_batch,
        exclude=list(action.exclude),
        spans_read_before={doc: loader.spans_read_before(doc, action.to_batch) for doc in action.exclude},
        **told,
    )
    if action.lr_event is not None:
        start_step = step_before(action.to_batch, from_batch, from_step, keeping)
        keeping.record("lr_event", batch_index=state.batch_index - 1, start_step=start_step, **asdict(action.lr_event))
    keeping.open_attempt(
        "rollback",
        from_step=from_step,
        from_batch=from_batch,
        checkpoint=source,
        exclude=tuple(Exclusion(document=document, from_batch=action.to_batch) for document in action.exclude),
        cause=action.cause,
    )
    set_aside(keeping, found.refused)
    reshard(state.model)
    if source == "snapshot" and snapshot is not None:
        snapshots.restore(snapshot, state)
        return
    snapshots.forget_after(from_batch)
    restore_initial(state, setup)
    if source:
        restore_checkpoint(source, state, keeping)


def refuse_to_start_again(action: Rollback, state: TrainState, keeping: Keeping) -> None:
    """Raise NoTarget where going back to the beginning is no way: it lies in a fork's parent, or too much would be lost."""
    if keeping.ledger.lineage:
        raise NoTarget(f"no state at or before batch {action.to_batch} is left, and this fork began later than batch 0")
    if state.batch_index > MOST_LOST:
        raise NoTarget(
            f"no certified state at or before batch {action.to_batch} is left, and starting again from batch 0 would throw {state.batch_index:,} batches "
            "away: `surefoot fork RUN --at STEP` goes on from any checkpoint that is kept; a larger checkpoint.keep_last or keep_every keeps more"
        )


def read_again(
    action: Rollback, told: Mapping[str, Any], before: GuardState, state: TrainState, loader: Loader, keeping: Keeping
) -> None:
    """A rollback by no step at all: the batch whose update was just refused, once more without some documents.

    The refusal left weights and moments as they were, so only the counters go back. The ledger row comes first; a crash after it resumes
    from disk, with the documents blanked from this batch on.
    """
    batch_index = state.batch_index - 1
    keeping.record(
        "verdict",
        action="exclude",
        text=f"Leaving out {several(len(action.exclude), 'document')}: {action.cause}.",
        batch_index=batch_index,
        to_batch=batch_index,
        exclude=list(action.exclude),
        spans_read_before={doc: loader.spans_read_before(doc, batch_index) for doc in action.exclude},
        **told,
    )
    keeping.open_attempt(
        "rollback",
        from_step=state.step,
        from_batch=batch_index,
        checkpoint=IN_PLACE,
        exclude=tuple(Exclusion(document=document, from_batch=batch_index) for document in action.exclude),
        cause=action.cause,
    )
    state.batch_index, state.guard = batch_index, before


def step_before(batch_index: int, from_batch: int, from_step: int, keeping: Keeping) -> int:
    """Applied updates before a batch, by the rows of the run as it stands; ``from_step`` is the number before the earlier ``from_batch``."""
    if batch_index == from_batch:
        return from_step
    step = from_step
    if keeping.store:
        keeping.store.flush()
        rows = Run(keeping.folder).rows
        step = max((row["step"] for row in rows if from_batch <= row["batch_index"] < batch_index), default=from_step)
    return int(keeping.from_leader(step))


def restore_checkpoint(name: str, state: TrainState, keeping: Keeping) -> None:
    """Load a checkpoint; from a parent's copy only what fits, the rest as it is drawn, its moments at zero."""
    if name.startswith(FORKED):
        keeping.load_shared(keeping.path(name), state)
    else:
        keeping.load(name, state)


def restore_initial(state: TrainState, setup: Setup) -> None:
    """The state before the first batch: initial weights drawn again from (seed, name), zero moments and counters."""
    fill_parameters(state.parameters, setup.draw)
    for name, tensor in state.tensors().items():
        if not name.startswith("weights/"):
            tensor.zero_()
    # an empty scale of the loss is its initial one, and moments begin at zero
    state.restore_counters(replace(state, **FIRST).counters() | {"loss_scale": {}, "moments_since": {}})
