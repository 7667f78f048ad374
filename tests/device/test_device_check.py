"""The script of the device check runs where there is no GPU, so that none is held while it is mended."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from surefoot.config.validate import validate
from surefoot.model.count import num_params


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "device_check.py"
    spec = importlib.util.spec_from_file_location("device_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["device_check"] = module
    spec.loader.exec_module(module)
    return module


def test_the_model_has_a_billion_parameters_and_every_cell_keeps_the_rules(script: ModuleType) -> None:
    base = script.one_billion()
    assert num_params(base.model).total == pytest.approx(1.04e9, rel=0.01)
    assert [problem for config in script.cells(base).values() for problem in validate(config, 1)] == []


def test_gaps_are_where_no_stream_runs_anything(script: ModuleType) -> None:
    ran = [(0.0, 2.0, "a"), (1.0, 5.0, "b"), (1.5, 3.0, "c"), (6.0, 7.0, "d"), (9.0, 10.0, "e")]
    share, gaps = script.idle_gaps(ran)
    assert share == pytest.approx(3 / 10)
    assert gaps == [(2.0, "d", "e"), (1.0, "b", "d")]


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_the_script_measures_compares_bits_and_names_what_it_left_out(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found" / "facts.json"
    monkeypatch.setattr("sys.argv", ["device_check.py", "--dry-run", "--out", str(out), "--cells", "flash", "rowwise"])
    assert script.main() == 0
    facts = json.loads(out.read_text())
    assert facts["same_bits"] == dict.fromkeys(facts["same_bits"], True)
    assert set(facts["cells"]) == {"bf16 flash", "fp8 rowwise"}
    for row in facts["cells"].values():
        assert row["tokens_per_s"] == pytest.approx(4 * 64 / row["step_s"])
        assert 0 < row["mfu_of_bf16"] < 1
        assert 0 <= row["idle_share"] < 1
    assert "bf16 flash" in capsys.readouterr().out

    monkeypatch.setattr("sys.argv", ["device_check.py", "--dry-run", "--out", str(out), "--budget-s", "0"])
    assert script.main() == 1
    assert "no time left" in json.loads(out.read_text())["cells"]["bf16 full"]["skipped"]
