"""Work in forked children of one process, a few at once: torch is imported once, and a child that dies is an answer, not a crash."""

import contextlib
import ctypes
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first step of any training imports it; here once, instead of in every child

from surefoot.train.interrupt import StopRequest

_READ_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_TICK_S = 1.0
PATIENCE_S = 60.0
"""What children that were asked to stop have for finishing a step and saving."""


@dataclass(frozen=True)
class Work:
    """What one child does."""

    name: str
    function: Callable[[], Any]
    """Its result travels by pickle."""
    log: Path | None = None
    """Where the child's standard output and error are appended; None leaves them where the parent's go."""


@dataclass(frozen=True)
class Outcome:
    """What came back from a child."""

    name: str
    value: Any
    """What the function returned; None where there is an error."""
    error: str = ""
    """The exception as one line, or how the child died; empty where it returned."""
    exception: Exception | None = None
    """The exception itself, where it can be pickled."""


@dataclass
class _Child:
    work: Work
    pid: int
    report: int
    """File descriptor that the child writes its pickled outcome to."""
    received: bytearray = field(default_factory=bytearray)


def run_children(
    works: Sequence[Work],
    *,
    jobs: int,
    stop_asked: Callable[[], bool] = lambda: False,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    on_tick: Callable[[Sequence[str]], None] = lambda running: None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Do every work in a child of its own, in order, ``jobs`` at once; ``on_end`` hears of each as it ends.

    Once a stop is asked nothing new starts, the children get SIGTERM and ``patience_s`` to end by themselves. Children are their own
    process groups, so that Ctrl-C is the parent's to pass on; none outlives the parent.
    """
    waiting = list(works)
    running: dict[int, _Child] = {}
    deadline = 0.0
    try:
        while running or (waiting and not stop_asked()):
            while waiting and len(running) < jobs and not stop_asked():
                child = _fork(waiting.pop(0))
                running[child.report] = child
            if stop_asked():
                deadline = deadline or _ask_all(running) + patience_s
                if time.monotonic() >= deadline:
                    return
            on_tick([child.work.name for child in running.values()])
            for child in _ended(running):
                on_end(_outcome(child))
    finally:
        for child in running.values():
            _kill(child)


def call_in_child(function: Callable[[], Any], stop: StopRequest | None = None) -> Any:
    """One function's result from a child, so that the threads it starts and the devices it wakes are not the parent's. Raises what it raises.

    Once a stop is asked the child is ended, there being nothing to save, and the caller left as ``stop.end`` leaves.
    """
    outcomes: list[Outcome] = []
    works = [Work("preparation", function)]
    run_children(
        works,
        jobs=1,
        stop_asked=lambda: stop is not None and stop.asked,
        on_end=outcomes.append,
        patience_s=0.0,
    )
    if stop is not None and stop.asked:
        stop.end()
    if outcomes[0].exception is not None:
        raise outcomes[0].exception
    if outcomes[0].error:
        raise RuntimeError(outcomes[0].error)
    return outcomes[0].value


def _fork(work: Work) -> _Child:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _live(work, writing)
    os.close(writing)
    return _Child(work, pid, reading)


def _live(work: Work, writing: int) -> NoReturn:
    """The whole life of a child. Leaves by os._exit: the parent's exit handlers are not its to run."""
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)  # a handler of the parent's would only set the parent's flag
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if work.log is not None:
            _redirect(work.log)
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)  # libgomp hangs in a forked child that asks for more after its parent used some
        report = pickle.dumps((work.function(), "", None))
    except BaseException as error:  # noqa: BLE001  (whatever a child raises is its outcome)
        traceback.print_exc()
        report = _pickled_error(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(writing, "wb") as stream:
            stream.write(report)
    finally:
        os._exit(0)


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (a test's capture may hold the old ones)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _pickled_error(error: BaseException) -> bytes:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        whole = pickle.dumps((None, text, error if isinstance(error, Exception) else None))
        pickle.loads(whole)  # some exceptions pickle but do not come back
    except Exception:  # noqa: BLE001  (an exception of any kind may fail to pickle in any way)
        return pickle.dumps((None, text, None))
    return whole


def _ended(running: dict[int, _Child]) -> list[_Child]:
    """The children that said all they have to say, taken out of ``running``; waits a tick at most."""
    ended = []
    for descriptor in select.select(list(running), [], [], _TICK_S)[0]:
        piece = os.read(descriptor, _READ_BYTES)
        if piece:
            running[descriptor].received += piece
        else:
            ended.append(running.pop(descriptor))
    return ended


def _outcome(child: _Child) -> Outcome:
    os.close(child.report)
    _, status = os.waitpid(child.pid, 0)
    if child.received:
        value, error, exception = pickle.loads(bytes(child.received))
        return Outcome(child.work.name, value, error, exception)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Outcome(child.work.name, None, f"the process died by {name}{hint}")
    return Outcome(child.work.name, None, f"the process died with exit code {os.WEXITSTATUS(status)}")


def _ask_all(running: dict[int, _Child]) -> float:
    for child in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)
    return time.monotonic()


def _kill(child: _Child) -> None:
    os.close(child.report)
    for kill in (os.killpg, os.kill):  # with what it started; by itself, where it is too young to lead a group
        with contextlib.suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
