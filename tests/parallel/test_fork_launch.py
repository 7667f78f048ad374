"""The fork launcher: results by rank, the first error with its own traceback, nothing left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from surefoot.parallel.fork_launch import RankFailed, run_ranks


def summed(rank: int, world: int, offset: float) -> tuple[int, float, int, str]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, float(total), torch.get_num_threads(), os.environ["WORLD_SIZE"]


def test_ranks_talk_to_each_other_and_results_come_back_in_order() -> None:
    assert run_ranks(3, summed, 0.5) == [(rank, 4.5, 1, "3") for rank in range(3)]


def test_the_parent_is_left_as_it_was() -> None:
    before = dict(os.environ), torch.get_num_threads()
    run_ranks(1, summed, 0.0)
    assert (dict(os.environ), torch.get_num_threads()) == before
    assert not dist.is_initialized()


def test_a_large_tensor_comes_back_whole() -> None:
    (tensor,) = run_ranks(1, lambda rank, world: torch.arange(1_000_000))
    assert torch.equal(tensor, torch.arange(1_000_000))


def stumble(rank: int, world: int, marks: Path) -> None:
    (marks / str(os.getpid())).touch()
    dist.barrier()
    if rank == 1:
        raise KeyError("the second rank")
    dist.barrier()


def running(marks: Path) -> list[str]:
    return [mark.name for mark in marks.iterdir() if Path("/proc", mark.name).exists()]


def test_an_error_is_raised_here_with_the_ranks_traceback_and_ends_its_peers(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="the second rank") as caught:
        run_ranks(2, stumble, tmp_path)
    assert isinstance(caught.value.__cause__, RankFailed)
    assert "rank 1 raised" in str(caught.value.__cause__)
    assert 'raise KeyError("the second rank")' in str(caught.value.__cause__)
    assert len(list(tmp_path.iterdir())) == 2
    assert running(tmp_path) == []


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_stubborn(rank: int, world: int) -> None:
    raise Stubborn(1, 2)


def leave(rank: int, world: int) -> None:
    raise SystemExit(3)


def test_an_error_that_cannot_travel_or_would_end_the_parent_becomes_text() -> None:
    with pytest.raises(RankFailed, match="Stubborn: 1 and 2"):
        run_ranks(1, raise_stubborn)
    with pytest.raises(RankFailed, match="SystemExit: 3"):
        run_ranks(1, leave)


def die(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_rank_that_dies_is_reported_with_its_signal() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 died without a report \(signal 9\)"):
        run_ranks(2, die)


def hang(rank: int, world: int, marks: Path) -> None:
    (marks / str(os.getpid())).touch()
    if rank == 1:
        time.sleep(600)


def test_a_rank_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 did not finish within timeout_s=3"):
        run_ranks(2, hang, tmp_path, timeout_s=3)
    assert running(tmp_path) == []


def test_a_run_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world=0: a run has at least 1 rank"):
        run_ranks(0, die)
