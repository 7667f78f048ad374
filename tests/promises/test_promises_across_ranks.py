"""Promises 4 and 7 under layouts: what is excluded has no influence, and one NaN on any rank costs one batch."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from surefoot.config.data import Exclusion
from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import Script, rehearse_on_rank

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "fsdp 2": (2, {"parallel.data_parallel": "fsdp"}),
    "hsdp 2 x 2": (4, {"parallel.data_parallel": "fsdp", "parallel.shard_size": 2}),
    "tp 2": (2, {"parallel.tp": 2, "model.vocab_size": 258}),
    "cp 2": (2, {"parallel.cp": 2}),
    "pp 2 x fsdp 2": (4, {"parallel.pp": 2, "parallel.data_parallel": "fsdp", "parallel.micro_batch_size": 1}),
}


@pytest.fixture(params=LAYOUTS)
def layout(config: RunConfig, vary: Callable[..., RunConfig], request: pytest.FixtureRequest) -> tuple[int, RunConfig]:
    """So many ranks, and a short run under a layout of them."""
    world, settings = LAYOUTS[request.param]
    return world, vary(
        config, steps=7, **settings, **{"eval.every": 0, "checkpoint.every": 4, "guard.snapshot_every": 3}
    )


def test_a_rollback_across_ranks_is_the_run_that_never_had_the_documents(
    layout: tuple[int, RunConfig], loader: Loader, tmp_path: Path
) -> None:
    world, config = layout
    source, _, row = loader.sample_ids(5)[0].tolist()
    document = next(span.document for span in loader.row_documents(source, row))
    script = Script(rollback_after=5, rollback_to=4, exclude=(document,))
    rolled = run_ranks(world, rehearse_on_rank, config, tmp_path / "rolled", script)
    excluded = (Exclusion(document=document, from_batch=4),)
    clean = dataclasses.replace(config, data=dataclasses.replace(config.data, exclude=excluded))
    never = run_ranks(world, rehearse_on_rank, clean, tmp_path / "clean")
    assert Run(tmp_path / "rolled").attempts[-1].from_batch == 3
    assert any(row.get("excluded") for row in Run(tmp_path / "rolled").rows)
    assert [end.digests for end in rolled] == [end.digests for end in never]
    assert len({end.ledger for end in rolled}) == 1
    found = compare(Run(tmp_path / "rolled"), Run(tmp_path / "clean"))
    assert found.same, found.first_difference


@pytest.mark.parametrize("kind", ["nan_batches", "nan_activation_batches"])
def test_one_nan_on_one_rank_that_is_not_the_first_costs_exactly_one_batch(
    layout: tuple[int, RunConfig], tmp_path: Path, kind: str
) -> None:
    world, config = layout
    config = dataclasses.replace(config, steps=4)
    # activations are spoiled at the embedding, which the first stage has
    of_stage = world // config.parallel.pp if kind == "nan_activation_batches" else world
    script = Script(**{kind: (2,)}, nan_ranks=(of_stage - 1,))  # type: ignore[arg-type]
    ends = run_ranks(world, rehearse_on_rank, config, tmp_path / "run", script)
    run = Run(tmp_path / "run")
    assert [skip.batch_index for skip in run.ledger.skips()] == [2]
    assert [(end.step, end.batch_index) for end in ends] == [(4, 5)] * world
    assert len({end.ledger for end in ends}) == 1
    assert np.isfinite(np.delete(run.metrics()["train/loss"], 2)).all()
    assert all(np.isfinite(tensor).all() for tensor in ends[0].tensors.values())
