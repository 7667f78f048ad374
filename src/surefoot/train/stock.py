"""The checkpoints on disk held against the ledger: which are whole, which belong here, which may go."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.guard.ledger import Checkpoint
from surefoot.train.checkpoint import verify
from surefoot.train.checkpoint_match import read_record
from surefoot.train.keeping import Keeping
from surefoot.train.manifest import CheckpointError, remove_checkpoint
from surefoot.train.retention import to_delete
from surefoot.train.state import TrainState

FORKED = "fork-"
"""Prefix of the parent's checkpoint in a fork's folder."""
REFUSED = "refused-"
"""Prefix of a checkpoint that did not verify and was passed over: set aside for a person to look at, never deleted."""


class ResumeRefused(Exception):
    """The folder holds a run that cannot be continued as asked; the text names what is wrong and the way out (exit code 2)."""


@dataclass(frozen=True)
class Found:
    """The newest good checkpoint, and what was passed over on the way to it."""

    checkpoint: Checkpoint | None
    refused: tuple[str, ...]
    problem: str
    """What is wrong with the newest refused one; empty when none was."""


def take_stock(keeping: Keeping) -> None:
    """At an opening: drop saves that a kill cut short, note whole checkpoints that it left without their ledger row.

    Collective. Raises ResumeRefused when a checkpoint knows of more, or of other, ledger rows than there are: then the ledger was lost or
    exchanged, and with it what was excluded.
    """
    rows: list[dict[str, Any]] = []
    stranger = ""
    if keeping.world.leads:
        recorded = {c.name for c in keeping.ledger.checkpoints}
        root = keeping.folder / "checkpoints"
        for folder in sorted(root.iterdir()) if root.is_dir() else []:
            if folder.name.startswith(REFUSED) or not folder.is_dir():
                continue
            if not (folder / "manifest.json").exists():
                if folder.name not in recorded:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            row, problem = _examine(folder, keeping)
            stranger = stranger or problem
            if row is not None and folder.name not in recorded:
                rows.append(row)
    found = keeping.from_leader({"rows": rows, "stranger": stranger})
    if found["stranger"]:
        raise ResumeRefused(found["stranger"])
    for row in found["rows"]:
        keeping.record("checkpoint", **row)


def newest_good(keeping: Keeping, at_or_before: int | None = None, *, certified: bool = False) -> Found:
    """The newest checkpoint of the surviving run (at or before a batch) that is whole on disk and is the one the ledger means.

    ``certified``: only those after which the run stayed healthy, and a fork's copy of where it began. Those that retention has removed are
    passed over in silence, damaged ones aloud. Collective.
    """
    wanted = [
        c
        for c in keeping.ledger.surviving_checkpoints()
        if (at_or_before is None or c.batch_index <= at_or_before)
        and (not certified or c.name in keeping.ledger.certified or c.name.startswith(FORKED))
    ]
    present = set(keeping.from_leader([c.name for c in wanted if keeping.path(c.name).is_dir()]))
    refused: list[str] = []
    first = ""
    for checkpoint in reversed([c for c in wanted if c.name in present]):
        problems = verify(keeping.path(checkpoint.name), group=keeping.save_group) or _mistaken(checkpoint, keeping)
        if not problems:
            return Found(checkpoint, tuple(refused), first)
        refused.append(checkpoint.name)
        first = first or problems[0]
        if keeping.world.leads:
            text = f"{checkpoint.name} is refused: {problems[0]}; trying the one before it"
            keeping.notify("warning", {"text": text})
    return Found(None, tuple(refused), first)


def set_aside(keeping: Keeping, names: tuple[str, ...]) -> None:
    """Rename refused checkpoints, so that retention does not take them for what a rollback left behind."""
    if keeping.world.leads:
        for name in names:
            target = keeping.path(REFUSED + name)
            if keeping.path(name).is_dir() and not target.exists():
                keeping.path(name).rename(target)


def certify(keeping: Keeping, state: TrainState) -> None:
    """Note checkpoints after which ``certify_after`` batches went by without a skipped step, where they still are on disk."""
    healthy = keeping.config.guard.certify_after
    if state.guard.healthy_batches < healthy:
        return
    old_enough = [
        c.name
        for c in keeping.ledger.surviving_checkpoints()
        if c.name not in keeping.ledger.certified and state.batch_index - c.batch_index >= healthy
    ]
    if not old_enough:
        return
    for name in keeping.from_leader([name for name in old_enough if keeping.path(name).is_dir()]):
        keeping.record("certified", name=name)


def prune(keeping: Keeping) -> None:
    """Delete, on rank 0, what retention does not keep and what rollbacks left behind.

    Kept besides retention's own: the oldest checkpoint newer than the newest certified one. It is the next to be certified; deleting it
    whenever newer ones come would leave nothing that ever grows old enough.
    """
    if not keeping.store:
        return
    policy, ledger = keeping.config.checkpoint, keeping.ledger
    alive = [c.name for c in ledger.surviving_checkpoints() if keeping.path(c.name).is_dir()]
    doomed = to_delete(alive, keep_last=policy.keep_last, keep_every=policy.keep_every, certified=ledger.certified)
    certified = [at for at, name in enumerate(alive) if name in ledger.certified]
    candidates = alive[certified[-1] + 1 :] if certified else alive
    spared = set(candidates[:1])
    surviving = {c.name for c in ledger.surviving_checkpoints()}
    left_behind = [c.name for c in ledger.checkpoints if c.name not in surviving]
    for name in [*(name for name in doomed if name not in spared), *left_behind]:
        if keeping.path(name).is_dir():
            remove_checkpoint(keeping.path(name))


def _examine(folder: Path, keeping: Keeping) -> tuple[dict[str, Any] | None, str]:
    """(ledger row that the checkpoint should have, if it belongs to the surviving run; a sentence if it belongs to another history)."""
    ledger = keeping.ledger
    try:
        record = read_record(folder)
        row, prefix = dict(record["checkpoint"]), record["ledger"]
        if ledger.lineage and folder.name == FORKED + row["name"]:
            return row | {"name": folder.name, "attempt": 1}, ""
        known = prefix["rows"] <= len(ledger.rows) and ledger.prefix_hash(prefix["rows"]) == prefix["hash"]
        if not known:
            return None, (
                f"{folder} was written when {keeping.folder}/ledger.jsonl had {prefix['rows']} rows of another history; it has "
                f"{len(ledger.rows)} now: the ledger was lost or exchanged, and with it what was excluded. Restore it, or start over "
                "with --fresh"
            )
        belongs = (
            row["name"] == folder.name
            and 1 <= row["attempt"] <= ledger.attempt
            and row["batch_index"] <= ledger.end_of(row["attempt"])
        )
    except (CheckpointError, OSError, KeyError, ValueError, TypeError):
        return None, ""  # damage: whoever wants to load it will say so
    return (row if belongs else None), ""


def _mistaken(checkpoint: Checkpoint, keeping: Keeping) -> list[str]:
    """What is wrong with a whole checkpoint that is not the one the ledger means; copies in forks keep their parent's record."""
    if checkpoint.name.startswith(FORKED):
        return []
    recorded = read_record(keeping.path(checkpoint.name)).get("checkpoint", {})
    meant = {key: getattr(checkpoint, key) for key in ("name", "step", "batch_index", "attempt", "digest")}
    if {key: recorded.get(key) for key in meant} == meant:
        return []
    return [f"{keeping.path(checkpoint.name)}: records {recorded}, the ledger means {meant}"]
