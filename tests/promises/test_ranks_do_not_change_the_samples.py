"""Promise 5: changing the number of ranks does not change which samples form batch number n. Promise 6, as far as DDP and FSDP2 go."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import Rehearsed, Script, rehearse, rehearse_on_rank
from tolerances import FP64_RANKS, RANKS

SCRIPT = Script(nan_batches=(6,), nan_ranks=(0,))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_rows_of_all_ranks_are_the_batch(loader: Loader, world: int) -> None:
    for index in (0, 5, 300):
        whole = loader.batch(index)
        parts = [loader.batch(index, (), rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate([p.tokens_BT for p in parts]), whole.tokens_BT)
        assert {p.digest for p in parts} == {whole.digest}


@pytest.fixture(scope="module")
def fp64(corpus: tuple[Path, Path]) -> RunConfig:
    from surefoot.proof.rehearsal import rehearsal

    return rehearsal(*corpus, precision="fp64")


@pytest.fixture(scope="module")
def alone(fp64: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Rehearsed, Path]:
    """The one-rank run, with a NaN batch and a rollback."""
    folder = tmp_path_factory.mktemp("alone")
    return rehearse(fp64, folder / "run", SCRIPT), folder / "run"


def assert_same_to_fp64(one: Rehearsed, other: Rehearsed) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        scale = max(float(np.linalg.norm(tensor)), 1e-300)
        assert np.linalg.norm(tensor - other.tensors[name]) / scale < FP64_RANKS, name


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("micro", [0, 1])
def test_two_ranks_give_the_losses_weights_and_moments_of_one(
    fp64: RunConfig,
    alone: tuple[Rehearsed, Path],
    vary: Callable[..., RunConfig],
    tmp_path: Path,
    layout: str,
    micro: int,
) -> None:
    config = vary(fp64, **{"parallel.data_parallel": layout, "parallel.micro_batch_size": micro})
    both = run_ranks(2, rehearse_on_rank, config, tmp_path / "run", SCRIPT)
    assert both[0].digests == both[1].digests
    assert_same_to_fp64(alone[0], both[0])
    mine, theirs = Run(alone[1]), Run(tmp_path / "run")
    assert [r["sample_digest"] for r in mine.rows] == [r["sample_digest"] for r in theirs.rows]
    one, two = mine.metrics(), theirs.metrics()
    for name in one:
        # of a sharded gradient the fault spoils one rank's shard
        if name.startswith(("train/", "eval/", "guard/")) and name != "train/nonfinite":
            assert np.allclose(one[name], two[name], rtol=FP64_RANKS, atol=0, equal_nan=True), name
    assert one["train/skipped"].tolist() == two["train/skipped"].tolist()
    assert one["train/skipped"].sum() == 1


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_skip_roll_back_in_memory_and_resume_on_another_number_of_ranks(
    fp64: RunConfig, vary: Callable[..., RunConfig], late_document: str, tmp_path: Path, layout: str
) -> None:
    config = vary(fp64, **{"parallel.data_parallel": layout})
    script = {
        "nan_batches": (6,),
        "nan_ranks": (1,),
        "rollback_after": 17,
        "rollback_to": 14,
        "exclude": (late_document,),
    }
    whole = rehearse(config, tmp_path / "one", Script(**{**script, "nan_ranks": (0,)}))  # type: ignore[arg-type]
    run_ranks(2, rehearse_on_rank, config, tmp_path / "two", Script(**script, stop_after=20))  # type: ignore[arg-type]
    attempts = Run(tmp_path / "two").attempts
    assert [(a.reason, a.checkpoint) for a in attempts] == [("start", ""), ("rollback", "snapshot")]
    last = rehearse(config, tmp_path / "two", Script(**{**script, "nan_ranks": (0,)}))  # type: ignore[arg-type]
    assert last.reason == "done"
    assert_same_to_fp64(whole, last)
    back = [(s.batch_index, s.attempt) for s in Run(tmp_path / "two").ledger.skips()]
    assert back == [(6, 1)]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("to_batch", [8, 0])
def test_a_rollback_right_after_an_evaluation_restores_what_the_next_step_uses(
    fp64: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, layout: str, to_batch: int
) -> None:
    """After a forward without backward FSDP2 keeps gathered weights, which a restore of the shards does not reach."""
    config = vary(fp64, steps=14, **{"parallel.data_parallel": layout})
    script = Script(rollback_after=9, rollback_to=to_batch)
    assert config.eval.every == 10
    one = rehearse(config, tmp_path / "one", script)
    both = run_ranks(2, rehearse_on_rank, config, tmp_path / "two", script)
    assert_same_to_fp64(one, both[0])


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize(("precision", "bound"), list(RANKS.items()))
def test_two_ranks_stay_within_written_bounds_in_the_precisions_of_training(
    fp64: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, layout: str, precision: str, bound: float
) -> None:
    config = vary(fp64, steps=8, **{"parallel.data_parallel": layout, "parallel.precision": precision})
    one = rehearse(config, tmp_path / "one")
    both = run_ranks(2, rehearse_on_rank, config, tmp_path / "two")
    for name, tensor in one.tensors.items():
        if name.startswith("weights/"):
            assert np.linalg.norm(tensor - both[0].tensors[name]) / np.linalg.norm(tensor) < bound, name
    losses = [Run(tmp_path / name).metrics()["train/loss"] for name in ("one", "two")]
    assert np.allclose(*losses, rtol=bound, atol=0)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("where", ["nan_batches", "nan_activation_batches"])
def test_a_nan_on_one_rank_is_skipped_by_all(
    fp64: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, layout: str, where: str
) -> None:
    config = vary(fp64, steps=8, **{"parallel.data_parallel": layout})
    script = Script(**{where: (3,)}, nan_ranks=(1,))  # type: ignore[arg-type]
    both = run_ranks(2, rehearse_on_rank, config, tmp_path / "run", script)
    assert [(r.step, r.batch_index) for r in both] == [(8, 9), (8, 9)]
    assert both[0].digests == both[1].digests
    assert all(np.isfinite(t).all() for t in both[0].tensors.values())
