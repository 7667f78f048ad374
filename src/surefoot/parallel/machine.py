"""What the machine around the devices has: cores, memory, a compiler, and how fast a folder takes what must not be lost."""

import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GIB = 1024**3
_FSYNC_BYTES = 4096
_CHUNK = bytes(range(256)) * 4096  # 1 MiB; not zeros, which some file systems do not write


@dataclass(frozen=True)
class Machine:
    """Processor and memory as this process may use them."""

    cpu: str
    cores: int
    memory_gib: float
    free_memory_gib: float
    compiler: str | None
    """Path of a C++ compiler, which torch.compile needs on CPU."""


@dataclass(frozen=True)
class Disk:
    """A folder's storage."""

    folder: str
    free_gib: float
    fsync_ms: float
    """Median time of appending one 4 KiB block and making it durable: what a ledger row costs."""
    write_mib_per_s: float
    """Rate of a durable 64 MiB write: what a checkpoint gets at most."""


def machine() -> Machine:
    """Looks at this machine."""
    total, free = _memory()
    names = ("c++", "g++", "clang++")
    return Machine(
        cpu=cpu_name(),
        cores=num_cores(),
        memory_gib=total / GIB,
        free_memory_gib=free / GIB,
        compiler=next((path for name in names if (path := shutil.which(name))), None),
    )


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor as its maker calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measure_disk(folder: Path, *, write_mib: int = 64, appends: int = 20) -> Disk:
    """Writes and removes a temporary file in ``folder``, which is made if missing. Raises OSError where nothing can be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        times = []
        for _ in range(appends):
            start = time.perf_counter()
            file.write(_CHUNK[:_FSYNC_BYTES])
            _make_durable(file)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(write_mib):
            file.write(_CHUNK)
        _make_durable(file)
        seconds = time.perf_counter() - start
    return Disk(
        folder=str(folder.resolve()),
        free_gib=shutil.disk_usage(folder).free / GIB,
        fsync_ms=sorted(times)[len(times) // 2] * 1e3,
        write_mib_per_s=write_mib / seconds,
    )


def _make_durable(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _memory() -> tuple[int, int]:
    """Bytes of memory in all and free for this process, the limit of its control group included."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit.isdecimal():
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            total, free = min(total, int(limit)), min(free, int(limit) - used)
    except OSError:
        pass  # not Linux, or no control groups: what sysconf says stands
    return total, free
