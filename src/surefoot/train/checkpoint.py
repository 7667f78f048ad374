"""Saving and loading a run's state: a checkpoint is either whole or not there.

    staging = Staging()                                       # one copy of the state in host memory, reused
    group = own_group()                                       # several ranks: a process group of its own
    pending = save(folder, tensors, record, staging=staging, group=group)
    pending.done(), pending.wait()                            # CheckpointError if it failed; the run goes on either way
    record = load(folder, tensors)                            # verified, in place, any number of ranks

A save that fails or is killed leaves no manifest, and without it a folder is not a checkpoint. ``record`` is JSON: config,
ledger prefix, counters, seeds, guard state, whatever the caller needs besides tensors.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from surefoot.train import manifest as manifests
from surefoot.train.checkpoint_io import HashingWriter, VerifiedReader, explain_os_error
from surefoot.train.checkpoint_planning import PiecePlanner, TensorPlanner, misfits
from surefoot.train.manifest import METADATA, RECORD, CheckpointError, FileSeal, Manifest
from surefoot.train.staging import Piece, Staging
from surefoot.train.unpickle import read_metadata

_BACKGROUND_NICENESS = 19
"""How much nicer the writing thread is than training, where the system knows priorities of threads (Linux).

The products of a step wait for their slowest thread, so what the writer takes of one core all of them lose: at 10 it cost 0.92 steps of a
30M model, at 19 0.1 (benchmarks/checkpoint.py). A run that waits for a save sleeps, and then the writer has the machine."""


class PendingSave:
    """A save under way."""

    def __init__(self, folder: Path, work: Callable[[], Manifest]) -> None:
        self.folder = folder
        self.seconds = 0.0
        """Wall time from start to end, once done."""
        self._work = work
        self._manifest: Manifest | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_in_background, name=f"save {folder.name}")

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._manifest is not None or self._error is not None

    def wait(self) -> Manifest:
        """The manifest, once everything is on disk; raises CheckpointError if the save failed, every time."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._manifest is not None
        return self._manifest

    def _run_in_background(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                thread = threading.get_native_id()
                nice = os.getpriority(os.PRIO_PROCESS, thread) + _BACKGROUND_NICENESS
                os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))
        self._run()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            manifest = self._work()
        except BaseException as error:  # noqa: BLE001  (it belongs to whoever waits, not to this thread)
            self.seconds = time.monotonic() - start
            self._error = error
        else:
            self.seconds = time.monotonic() - start
            self._manifest = manifest


def own_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for saving in the background, where training's own would deadlock; None without ranks."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    *,
    asynchronous: bool = True,
    group: dist.ProcessGroup | None = None,
    staging: Staging | None = None,
    before_manifest: Callable[[], None] | None = None,
    compared: bool = False,
) -> PendingSave:
    """Write a checkpoint into the new folder ``folder``; all ranks call it, with the same path on a disk they share.

    A rank may hold some of the names only. Plain tensors are taken to be the same on all ranks that name them, DTensors are
    written as they are sharded, each box once; boxes that several ranks hold are compared first, and are an error where they
    differ, unless the caller has ``compared`` them. The state is copied before this returns. ``asynchronous``: the rest
    happens in a thread, over ``group`` (``own_group()``, required with several ranks); else it is over when this returns, and
    an error is raised here. ``before_manifest`` runs on the first rank when all else is on disk (to flush the rows that belong
    to the checkpoint). One ``staging`` serves one save at a time: a second one waits for the first.
    """
    if asynchronous and group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError(
            f"{folder}: an asynchronous save on several ranks needs group=own_group(), made once at set-up"
        )
    text = (json.dumps(dict(record), indent=1) + "\n").encode()
    staging = staging or Staging()
    staging.wait()
    pieces = staging.copy(tensors)
    pending = PendingSave(folder, partial(_write, folder, pieces, text, group, before_manifest, compared))
    if asynchronous:
        staging.busy_until(pending._thread)
        pending._thread.start()
    else:
        pending._run()
        pending.wait()
    return pending


def load(folder: Path, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Fill ``tensors`` in place from a checkpoint and give back its record; all ranks call it, whatever their number was.

    Every file is verified first, and nothing in the checkpoint is run. Names, shapes and dtypes must be those that were
    saved; CheckpointError lists what is not, before any tensor has changed.
    """
    if problems := verify(folder, group=group):
        raise CheckpointError("\n".join(problems))
    metadata, record = _open(folder, tensors, group)
    try:
        _load_state_dict(
            state_dict=dict(sorted(tensors.items())),
            storage_reader=VerifiedReader(folder, metadata),
            process_group=group,
            no_dist=not dist.is_initialized(),
            planner=TensorPlanner(),
        )
    except CheckpointException as error:  # a BaseException, which `except Exception` would miss
        raise CheckpointError(_cause(folder, error, 0)) from error
    return record


def verify(folder: Path, *, group: dist.ProcessGroup | None = None) -> list[str]:
    """Everything wrong with a checkpoint, the same list on every rank; with several ranks each reads a share of the files."""
    if not dist.is_initialized():
        return manifests.verify(folder)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    try:
        manifest = manifests.read_manifest(folder)
    except CheckpointError as error:
        found = [str(error)]
    else:
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].num_bytes, name))
        found = manifests.check_files(folder, manifest, by_size[rank::world])
    shares = over_ranks(found, group)
    return list(dict.fromkeys(problem for share in shares for problem in share))


def newest_valid(
    folders: Sequence[Path], *, group: dist.ProcessGroup | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The first of ``folders`` (newest first) that verifies, and those refused before it, each with the reason to say aloud."""
    return manifests.newest_valid(folders, partial(verify, group=group))


def _write(
    folder: Path,
    pieces: dict[str, Piece],
    record: bytes,
    group: dist.ProcessGroup | None,
    before_manifest: Callable[[], None] | None,
    compared: bool,
) -> Manifest:
    """The whole of a save after staging, on every rank."""
    num_bytes = sum(piece.content.nbytes for piece in pieces.values())
    writer = HashingWriter(folder, record)
    try:
        if not compared:
            _compare(folder, pieces, group)
        _save_state_dict(
            state_dict=cast(dict[str, Any], pieces),
            storage_writer=writer,
            process_group=group,
            no_dist=not dist.is_initialized(),
            planner=PiecePlanner(),
        )
        return _publish(folder, writer.seals, group, before_manifest, num_bytes)
    except BaseException as error:
        if writer.prepared:
            with contextlib.suppress(OSError):
                manifests.remove_checkpoint(folder)
        if isinstance(error, CheckpointException):
            raise CheckpointError(_cause(folder, error, num_bytes)) from error
        if isinstance(error, RuntimeError):
            raise CheckpointError(f"{folder}: the ranks lost each other during the save ({error})") from error
        raise


def _publish(
    folder: Path,
    seals: dict[str, FileSeal],
    group: dist.ProcessGroup | None,
    before_manifest: Callable[[], None] | None,
    num_bytes: int,
) -> Manifest:
    """Gather every rank's hashes and let the first rank write the manifest; all ranks learn how it went."""
    shares = over_ranks(seals, group)
    manifest = Manifest(len(shares), {name: seal for share in shares for name, seal in share.items()})
    failure = ""
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        try:
            if before_manifest is not None:
                before_manifest()
            manifests.write_manifest(folder, manifest)
        except OSError as error:
            failure = explain_os_error(folder, error, num_bytes)
        except Exception as error:  # noqa: BLE001  (the other ranks must hear of it, whatever it is)
            failure = f"{folder}: {type(error).__name__} before the manifest was written: {error}"
    if failure := over_ranks(failure, group)[0]:
        raise CheckpointError(failure)
    return manifest


def _open(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> tuple[Metadata, dict[str, Any]]:
    """Table of contents and record of a verified checkpoint that fits the state of all ranks together; raises the same error on all of them."""
    metadata, record, problems = Metadata({}), {}, list[str]()
    try:
        manifest = manifests.read_manifest(folder)
        metadata = read_metadata(folder / METADATA, manifest.files.keys() - {RECORD, METADATA})
        record = json.loads((folder / RECORD).read_bytes())
    except CheckpointError as error:
        problems = [str(error)]
    except (OSError, ValueError) as error:
        problems = [f"{folder / RECORD}: not JSON ({error})"]
    if problems := list(dict.fromkeys(text for share in over_ranks(problems, group) for text in share)):
        raise CheckpointError("\n".join(problems))
    shares = over_ranks((sorted(tensors), misfits(metadata, tensors)), group)
    held = {name for names, _ in shares for name in names}
    saved = metadata.state_dict_metadata.keys()
    found = [f"{name}: not in the checkpoint" for name in sorted(held - saved)]
    found += [f"{name}: in the checkpoint, but not in this state" for name in sorted(saved - held)]
    found += dict.fromkeys(text for _, texts in shares for text in texts)
    if found:
        listed = "\n  ".join(found[:20]) + (f"\n  and {len(found) - 20} more" if len(found) > 20 else "")
        raise CheckpointError(f"{folder}: does not fit this state:\n  {listed}")
    return metadata, record


def _compare(folder: Path, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None) -> None:
    """Raise CheckpointError, on every rank, where several hold one piece and not the same bytes: only one of them would be written."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    boxes = over_ranks({name: piece.box for name, piece in pieces.items()}, group)
    holders = Counter((name, box) for share in boxes for name, box in share.items())
    mine = {name: piece.sha256() for name, piece in pieces.items() if holders[name, piece.box] > 1}
    seen: dict[Any, tuple[str, int]] = {}
    for rank, share in enumerate(over_ranks(mine, group)):
        for name, found in share.items():
            first, holder = seen.setdefault((name, boxes[rank][name]), (found, rank))
            if first != found:
                raise CheckpointError(
                    f"{folder}: {name} is not the same on ranks {holder} and {rank}, and only one would be written: what differs between ranks "
                    "must be a DTensor, or have a name for each rank"
                )


def over_ranks(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _cause(folder: Path, error: CheckpointException, num_bytes: int) -> str:
    """The first rank's trouble in words; PyTorch wraps it in tracebacks."""
    rank, (cause, _) = min(error.failures.items())
    prefix = f"rank {rank}: " if len(error.failures) > 1 or rank > 0 else ""
    if isinstance(cause, CheckpointError):
        return prefix + str(cause)
    if isinstance(cause, OSError):
        return prefix + explain_os_error(folder, cause, num_bytes)
    return f"{prefix}{folder}: {type(cause).__name__}: {cause}"
