"""A run continued under another layout is the same run, and says so."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from surefoot.config.fingerprint import fingerprint
from surefoot.config.run import RunConfig
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.rehearsal import Script, rehearse, rehearse_on_rank
from tolerances import OTHER_LAYOUT


def test_a_run_continued_under_another_layout_is_the_run_that_was_not(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = vary(config, steps=8, **{"parallel.precision": "fp64"})
    rehearse(config, tmp_path / "one")
    rehearse(config, tmp_path / "other", Script(stop_after=4))
    layout = {"parallel.data_parallel": "fsdp", "parallel.micro_batch_size": 1, "parallel.recompute": "full"}
    sharded = vary(config, **layout)
    assert fingerprint(sharded) == fingerprint(config)

    first, second = run_ranks(2, rehearse_on_rank, sharded, tmp_path / "other")
    assert first.opening.startswith("continuing from")
    notices = "\n".join(first.warnings)
    for change in (
        "world_size was 1, is 2",
        "parallel.data_parallel was ddp, is fsdp",
        "parallel.micro_batch_size was 0, is 1",
        "parallel.recompute was none, is full",
    ):
        assert f"since the last start, {change}: the same bits are promised only where nothing changes" in notices
    assert "parallel.tp" not in notices

    whole, changed = (Run(tmp_path / name).joined_rows for name in ("one", "other"))
    assert [row["step"] for row in whole] == [row["step"] for row in changed]
    for key in ("train/loss", "train/gradient_norm"):
        found = [row[key] for row in changed]
        assert found == pytest.approx([row[key] for row in whole], rel=OTHER_LAYOUT)
    # what the processes really ran under is written down, and what the run continues with
    environment = json.loads((tmp_path / "other" / "env.json").read_text())
    assert environment["layout"]["parallel.data_parallel"] == "fsdp"
    assert environment["world_size"] == 2
    one = rehearse(config, tmp_path / "one")
    for name, tensor in one.tensors.items():
        assert np.linalg.norm(first.tensors[name] - tensor) <= OTHER_LAYOUT * np.linalg.norm(tensor), name
    assert second.digests == first.digests
