"""A request to stop: the step is finished, the state saved, and the exit code says why."""

import os
import signal
from types import FrameType, TracebackType
from typing import NoReturn

INTERRUPTED = 130
PREEMPTED = 75
FINISHING = "finishing the step and saving; Ctrl-C again stops at once"


class StopRequest:
    """Listens for Ctrl-C, SIGTERM and SIGUSR1 while it is entered; a second Ctrl-C ends the process at once."""

    def __init__(self, reply: str = FINISHING) -> None:
        """``reply``: what the first Ctrl-C is told."""
        self._reply = reply
        self.signal: signal.Signals | None = None
        """The first signal that came, if any."""
        self._interrupted = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def asked(self) -> bool:
        """Whether to stop after the step under way."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 75 (requeue me) for SIGTERM and SIGUSR1."""
        return INTERRUPTED if self.signal == signal.SIGINT else PREEMPTED

    def end(self) -> NoReturn:
        """Leave as the signal says: KeyboardInterrupt, or SystemExit with its exit code."""
        raise KeyboardInterrupt if self.exit_code == INTERRUPTED else SystemExit(self.exit_code)

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted and number == signal.SIGINT:
            os.write(2, b"\nsurefoot: stopped at once; the newest checkpoint is where the same command continues\n")
            os._exit(INTERRUPTED)
        self.signal = self.signal or signal.Signals(number)
        self._interrupted = self._interrupted or number == signal.SIGINT
        if number == signal.SIGINT:
            os.write(2, f"\nsurefoot: {self._reply}\n".encode())
