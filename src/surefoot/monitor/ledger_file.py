"""The ledger on disk: one JSON object a line, on the disk for good before what it says is carried out."""

import json
import os
import time
from pathlib import Path
from typing import Any

from surefoot.guard.ledger import Ledger
from surefoot.guard.ledger_row import LedgerError
from surefoot.monitor.durable import StoreError, explained, explaining, sync_folder, write_all


def parse_ledger(path: Path, data: bytes) -> tuple[Ledger, bytes]:
    """The ledger in these bytes, and the torn tail after its last whole line.

    A line without its end was being written when the machine or the job died: nothing it says was carried out yet.
    Any other damage is a StoreError with file and line.
    """
    whole, torn = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise StoreError(
                f"{path}, line {number}: not a ledger row: {line[:80]!r}; only a last line cut short is repaired; "
                f"restore the file from a copy, or fork from a checkpoint"
            )
        rows.append(row)
    try:
        return Ledger(rows), torn
    except LedgerError as error:
        raise StoreError(f"{path}, line {error.n + 1}: {error}") from error


def read_ledger(path: Path) -> Ledger:
    """The ledger of a run that others may be writing; a torn last line is left out. Absent: an empty ledger."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Ledger()
    except OSError as error:
        raise StoreError(f"{path}: cannot read the ledger: {error.strerror}") from error
    return parse_ledger(path, data)[0]


class LedgerFile:
    """The one writer of ``ledger.jsonl``. ``torn`` says what was cut off at open, or nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = ""
        with explaining(path, "open the ledger"):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                data = path.read_bytes()
                self.ledger, torn = parse_ledger(path, data)
                self._size = len(data) - len(torn)
                if torn:
                    self.torn = (
                        f"{path}: the last line was cut short while being written ({len(torn)} bytes); "
                        f"it was removed, and nothing it announced had been done"
                    )
                    os.ftruncate(self._descriptor, self._size)
                os.fsync(self._descriptor)
                sync_folder(path.parent)
            except OSError:
                os.close(self._descriptor)
                raise

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write a row and wait until it is on the disk; only then do what it says. StoreError leaves no half line."""
        row = self.ledger.next_row(kind, fields, time.time())
        longer = self.ledger.append(row)
        line = (json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n").encode()
        try:
            write_all(self._descriptor, line)
            os.fsync(self._descriptor)
        except OSError as error:
            # A half line would damage the middle of the file with the next append.
            os.ftruncate(self._descriptor, self._size)
            raise explained(self.path, "append to the ledger", error) from error
        self._size += len(line)
        self.ledger = longer
        return row

    def close(self) -> None:
        """Nothing is pending: every append waited for the disk."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
