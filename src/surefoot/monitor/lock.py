"""Two jobs never write one folder. The lock is the kernel's, so a killed job leaves none behind."""

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from surefoot.monitor.durable import StoreError, explained, explaining, read_json

PATIENCE_S = 1.0
"""How long a start waits, since someone asking for the status holds the lock for an instant."""

_HELD: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


class RunLock:
    """Exclusive use of a run folder by this process, until ``release`` or its death.

    The file ``lock`` names the holder for people; what counts is the flock on it. A process forked from the holder
    closes its copy at once, or a data worker that outlives the job would go on holding the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        with explaining(self.path, "lock the run folder"):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._acquire()
            self._sign()
        except OSError:
            os.close(self._descriptor)
            raise
        _HELD.add(self)

    def _acquire(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreError(_taken(self.path)) from None
                time.sleep(0.02)
            except OSError as error:
                raise explained(self.path, "lock the run folder", error) from error

    def _sign(self) -> None:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        with explaining(self.path, "sign the lock"):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, (json.dumps(holder) + "\n").encode(), 0)

    def release(self) -> None:
        """Let others have the folder; the file stays, empty of meaning."""
        if self in _HELD:
            _HELD.discard(self)
            os.close(self._descriptor)

    def _leave_to_parent(self) -> None:
        os.close(self._descriptor)


def _after_fork_in_child() -> None:
    for lock in list(_HELD):
        lock._leave_to_parent()
    _HELD.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _taken(path: Path) -> str:
    holder = read_json(path)
    who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
    return (
        f"{path.parent}: {who} is writing this run, and two jobs never write one folder; "
        f"wait for it, stop it, or start another run with --run"
    )


def is_locked(folder: Path) -> bool:
    """Whether a living process holds the folder; asks the kernel, not the file."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
