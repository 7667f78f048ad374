"""Ranks as forked children of one process: several ranks in about a second, for tests and proofs on CPU.

A launcher that starts fresh interpreters pays the import of torch once per rank; a fork pays it once in all. The price is
one thread per rank: libgomp hangs for ever in a forked child that asks for more after its parent used some.
"""

import ctypes
import os
import pickle
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

_READ_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


class RankFailed(RuntimeError):
    """A rank raised, died or did not finish in time; the text holds its number and its traceback."""


@dataclass
class _Child:
    """One forked rank as its parent sees it: where its report comes from, and what came so far."""

    rank: int
    pid: int
    report: int
    """File descriptor that the rank writes its pickled outcome to; end of file means it has said all."""
    received: bytearray


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run ``function(rank, world, *args)`` on ``world`` forked ranks joined by gloo, and give back their results by rank.

    Every rank has one thread, the environment a launcher would set (RANK, LOCAL_RANK, WORLD_SIZE) and an initialised
    default group. Results travel by pickle. A failure ends all ranks: the first exception is raised here, caused by a
    RankFailed that carries the rank's own traceback; a rank that died or overran ``timeout_s`` raises RankFailed itself.
    """
    if world < 1:
        raise ValueError(f"world={world}: a run has at least 1 rank")
    meeting = Path(tempfile.mkdtemp(prefix="surefoot-ranks-"))
    hold, release = os.pipe()
    children: list[_Child] = []
    try:
        for rank in range(world):
            children.append(_fork(rank, world, function, args, meeting, (hold, release), timeout_s))
        _listen(children, time.monotonic() + timeout_s, timeout_s)
        return [_outcome(child) for child in children]
    finally:
        os.close(release)
        os.close(hold)
        for child in children:
            _end(child)
        shutil.rmtree(meeting, ignore_errors=True)


def _fork(
    rank: int,
    world: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    meeting: Path,
    gate: tuple[int, int],
    timeout_s: float,
) -> _Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.close(gate[1])
        _be_rank(rank, world, function, args, meeting, gate[0], writing, timeout_s)
    os.close(writing)
    return _Child(rank, pid, reading, bytearray())


def _be_rank(
    rank: int,
    world: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    meeting: Path,
    gate: int,
    writing: int,
    timeout_s: float,
) -> NoReturn:
    """The whole life of a child. Leaves by os._exit: a live ProcessGroup aborts an orderly exit, and the parent's exit
    handlers are not ours to run."""
    code = 0
    try:
        _die_with_parent()
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        report = _pickled_result(function(rank, world, *args))
    except BaseException as error:  # noqa: BLE001  (whatever a rank raises is the parent's to raise)
        report = _pickled_error(error)
        code = 1
    try:
        with os.fdopen(writing, "wb") as stream:
            stream.write(report)
        # A rank that leaves early tears its connections, which a peer still at work may see as a failure.
        os.read(gate, 1)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    """Ask Linux to kill this rank when its parent is gone, so that a killed test leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _pickled_result(result: object) -> bytes:
    return pickle.dumps((True, result))


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        whole = pickle.dumps((False, error, text))
        pickle.loads(whole)  # some exceptions pickle but do not come back
    except Exception:  # noqa: BLE001  (an exception of any kind may fail to pickle in any way)
        return pickle.dumps((False, None, text))
    return whole


def _listen(children: list[_Child], deadline: float, timeout_s: float) -> None:
    """Collect the reports; raises at the first failure, so that the cause comes before what it causes in its peers."""
    waiting = {child.report: child for child in children}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(child.rank) for child in waiting.values())
            raise RankFailed(
                f"rank {late} of {len(children)} did not finish within timeout_s={timeout_s:g}; all were ended"
            )
        for descriptor in ready:
            child = waiting[descriptor]
            piece = os.read(descriptor, _READ_BYTES)
            if piece:
                child.received += piece
                continue
            del waiting[descriptor]
            _outcome(child)


def _outcome(child: _Child) -> Any:
    """What the rank returned; raises what it raised."""
    if not child.received:
        _, status = os.waitpid(child.pid, 0)
        child.pid = 0
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        raise RankFailed(f"rank {child.rank} died without a report ({how})")
    good, *rest = pickle.loads(bytes(child.received))
    if good:
        return rest[0]
    error, text = rest
    failure = RankFailed(f"rank {child.rank} raised:\n{text}")
    if isinstance(error, Exception):
        raise error from failure
    raise failure


def _end(child: _Child) -> None:
    """Leave no process and no descriptor: a rank that has not left by now is killed."""
    os.close(child.report)
    if child.pid == 0:
        return
    patience = time.monotonic() + (0.5 if child.received else 0.0)
    while time.monotonic() < patience:
        if os.waitpid(child.pid, os.WNOHANG)[0]:
            return
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
