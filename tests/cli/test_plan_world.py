"""``surefoot train RECIPE --dry-run --world N``: a plan in words or JSON, without data, and what is wrong in words."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from surefoot.cli.main import main

LAYOUT = ("--parallel.tp", "2", "--parallel.data_parallel", "fsdp", "--data.batch_size", "16")


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_is_a_table_that_says_what_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "tiny", "--dry-run", "--world", "8", *LAYOUT]) == 0
    text = capsys.readouterr().out
    assert "8 ranks: shard 4 x tp 2" in text
    assert [line.split()[0] for line in text.splitlines() if "counted" in line] == ["weights", "moments"]
    assert "reduce_scatter" in text
    assert list(tmp_path.iterdir()) == []
    assert not dist.is_initialized()


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", "--dry-run", "--world", "8", "--json", *LAYOUT]) == 0
    facts = json.loads(capsys.readouterr().out)
    parts = [value for name, value in facts["memory"].items() if name != "total"]
    assert facts["memory"]["total"] == sum(parts) > 0
    assert facts["axes"]["shard"] == 4
    assert {flow["axis"] for flow in facts["flows"]} == {"shard", "tp"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dry-run", "--world", "8", "--parallel.tp", "5"), "parallel.tp=5 does not divide"),
        (("--dry-run", "--world", "many"), "--world many must be a number of ranks, 1 or more"),
        (("--world", "8"), "--world 8 only plans: add --dry-run"),
    ],
)
def test_what_cannot_be_planned_is_said_with_exit_code_2(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny", *words]) == 2
    assert said in capsys.readouterr().err
