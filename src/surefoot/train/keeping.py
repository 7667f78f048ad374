"""What a run keeps: its ledger on every rank, its rows and checkpoints on disk."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from surefoot.config.codec import to_dict
from surefoot.config.data import Exclusion
from surefoot.config.run import RunConfig
from surefoot.guard.ledger import Ledger
from surefoot.monitor.store import RunStore
from surefoot.parallel.digest import combine, digest_tensors
from surefoot.parallel.mesh import World
from surefoot.parallel.reduce import from_every_rank, from_rank_zero
from surefoot.train.checkpoint import PendingSave, load, save
from surefoot.train.checkpoint_match import Taken, take_over
from surefoot.train.manifest import CheckpointError
from surefoot.train.retention import checkpoint_name
from surefoot.train.staging import Staging
from surefoot.train.state import TrainState

Notify = Callable[[str, Mapping[str, Any]], None]
"""(kind, row): a ledger row or an event for whoever watches; on rank 0 only."""


@dataclass
class Keeping:
    """Every rank holds the same ledger and decides the same; rank 0 alone writes the run folder."""

    config: RunConfig
    world: World
    folder: Path
    store: RunStore | None
    """The folder's writer, on rank 0."""
    notify: Notify
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Fingerprints that every checkpoint records beside its config."""
    save_group: Any = None
    """Process group of its own for checkpoints: a background save on the step's group would deadlock."""
    staging: Staging = field(default_factory=Staging)
    """Host memory that a save copies the state into, used again by the next."""
    _mirror: Ledger = field(default_factory=Ledger)
    _pending: tuple[PendingSave, dict[str, Any]] | None = None

    @property
    def ledger(self) -> Ledger:
        """The run's decisions so far."""
        return self.store.ledger if self.store else self._mirror

    def share_ledger(self) -> None:
        """Give every rank the rows that rank 0 found on disk."""
        rows = from_rank_zero([dict(r) for r in self.ledger.rows], self.world)
        if not self.store:
            self._mirror = Ledger(rows)

    def from_leader(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank."""
        return from_rank_zero(value, self.world)

    def record(self, kind: str, **fields: Any) -> None:
        """Append a row to the ledger of every rank; on rank 0 it is on the disk before this returns."""
        if self.store:
            self.notify(kind, self.store.record(kind, **fields))
        else:
            self._mirror = self._mirror.append(self._mirror.next_row(kind, fields, time.time()))

    def open_attempt(
        self,
        reason: str,
        *,
        from_step: int,
        from_batch: int,
        checkpoint: str = "",
        exclude: tuple[Exclusion, ...] = (),
        cause: str = "",
    ) -> None:
        """Begin a new attempt in the ledger, before its state is restored."""
        fields = {"from_step": from_step, "from_batch": from_batch, "checkpoint": checkpoint, "cause": cause}
        if self.store:
            self.store.open_attempt(reason=reason, exclude=exclude, **fields)  # type: ignore[arg-type]
            self.notify("attempt", self.ledger.rows[-1])
        else:
            self.record("attempt", attempt=self.ledger.attempt + 1, reason=reason, exclude=exclude, **fields)

    def warn(self, state: TrainState, text: str, kind: Literal["warning", "note"] = "warning") -> None:
        """A sentence in the events and for whoever watches, about something that is no decision."""
        if self.store:
            self.store.write_event(kind, state.batch_index, state.step, text=text)
            self.notify(kind, {"text": text})

    # Checkpoints

    def save(self, state: TrainState, *, asynchronous: bool, digest: str = "") -> bool:
        """Write a checkpoint of the state as it is, or begin to; False when it could not be written, which is said. ``digest``: the state's,
        where it is known.

        Rows so far are made durable first. One save is in flight at most. What is already on disk is not written again.
        """
        self.wait()
        if any(c.batch_index == state.batch_index for c in self.ledger.surviving_checkpoints()):
            return True
        name = self._name(state)
        durable = self.store.flush(sync=True) if self.store else True
        if not from_rank_zero(durable, self.world):
            self.warn(state, f"{name} was not written: the disk takes no rows, and a checkpoint must not outlive them")
            return False
        tensors = state.tensors()
        row = {
            "name": name,
            "step": state.step,
            "batch_index": state.batch_index,
            "attempt": self.ledger.attempt,
            # the digest compares what several ranks hold
            "digest": digest or combine(digest_tensors(tensors)),
        }
        record = {
            "config": to_dict(self.config),
            "counters": self._counters(state),
            "ledger": {"rows": len(self.ledger.rows), "hash": self.ledger.prefix_hash(len(self.ledger.rows))},
            "checkpoint": row,
            **self.provenance,
        }
        try:
            pending = save(
                self.path(name),
                tensors,
                record,
                asynchronous=asynchronous,
                group=self.save_group,
                staging=self.staging,
                compared=True,
            )
        except CheckpointError as error:
            self.warn(
                state, f"{name} was not written: {error}; training goes on, the checkpoint before it is untouched"
            )
            return False
        self._pending = (pending, row)
        return True if asynchronous else self.wait()

    def save_ended(self) -> bool:
        """Whether a background save was in flight and has ended on rank 0; the same answer on every rank."""
        return self._pending is not None and bool(from_rank_zero(self._pending[0].done(), self.world))

    def wait(self) -> bool:
        """Wait for the save in flight, if any, and note it in the ledger; False when it failed, which is said."""
        if self._pending is None:
            return True
        pending, row = self._pending
        self._pending = None
        try:
            pending.wait()
        except CheckpointError as error:
            if self.world.leads:
                text = (
                    f"{row['name']} was not written: {error}; training goes on, the checkpoint before it is untouched"
                )
                self.notify("warning", {"text": text})
            return False
        self.record("checkpoint", **row)
        return True

    def path(self, name: str) -> Path:
        """Folder of a checkpoint."""
        return self.folder / "checkpoints" / name

    def load(self, name: str, state: TrainState) -> dict[str, Any]:
        """Restore a checkpoint into the state, in place, and return what it recorded. Raises CheckpointError."""
        record = load(self.path(name), state.tensors(), group=self.save_group)
        state.restore_counters(record["counters"])
        return record

    def load_shared(self, folder: Path, state: TrainState) -> Taken:
        """Restore what a parent's checkpoint shares with the state; says what it does not. Raises CheckpointError."""
        return take_over(folder, state, group=self.save_group)

    def _counters(self, state: TrainState) -> dict[str, Any]:
        """The state's, with the rules of every stage of a pipeline: some may have none of a kind that others have."""
        counters = state.counters()
        if self.world.layout.pp > 1:
            shares = from_every_rank(counters["moments_since"], self.world)
            counters["moments_since"] = {kind: since for share in shares for kind, since in share.items()}
        return counters

    def _name(self, state: TrainState) -> str:
        name = checkpoint_name(state.step, self.ledger.attempt)
        taken = {c.name for c in self.ledger.checkpoints}
        return f"{name}-batch-{state.batch_index:06d}" if name in taken else name
