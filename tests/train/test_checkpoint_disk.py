"""Disks that fail and processes that are killed: a checkpoint is whole or not there, and the run lives on."""

import contextlib
import errno
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from surefoot.train import checkpoint_io, manifest
from surefoot.train.checkpoint import load, newest_valid, save, verify
from surefoot.train.manifest import CheckpointError, remove_checkpoint, whole

RANDOM_KILLS = 8
LONGEST_LIFE_S = 0.15
"""Of a child that does nothing but save; a save of its state takes about a tenth of this."""


def state(value: float, num: int = 200_000) -> dict[str, torch.Tensor]:
    return {f"w{part}": torch.full((num // 4,), float(value + part)) for part in range(4)}


def value_of(folder: Path, num: int = 200_000) -> float:
    found = state(-1.0, num)
    record = load(folder, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in state(record["value"], num).items())
    return float(record["value"])


def in_a_child(work: Callable[[], None]) -> int:
    """Process id of a forked child that does ``work`` and leaves."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def how_it_ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_at_any_call_of_a_save_leaves_it_whole_or_not_there_and_the_older_one_loads(tmp_path: Path) -> None:
    """Every system call that writes, syncs, renames or makes something is once the last thing the process does."""
    old, new = tmp_path / "step-000001-attempt-0001", tmp_path / "step-000002-attempt-0001"
    save(old, state(1.0), {"value": 1.0}).wait()

    def killed_at(call: int) -> None:
        left = call

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*args: object, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapper

        for name in ("write", "fsync", "open"):
            setattr(os, name, counted(getattr(os, name)))
        for name in ("mkdir", "rename", "replace", "open"):
            setattr(Path, name, counted(getattr(Path, name)))
        save(new, state(2.0), {"value": 2.0}, asynchronous=False)

    outcomes = []
    for call in range(200):
        ending = how_it_ended(in_a_child(lambda call=call: killed_at(call)))  # type: ignore[misc]
        outcomes.append(whole(new))
        assert whole(new) == (verify(new) == [])
        assert newest_valid([new, old])[0] == (new if whole(new) else old)
        assert value_of(old) == 1.0
        if whole(new):
            assert value_of(new) == 2.0
            remove_checkpoint(new)
        if ending == 0:
            break
        assert ending == -signal.SIGKILL
    assert ending == 0
    assert outcomes.index(True) > 20, "the save makes fewer calls than this test supposes"
    assert all(outcomes[outcomes.index(True) :])


def test_kills_at_random_times_leave_every_checkpoint_whole_or_not_there(tmp_path: Path) -> None:
    draw = random.Random(0)
    save(tmp_path / "step-000000-attempt-0001", state(0.0), {"value": 0.0}).wait()
    cut_short = 0

    def saves_for_ever(attempt: int) -> None:
        for step in range(1, 10_000):
            save(tmp_path / f"step-{step:06d}-attempt-{attempt:04d}", state(step), {"value": step}).wait()

    for attempt in range(1, RANDOM_KILLS + 1):
        pid = in_a_child(lambda attempt=attempt: saves_for_ever(attempt))  # type: ignore[misc]
        time.sleep(draw.uniform(0.0, LONGEST_LIFE_S))
        os.kill(pid, signal.SIGKILL)
        assert how_it_ended(pid) == -signal.SIGKILL
        for folder in sorted(tmp_path.iterdir()):
            assert whole(folder) == (verify(folder) == [])
            cut_short += not whole(folder)
        folders = sorted(tmp_path.iterdir(), reverse=True)
        newest, refused = newest_valid(folders)
        assert newest is not None
        assert all("cut short" in why for _, why in refused)
        assert value_of(newest) == int(newest.name[5:11])
        for folder in folders:
            if folder.name != "step-000000-attempt-0001":
                remove_checkpoint(folder)
    assert cut_short > 0


def test_an_error_of_the_disk_reaches_whoever_waits_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, folder = tmp_path / "step-000001-attempt-0001", tmp_path / "step-000002-attempt-0001"
    save(old, state(1.0), {"value": 1.0}).wait()
    for call, number in (("write", errno.ENOSPC), ("fsync", errno.EIO), ("open", errno.EROFS)):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_io, "os", _FailingOs(call, number))
            pending = save(folder, state(2.0), {"value": 2.0})
            for _ in range(2):
                with pytest.raises(CheckpointError, match=_EXPECTED[number]):
                    pending.wait()
            assert pending.done()
        assert not folder.exists()
        assert value_of(old) == 1.0
    save(folder, state(2.0), {"value": 2.0}).wait()
    assert value_of(folder) == 2.0


_EXPECTED = {
    errno.ENOSPC: r"no room \(No space left on device\); this rank's part needs 800,000 bytes\. Free space there, lower "
    r"checkpoint\.keep_last, or continue in a folder on another disk",
    errno.EIO: r"Input/output error \(errno 5\)\. Check the disk, or continue in a folder on another one",
    errno.EROFS: r"cannot be written \(Read-only file system\)\. Make the folder writable, or continue in another one",
}


class _FailingOs:
    """The os module, one function of which always fails."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number

    def __getattr__(self, name: str) -> object:
        return self._fail if name == self._name else getattr(os, name)

    def _fail(self, *args: object, **kwargs: object) -> None:
        raise OSError(self._number, os.strerror(self._number))


def test_a_failure_of_the_manifest_itself_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(manifest, "write_durably", fails)
    with pytest.raises(CheckpointError, match=r"manifest\.json: no room"):
        save(tmp_path / "c", state(1.0), {}, asynchronous=False)
    assert not (tmp_path / "c").exists()


def test_a_file_beyond_the_size_limit_is_an_error_and_the_process_lives(tmp_path: Path) -> None:
    """A real refusal by the kernel, without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        pending = save(tmp_path / "c", state(1.0), {})
        with pytest.raises(
            CheckpointError, match=r"c: no room \(File too large\); this rank's part needs 800,000 bytes"
        ):
            pending.wait()
        assert not (tmp_path / "c").exists()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system in memory; the test is skipped where this user may not mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "surefoot-test", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs needs root and CAP_SYS_ADMIN")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_with_the_way_out_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "size=1m"):
        save(disk / "1", state(1.0), {"value": 1.0}).wait()
        pending = save(disk / "2", state(2.0), {"value": 2.0})
        with pytest.raises(CheckpointError, match=r"2: no room \(No space left on device\)"):
            pending.wait()
        assert not (disk / "2").exists()
        assert value_of(disk / "1") == 1.0
        remove_checkpoint(disk / "1")
        save(disk / "2", state(2.0), {"value": 2.0}).wait()
        assert value_of(disk / "2") == 2.0


def test_a_read_only_disk_is_said_with_the_way_out(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "size=1m,ro"):
        with pytest.raises(
            CheckpointError, match=r"cannot be written \(Read-only file system\)\. Make the folder writable"
        ):
            save(disk / "1", state(1.0), {}).wait()
        with pytest.raises(CheckpointError, match="cannot be written"):
            save(disk / "1", state(1.0), {}, asynchronous=False)


def test_a_checkpoint_loses_its_manifest_first_when_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-000001-attempt-0001"
    save(folder, state(1.0), {"value": 1.0}).wait()

    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manifest.shutil, "rmtree", crash)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "record.json"]
    assert not whole(folder)
    remove_checkpoint(folder)
    remove_checkpoint(folder)
    assert not folder.exists()
