"""A change that should not move numerics moves none: the losses of the rehearsal run, on texts of our own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import rehearse

GOLDEN = Path(__file__).with_name("rehearsal.json")
TOLERANCE = {"fp64": 1e-9, "fp32": 2e-5, "bf16": 1e-2}
"""Relative. Other processors order their sums differently: fp64 noise grows to 1e-12 over 24 steps, fp32 to 2e-6, bf16 to 2e-3."""


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_the_losses_are_those_on_file(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, precision: str
) -> None:
    rehearse(vary(config, **{"parallel.precision": precision}), tmp_path / "run")
    metrics = Run(tmp_path / "run").metrics()
    found = {name: metrics[name].tolist() for name in ("train/loss", "train/gradient_norm")}
    golden = json.loads(GOLDEN.read_text())[precision]
    for name, values in golden.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE[precision]), name
