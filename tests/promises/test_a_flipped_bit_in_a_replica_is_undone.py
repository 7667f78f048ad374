"""A bit that flips in one rank's copy of a weight shows in no loss: the digest finds it, names the rank, and the run is as if it never had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from surefoot.config.run import RunConfig
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.parallel.digest import ReplicasDiffer
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import Rehearsed, rehearse
from surefoot.train import loop
from surefoot.train.state import TrainState

TENSOR = "blocks.1.attention.query.weight"
NORM = "blocks.1.attention_norm.weight"
"""Whole on every tensor parallel rank."""


def flip_on(rank: int, world: int, config: RunConfig, folder: Path, victim: int, at: int) -> Rehearsed:
    """A run in which the lowest bit of a weight flips on one rank when a batch is through, once."""
    plain, fired = loop.train_step, []

    def struck(state: TrainState, *args: Any, **settings: Any) -> Any:
        outcome = plain(state, *args, **settings)
        if rank == victim and state.batch_index - 1 == at and not fired:
            fired.append(at)
            held = state.parameters[NORM if config.parallel.tp > 1 else TENSOR].detach()
            local = held.to_local() if isinstance(held, DTensor) else held
            local.reshape(-1).view(torch.int32)[5] ^= 1
        return outcome

    loop.train_step = struck
    return rehearse(config, folder)


LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ddp 2": (2, {}),
    "ddp 4": (4, {}),
    "hsdp 2 x 2": (4, {"parallel.data_parallel": "fsdp", "parallel.shard_size": 2}),
    "pp 2 x tp 2": (4, {"parallel.pp": 2, "parallel.tp": 2, "parallel.micro_batch_size": 2, "model.vocab_size": 258}),
}
SUSPECTS = {
    "ddp 2": f"weights/{TENSOR} at [0, 0] on ranks 0 and 1; suspect ranks 0, 1",
    "ddp 4": f"weights/{TENSOR} at [0, 0]: rank 3 differs from ranks 0, 1 and 2; suspect rank 3",
    "hsdp 2 x 2": f"weights/{TENSOR} at [16, 0] on ranks 1 and 3; suspect ranks 1, 3",
    "pp 2 x tp 2": f"weights/{NORM} at [0] on ranks 2 and 3; suspect ranks 2, 3",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_found_the_rank_named_and_the_run_rolled_back(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, layout: str
) -> None:
    world, settings = LAYOUTS[layout]
    config = vary(config, steps=5, **settings, **{"log.digest_every": 2, "guard.snapshot_every": 1})
    clean = run_ranks(world, flip_on, config, tmp_path / "clean", -1, 0)
    struck = run_ranks(world, flip_on, config, tmp_path / "struck", world - 1, 3)
    assert [end.digests for end in struck] == [end.digests for end in clean]
    assert len({end.ledger for end in struck}) == 1
    run = Run(tmp_path / "struck")
    (verdict,) = run.ledger.of_kind("verdict")
    assert (verdict["action"], verdict["batch_index"], verdict["to_batch"]) == ("rollback", 3, 2)
    assert verdict["exclude"] == []
    assert verdict["diagnosis"]["cause"] == "hardware"
    assert verdict["diagnosis"]["text"].endswith(SUSPECTS[layout])
    assert [(a.reason, a.checkpoint, a.from_batch) for a in run.attempts[1:]] == [("rollback", "snapshot", 2)]
    found = compare(Run(tmp_path / "clean"), run)
    assert found.same, found.first_difference


def test_a_state_that_was_copied_after_the_flip_is_not_what_the_run_goes_back_to(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The only look comes with a checkpoint, five batches later; both snapshots hold the flipped bit by then."""
    config = vary(config, steps=6, **{"guard.snapshot_every": 1})
    clean = run_ranks(2, flip_on, config, tmp_path / "clean", -1, 0)
    struck = run_ranks(2, flip_on, config, tmp_path / "struck", 1, 1)
    assert [end.digests for end in struck] == [end.digests for end in clean]
    run = Run(tmp_path / "struck")
    assert [(a.reason, a.checkpoint, a.from_batch) for a in run.attempts[1:]] == [("rollback", "", 0)]
    assert [c.batch_index for c in run.ledger.surviving_checkpoints()] == [5, 6]


def test_it_ends_the_run_where_the_guard_only_observes(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, steps=6, **{"guard.policy": "observe"})
    with pytest.raises(ReplicasDiffer, match="replicated pieces differ between ranks"):
        run_ranks(2, flip_on, config, tmp_path / "run", 1, 1)


def test_a_run_without_rollbacks_left_is_halted(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, steps=4, **{"guard.max_rollbacks": 0, "log.digest_every": 1})
    with pytest.raises(ReplicasDiffer):  # of the rehearsal itself, which takes a digest of the end
        run_ranks(2, flip_on, config, tmp_path / "run", 1, 1)
    run = Run(tmp_path / "run")
    assert [row["action"] for row in run.ledger.of_kind("verdict")] == ["halt"]
    assert "suspect ranks 0, 1; no rollback is allowed" in run.ledger.of_kind("stop")[0]["reason"]
    assert run.ledger.surviving_checkpoints() == ()
