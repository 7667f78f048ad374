"""``surefoot doctor``: every fact is there, as JSON and as lines."""

import copy
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from surefoot.cli.doctor import describe
from surefoot.cli.main import main
from surefoot.parallel import device
from surefoot.train import strict_cost


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = tmp_path_factory.mktemp("doctor") / "runs"
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(device, "CPU_SIDES", (64, 128))
        patch.setattr(strict_cost, "_TIMED_STEPS", 2)
        patch.setattr(strict_cost, "_ROWS", 1)
        assert main(["doctor", "--json", "--runs", str(runs)]) == 0
    assert not runs.exists()
    assert err.getvalue().splitlines() == [
        "measuring: disk",
        "measuring: matrix products",
        "measuring: steps of a small model, strict and fast",
    ]
    found = json.loads(out.getvalue())
    assert isinstance(found, dict)
    return found


def test_doctor_measures_disk_products_and_the_machine(facts: dict[str, Any]) -> None:
    assert facts["versions"].keys() >= {"python", "torch", "surefoot"}
    assert facts["disk"]["fsync_ms"] > 0
    assert facts["disk"]["write_mib_per_s"] > 0
    assert 0 < facts["machine"]["free_memory_gib"] <= facts["machine"]["memory_gib"]
    assert facts["machine"]["cores"] >= 1
    assert facts["matmul_flops"].keys() == {"fp32", "bf16", "fp64"}
    assert all(rate > 1e6 for rate in facts["matmul_flops"].values())
    assert facts["precision"] in ("fp32", "bf16")
    assert facts["strict"].keys() == {"strict_step_s", "fast_step_s", "noise"}
    assert min(facts["strict"]["strict_step_s"], facts["strict"]["fast_step_s"]) > 0
    assert facts["strict"]["noise"] >= 0


def test_doctor_describes_every_fact_in_a_line(facts: dict[str, Any]) -> None:
    facts = copy.deepcopy(facts)
    facts["strict"] = {"strict_step_s": 0.11, "fast_step_s": 0.1, "noise": 0.03}
    facts["published_flops"] = {"bf16": 989e12}
    facts["machine"]["compiler"] = None
    lines = dict(line.split(None, 1) for line in describe(facts).splitlines())
    assert list(lines) == [
        *("versions", "platform", "processor", "memory", "device", "compiler", "disk", "fsync", "matmul", "by"),
        *("precision", "strict"),
    ]
    assert (
        lines["strict"]
        == "110.0 ms a step of the tiny model, 100.0 ms in fast mode: +10 % (the same steps repeat within 3 %)"
    )
    assert lines["by"] == "the data sheet: bf16 989"
    assert lines["compiler"].startswith("none: --parallel.compile needs one on CPU")
