"""Reading documents in parallel: each worker process writes the texts it reads to a file of its own.

Workers are plain subprocesses (``python -m surefoot.data.extract``): no fork of a process with threads, no second import of
the caller's main module. Run by hand, this module reads one JSON request on standard input.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from surefoot.config.data import PythonInstallation, TextFiles
from surefoot.data.errors import DataError
from surefoot.data.hashing import document_id
from surefoot.data.source import list_names, read_documents

_REFUSED = 3
_NAMES_PER_WORKER = 64  # fewer are read sooner than a process starts
_BATCH_BYTES = 1 << 22


@dataclass(frozen=True)
class Extracted:
    """A document's text on disk."""

    name: str
    number: int
    """Its 64-bit id."""
    part: Path
    offset: int
    num_bytes: int

    def read(self) -> str:
        """The text."""
        with self.part.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.num_bytes).decode()


def extract(
    cfg: PythonInstallation | TextFiles, folder: Path, num_workers: int, progress: Callable[[float], None]
) -> list[Extracted]:
    """Write the source's texts below ``folder`` and say where each is, in the order of their names.

    The result does not depend on ``num_workers``. DataError as ``read_documents`` raises it.
    """
    folder.mkdir(parents=True)
    names = list_names(cfg)
    workers = max(1, min(num_workers, len(names) // _NAMES_PER_WORKER))
    parts = [folder / f"part-{worker:04d}" for worker in range(workers)]
    done = 0
    one_at_a_time = Lock()

    def advance() -> None:
        nonlocal done
        with one_at_a_time:
            done += 1
            progress(done / len(names))

    def work(worker: int) -> None:

        mine = names[worker::workers]
        if workers == 1:
            _write_part(cfg, mine, parts[0], advance)
        else:
            _run_worker(cfg, mine, parts[worker], advance)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    found = [extracted for part in parts for extracted in _read_part(part)]
    order = {name: at for at, name in enumerate(names)}
    return sorted(found, key=lambda extracted: order[extracted.name])


def texts_of(documents: Sequence[Extracted]) -> Iterator[tuple[list[Extracted], list[str]]]:
    """The documents with their texts, some megabytes at a time."""
    batch: list[Extracted] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= _BATCH_BYTES:
            yield batch, [each.read() for each in batch]
            batch, size = [], 0
    if batch:
        yield batch, [each.read() for each in batch]


def _write_part(
    cfg: PythonInstallation | TextFiles, names: Sequence[str], part: Path, advance: Callable[[], None]
) -> None:
    entries: list[tuple[str, int, int]] = []
    with part.open("wb") as file:
        for name in names:
            for document in read_documents(cfg, [name]):
                data = document.text.encode()
                file.write(data)
                entries.append((document.name, document_id(data), len(data)))
            advance()
    part.with_suffix(".json").write_text(json.dumps(entries), encoding="utf-8")


def _read_part(part: Path) -> Iterator[Extracted]:
    offset = 0
    for name, number, num_bytes in json.loads(part.with_suffix(".json").read_text(encoding="utf-8")):
        yield Extracted(name, number, part, offset, num_bytes)
        offset += num_bytes


def _run_worker(
    cfg: PythonInstallation | TextFiles, names: Sequence[str], part: Path, advance: Callable[[], None]
) -> None:
    request = json.dumps({"documents": asdict(cfg), "names": names, "part": str(part)})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "surefoot.data.extract"]
    log = part.with_suffix(".log")
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        process.stdin.close()
        for _ in process.stdout:
            advance()
    if process.returncode == 0:
        return
    said = log.read_text(encoding="utf-8").strip()
    if process.returncode == _REFUSED:
        raise DataError(said)
    raise RuntimeError(f"a worker reading documents ended with code {process.returncode}: {said[-2000:]}")


def _config_of(documents: dict[str, Any]) -> PythonInstallation | TextFiles:
    return TextFiles(**documents) if documents["kind"] == "text" else PythonInstallation(**documents)


def main() -> int:
    """Serve one request; a line on standard output per name read."""
    request = json.load(sys.stdin)
    try:
        cfg = _config_of(request["documents"])
        _write_part(cfg, request["names"], Path(request["part"]), lambda: print(flush=True))
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
