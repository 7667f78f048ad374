"""Promise 2: a resumed run equals an uninterrupted one, bit for bit: weights, moments, data, metrics."""

from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import Crashed, Script, rehearse

NAN = Script(nan_batches=(6, 12))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_stopped_twice_equals_an_uninterrupted_one(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, precision: str
) -> None:
    config = vary(config, **{"parallel.precision": precision})
    whole = rehearse(config, tmp_path / "whole", NAN)
    first = rehearse(config, tmp_path / "parts", Script(nan_batches=(6, 12), stop_after=8))
    second = rehearse(config, tmp_path / "parts", Script(nan_batches=(6, 12), stop_after=15))
    last = rehearse(config, tmp_path / "parts", NAN)
    assert (first.reason, second.reason, last.reason) == ("stopped", "stopped", "done")
    assert (first.step, second.step) == (8, 14)
    assert last.digests == whole.digests
    assert (last.step, last.batch_index) == (whole.step, whole.batch_index)
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "parts")).same


def test_a_crashed_run_goes_on_from_its_last_checkpoint_and_ends_the_same(config: RunConfig, tmp_path: Path) -> None:
    whole = rehearse(config, tmp_path / "whole")
    with pytest.raises(Crashed):
        rehearse(config, tmp_path / "parts", Script(die_after=13))
    last = rehearse(config, tmp_path / "parts")
    assert "step-000010" in last.opening
    assert last.digests == whole.digests
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "parts")).same


def test_a_run_that_crashed_before_its_first_checkpoint_starts_again_and_ends_the_same(
    config: RunConfig, tmp_path: Path
) -> None:
    whole = rehearse(config, tmp_path / "whole")
    with pytest.raises(Crashed):
        rehearse(config, tmp_path / "parts", Script(die_after=2))
    last = rehearse(config, tmp_path / "parts")
    assert "step 0" in last.opening
    assert last.digests == whole.digests
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "parts")).same
