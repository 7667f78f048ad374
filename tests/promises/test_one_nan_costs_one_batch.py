"""Promise 7: one NaN costs exactly one batch. Promise 11, as far as it exists: a healthy run is left alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import Script, rehearse


@pytest.mark.parametrize("kind", ["nan_batches", "nan_activation_batches"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_nan_costs_exactly_one_batch(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, kind: str, precision: str
) -> None:
    config = vary(config, **{"parallel.precision": precision})
    end = rehearse(config, tmp_path / "run", Script(**{kind: (7,)}))  # type: ignore[arg-type]
    run = Run(tmp_path / "run")
    assert [skip.batch_index for skip in run.ledger.skips()] == [7]
    assert (end.step, end.batch_index) == (config.steps, config.steps + 1)
    losses = run.metrics()["train/loss"]
    assert np.isfinite(np.delete(losses, 7)).all()
    assert all(np.isfinite(tensor).all() for tensor in end.tensors.values())


def test_a_healthy_run_has_no_skips_no_rollbacks_and_no_warnings(config: RunConfig, tmp_path: Path) -> None:
    end = rehearse(config, tmp_path / "run")
    ledger = Run(tmp_path / "run").ledger
    assert end.warnings == ()
    assert ledger.all_skips == ()
    assert ledger.of_kind("verdict") == []
    assert [attempt.reason for attempt in ledger.attempts] == ["start"]
