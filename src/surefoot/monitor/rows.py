"""Rows of an attempt on their way to the disk: cheap for the step, patient with a full disk."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.monitor.durable import explained, explaining, sync_folder, write_all

FLUSH_BYTES = 1 << 16
"""Buffered bytes that are handed to the operating system at once."""
FLUSH_S = 1.0
"""Longest a row waits in memory, so that those who watch the file see it."""
RETRY_S = 5.0
"""Pause between tries while the disk takes nothing."""
KEEP_BYTES = 64 << 20
"""Most memory that rows may take while the disk is full; then the oldest go."""

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line of strict JSON; numbers that are not finite become the strings NaN, Infinity, -Infinity."""
    try:
        return (_encode(row) + "\n").encode()
    except ValueError:
        return (_encode({key: _finite_or_name(value) for key, value in row.items()}) + "\n").encode()


def _finite_or_name(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite_or_name(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_name(item) for item in value]
    return value


def number(value: Any) -> float:
    """A metric as it was written, back as a float."""
    return _NOT_FINITE[value] if isinstance(value, str) else float(value)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that may be growing, absent, or torn by a crash: what is not a whole row is left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and line.endswith(b"\n"):
                yield row


class RowFile:
    """An append-only file of rows that keeps the run alive when the disk is full or gone.

    ``say`` hears once that rows are held back, and once that they were written after all or were lost.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._lines: deque[bytes] = deque()
        self._pending = 0
        self._last_flush = time.monotonic()
        self._retry_at = 0.0
        self._full = False
        self.dropped = 0
        """Rows lost because the disk refused for too long."""
        with explaining(path, "open this file"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size = self._cut_torn_line()
            sync_folder(path.parent)

    def _cut_torn_line(self) -> int:
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            size = self.path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(self._descriptor, size)
        return size

    def append(self, row: Mapping[str, Any]) -> None:
        """Take a row; it reaches the operating system within FLUSH_S as long as rows keep coming."""
        line = encode_row(row)
        self._lines.append(line)
        self._pending += len(line)
        if self._pending >= FLUSH_BYTES or time.monotonic() - self._last_flush >= FLUSH_S:
            self.flush()

    def flush(self, *, sync: bool = False) -> bool:
        """Hand the rows over, with ``sync`` down to the disk. False: the disk refused and rows are still held."""
        now = time.monotonic()
        self._last_flush = now
        if self._full and now < self._retry_at and not sync:
            self._bound_memory()
            return False
        try:
            if self._lines:
                self._write(b"".join(self._lines))
            if sync:
                os.fsync(self._descriptor)
        except OSError as error:
            self._hold_back(now, error)
            return False
        if self._full:
            self._full = False
            self._say(f"{self.path}: the disk takes rows again; those held back were written{self._losses()}")
        return True

    def _write(self, data: bytes) -> None:
        try:
            write_all(self._descriptor, data)
        except OSError:
            # Some bytes may have arrived; without them the next try starts a clean line.
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        self._lines.clear()
        self._pending = 0

    def _hold_back(self, now: float, error: OSError) -> None:
        self._retry_at = now + RETRY_S
        if not self._full:
            self._full = True
            self._say(
                f"{explained(self.path, 'write rows', error)}. Training goes on; rows are kept in memory "
                f"(up to {KEEP_BYTES >> 20} MiB) and tried again every {RETRY_S:g} s"
            )
        self._bound_memory()

    def _bound_memory(self) -> None:
        while self._pending > KEEP_BYTES:
            self._pending -= len(self._lines.popleft())
            self.dropped += 1

    def _losses(self) -> str:
        return f"; the oldest {self.dropped} were lost" if self.dropped else ""

    def close(self) -> None:
        """Write what is left, to the disk; say it if rows could not be saved."""
        if self._descriptor < 0:
            return
        if not self.flush(sync=True):
            self._say(f"{self.path}: the disk still refuses; {len(self._lines) + self.dropped} rows were lost")
        os.close(self._descriptor)
        self._descriptor = -1
