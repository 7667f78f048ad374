"""Promise 1: two runs of one config are the same run, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import rehearse, rehearse_on_rank


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_runs_of_one_config_are_the_same_run_bit_for_bit(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, precision: str
) -> None:
    config = vary(config, **{"parallel.precision": precision})
    here = rehearse(config, tmp_path / "a")
    elsewhere = run_ranks(1, rehearse_on_rank, config, tmp_path / "b")[0]
    assert here.digests == elsewhere.digests
    assert compare(Run(tmp_path / "a"), Run(tmp_path / "b")).same


def test_another_seed_is_another_run(config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = vary(config, steps=5)
    one = rehearse(config, tmp_path / "a")
    other = rehearse(vary(config, seed=8), tmp_path / "b")
    assert all(one.digests[name] != other.digests[name] for name in one.digests if "norm" not in name)
    assert compare(Run(tmp_path / "a"), Run(tmp_path / "b")).first_difference is not None
