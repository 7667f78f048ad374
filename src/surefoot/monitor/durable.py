"""Files that are whole or not there, and errors that say which file, which rule and the way out."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WAYS_OUT = {
    errno.ENOSPC: "the disk is full; free some space, or choose another folder with --run",
    errno.EDQUOT: "your disk quota is used up; free some space, or choose another folder with --run",
    errno.EROFS: "the file system is mounted read-only; choose another folder with --run",
    errno.EACCES: "you may not write there; change its permissions, or choose another folder with --run",
    errno.EPERM: "you may not write there; change its permissions, or choose another folder with --run",
    errno.ENOTDIR: "a part of that path is a file; choose another folder with --run",
}


class StoreError(OSError):
    """The run folder cannot be used as asked; the text has the path, the rule and the way out."""


def explained(path: Path, action: str, error: OSError) -> StoreError:
    """The error as a sentence for the person who started the run."""
    way_out = _WAYS_OUT.get(
        error.errno or 0, f"{error.strerror or error}; check the disk, or choose another folder with --run"
    )
    return StoreError(f"{path}: cannot {action}: {way_out}")


@contextmanager
def explaining(path: Path, action: str) -> Iterator[None]:
    """Turn an operating-system error inside into a StoreError about this path."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise explained(path, action, error) from error


def sync_folder(folder: Path) -> None:
    """Make created and renamed names in this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; an operating system may take only some at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_atomic(path: Path, text: str, *, sync: bool = True) -> None:
    """Replace a file so that readers and crashes see the old text or the new, never a part. StoreError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explaining(path, "write this file"):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                write_all(descriptor, text.encode())
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        if sync:
            sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file that a crash may have left out or, written by others, broken: then empty."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
