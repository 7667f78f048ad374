"""Signals: the first asks to stop, a second Ctrl-C does not wait."""

import os
import signal
import sys

import pytest

from surefoot.train.interrupt import StopRequest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_the_first_signal_asks_to_stop_and_decides_the_exit_code(number: signal.Signals, code: int) -> None:
    with StopRequest() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert stop.signal is number
        assert stop.exit_code == code


def test_ctrl_c_says_what_happens_now_and_how_to_stop_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == ""
        os.kill(os.getpid(), signal.SIGINT)
    assert "finishing the step and saving; Ctrl-C again stops at once" in capfd.readouterr().err


def test_a_ctrl_c_after_sigterm_is_the_first_one_and_the_run_is_still_preempted() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.signal, stop.exit_code) == (signal.SIGTERM, 75)


def test_sigterm_may_come_as_often_as_it_likes() -> None:
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.exit_code == 75


def end_of_a_process_that_gets(*signals: signal.Signals) -> tuple[int, str]:
    """Exit code and standard error of a forked process that gets these signals while it listens, and would end with 7."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 2)
        with StopRequest():
            for number in signals:
                os.kill(os.getpid(), number)
        os._exit(7)
    os.close(writing)
    with os.fdopen(reading) as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def test_a_second_ctrl_c_ends_the_process_at_once_with_130() -> None:
    code, text = end_of_a_process_that_gets(signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert "stopped at once; the newest checkpoint is where the same command continues" in text


def test_one_ctrl_c_among_other_signals_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    code, text = end_of_a_process_that_gets(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    assert code == 7
    assert "stopped at once" not in text


def test_outside_it_signals_mean_what_they_meant_before() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with StopRequest():
        assert all(signal.getsignal(n) is not handler for n, handler in zip(numbers, before, strict=True))
    assert [signal.getsignal(number) for number in numbers] == before
