"""PyTorch's distributed checkpoint, with hashes taken while it writes and nothing trusted when it reads.

Files keep PyTorch's format: ``torch.distributed.checkpoint.load`` opens them too. What differs is how they come to be:
each byte passes through sha256 on its way to disk, errors of the disk are kept apart from PyTorch's, and the table of
contents is read by ``unpickle``, the tensors by ``torch.load(weights_only=True)``.
"""

import errno
import hashlib
import io
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from surefoot.train.manifest import MANIFEST, RECORD, CheckpointError, FileSeal, remove_checkpoint, sync_folder

_WRITE_BYTES = 4 << 20
"""Bytes hashed and written at a time: large enough that both run without the interpreter's lock, small enough for the cache."""

_ZIP = b"PK\x03\x04"
_UNSUPPORTED = re.compile(r"Unsupported global: GLOBAL (\S+)")


class _HashedFile:
    """A file whose sha256 is known when its last byte is written.

    An error of the disk is kept and raised at the end: PyTorch's zip writer, in C++, would turn it into one of its own.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._hash = hashlib.sha256()
        self._written = 0
        self._error: OSError | None = None

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), _WRITE_BYTES):
            self._put(view[start : start + _WRITE_BYTES])
        return len(view)

    def _put(self, view: memoryview) -> None:
        self._written += len(view)
        try:
            if self._error is None:
                self._hash.update(view)
                while view:
                    view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            self._error = error

    def tell(self) -> int:
        return self._written

    def finish(self) -> FileSeal:
        """Put the file on disk; raises what went wrong with it since it was opened."""
        if self._error is None:
            os.fsync(self._descriptor)
            return FileSeal(sha256=self._hash.hexdigest(), num_bytes=self._written)
        raise self._error

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """PyTorch calls this before the file is synced; ``release`` closes."""

    def release(self) -> None:
        os.close(self._descriptor)


class _HashingFileSystem(FileSystem):
    """Where PyTorch's writer puts its files, and their seals by name."""

    def __init__(self) -> None:
        self.seals: dict[str, FileSeal] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise ValueError(f"mode={mode!r}: this file system only writes")
        stream = _HashedFile(Path(path))
        try:
            yield cast(io.IOBase, stream)
            self.seals[Path(path).name] = stream.finish()
        finally:
            stream.release()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.seals[Path(new_path).name] = self.seals.pop(Path(path).name)


class HashingWriter(FileSystemWriter):
    """Writes one rank's files of a checkpoint. The first rank prepares the folder and adds the record."""

    def __init__(self, folder: Path, record: bytes) -> None:
        super().__init__(folder, sync_files=False, thread_count=1)
        self._files = _HashingFileSystem()
        self.fs = self._files
        self._folder = folder
        self._record = record
        self._is_coordinator = False
        self.prepared = False
        """Whether the folder is ours to remove when the save fails."""

    @property
    def seals(self) -> dict[str, FileSeal]:
        """What this rank has written."""
        return self._files.seals

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # The other ranks write only after the first one has gathered the plans, so only it needs to look.
        if self._is_coordinator:
            if (self._folder / MANIFEST).exists():
                raise CheckpointError(
                    f"{self._folder}: a checkpoint of this name exists; checkpoints are never written over"
                )
            remove_checkpoint(self._folder)
            self._folder.mkdir(parents=True)
            self.prepared = True
            with self._files.create_stream(self._folder / RECORD, "wb") as stream:
                cast(Any, stream).write(self._record)
        return plan

    def storage_meta(self) -> StorageMeta:
        """Neither path nor random id: equal states give equal files."""
        return StorageMeta()

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        sync_folder(self._folder)


class VerifiedReader(StorageReader):
    """Reads tensors of a checkpoint whose files have been verified, by a table of contents that has been checked."""

    def __init__(self, folder: Path, metadata: Metadata, *, rounds: bool = False) -> None:
        """``rounds``: what is wanted in another dtype than it was saved in is rounded to the nearest, not refused."""
        self._folder = folder
        self._metadata = metadata
        self._rounds = rounds

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a reader serves one load."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._metadata.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: self._metadata.storage_data[item.storage_index].offset)
            with (self._folder / name).open("rb") as stream:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    chunk = self._read(stream, name, item)
                    _box(chunk.to(target.dtype) if self._rounds else chunk, item, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, stream: io.BufferedReader, name: str, item: ReadItem) -> Tensor:
        """The stored chunk, checked against the table of contents: PyTorch would cast and cut without a word."""
        place = self._metadata.storage_data[item.storage_index]
        tensor_name = item.storage_index.fqn
        where = f"{self._folder / name} at offset {place.offset}"
        stream.seek(place.offset)
        content = stream.read(place.length)
        try:
            if not content.startswith(_ZIP):
                raise ValueError("not the zip format that tensors are written in")
            chunk = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            # PyTorch's own text tells the reader how to run the file's code all the same.
            named = _UNSUPPORTED.search(str(error))
            reason = f"it names {named[1]}" if named else str(error).splitlines()[0]
            raise CheckpointError(
                f"{where}: {tensor_name} is not a plain tensor ({reason}); nothing was run"
            ) from error
        listed = cast(Any, self._metadata.state_dict_metadata[tensor_name])
        sizes = next(part.sizes for part in listed.chunks if part.offsets == item.storage_index.offset)
        if not isinstance(chunk, Tensor) or chunk.shape != sizes or chunk.dtype != listed.properties.dtype:
            found = f"{chunk.dtype} {list(chunk.shape)}" if isinstance(chunk, Tensor) else type(chunk).__name__
            raise CheckpointError(
                f"{where}: {tensor_name} is {found}, but the table of contents says {listed.properties.dtype} {list(sizes)}"
            )
        return chunk


def _box(chunk: Tensor, item: ReadItem, target: Tensor) -> None:
    """Copy the box that both the stored chunk and the target hold."""
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, offset, length)
    if chunk.shape != target.shape or chunk.dtype != target.dtype:
        raise CheckpointError(
            f"{item.storage_index.fqn}: {chunk.dtype} {list(chunk.shape)} does not fit {target.dtype} {list(target.shape)}"
        )
    target.copy_(chunk)


def explain_os_error(folder: Path, error: OSError, num_bytes: int) -> str:
    """What an error of the disk means for a save of ``num_bytes`` on this rank, and the way out."""
    path = error.filename or folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{path}: no room ({error.strerror}); this rank's part needs {num_bytes:,} bytes. Free space there, lower "
            "checkpoint.keep_last, or continue in a folder on another disk"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{path}: cannot be written ({error.strerror}). Make the folder writable, or continue in another one"
    return f"{path}: {error.strerror or error} (errno {error.errno}). Check the disk, or continue in a folder on another one"
