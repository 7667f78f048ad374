"""A run that is stopped under one layout and goes on under another: the losses, weights and moments of the run that was never stopped."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import Rehearsed, Script, rehearse, rehearse_on_rank
from tolerances import OTHER_LAYOUT

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, {}),
    "fsdp 2": (2, {"parallel.data_parallel": "fsdp"}),
    "tp 2 x fsdp 2": (4, {"parallel.tp": 2, "parallel.data_parallel": "fsdp"}),
    "hsdp 2 x 2": (4, {"parallel.data_parallel": "fsdp", "parallel.shard_size": 2}),
    "cp 2": (2, {"parallel.cp": 2}),
    "pp 2 x tp 2": (4, {"parallel.pp": 2, "parallel.tp": 2, "parallel.micro_batch_size": 2}),
    "tp 2": (2, {"parallel.tp": 2}),
    "pp 2": (2, {"parallel.pp": 2, "parallel.micro_batch_size": 1}),
}
LEG = 2
"""Batches under each of them."""


@pytest.fixture
def even(config: RunConfig, vary: Callable[..., RunConfig]) -> RunConfig:
    """In fp64, with a vocabulary that two ranks can share out."""
    settings = {"parallel.precision": "fp64", "model.vocab_size": 258, "eval.every": 0, "checkpoint.every": 0}
    return vary(config, steps=LEG * len(LAYOUTS), **settings)


def go_on(world: int, config: RunConfig, folder: Path, script: Script) -> list[Rehearsed]:
    if world == 1:
        return [rehearse(config, folder, script)]
    return run_ranks(world, rehearse_on_rank, config, folder, script)


def test_a_run_that_changes_its_layout_again_and_again_is_the_run_on_one_process(
    even: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    straight = rehearse(even, tmp_path / "straight")
    for number, (world, settings) in enumerate(LAYOUTS.values(), start=1):
        last = number == len(LAYOUTS)
        script = Script() if last else Script(stop_after=LEG * number - 1)
        ends = go_on(world, vary(even, **settings), tmp_path / "changing", script)
        assert {end.batch_index for end in ends} == {LEG * number}
        assert number == 1 or ends[0].opening.startswith(f"continuing from step-{LEG * (number - 1):06d}")
    one, other = (Run(tmp_path / name).joined_rows for name in ("straight", "changing"))
    for key in ("train/loss", "train/gradient_norm"):
        assert [row[key] for row in other] == pytest.approx([row[key] for row in one], rel=OTHER_LAYOUT)
    held = {name: tensor for end in ends for name, tensor in end.tensors.items()}
    assert held.keys() == straight.tensors.keys()
    for name, tensor in straight.tensors.items():
        assert np.linalg.norm(held[name] - tensor) <= OTHER_LAYOUT * np.linalg.norm(tensor), name


@pytest.mark.parametrize("layout", ["tp 2 x fsdp 2", "cp 2", "pp 2"])
def test_under_the_same_layout_it_has_the_same_bits(
    even: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, layout: str
) -> None:
    world, settings = LAYOUTS[layout]
    config = vary(even, steps=4, **settings, **{"parallel.precision": "fp32"})
    straight = go_on(world, config, tmp_path / "straight", Script())
    go_on(world, config, tmp_path / "stopped", Script(stop_after=1))
    stopped = go_on(world, config, tmp_path / "stopped", Script())
    assert [end.digests for end in stopped] == [end.digests for end in straight]
    found = compare(Run(tmp_path / "straight"), Run(tmp_path / "stopped"))
    assert found.same, found.first_difference
