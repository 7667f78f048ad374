"""A change that should not move numerics moves none: the losses of the rehearsal run, on texts of our own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import rehearse
from tolerances import GOLDEN

CURVES = Path(__file__).with_name("rehearsal.json")


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_the_losses_are_those_on_file(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, precision: str
) -> None:
    rehearse(vary(config, **{"parallel.precision": precision}), tmp_path / "run")
    metrics = Run(tmp_path / "run").metrics()
    found = {name: metrics[name].tolist() for name in ("train/loss", "train/gradient_norm")}
    golden = json.loads(CURVES.read_text())[precision]
    for name, values in golden.items():
        assert found[name] == pytest.approx(values, rel=GOLDEN[precision]), name
