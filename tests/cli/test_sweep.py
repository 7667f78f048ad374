"""``surefoot sweep`` from the command line."""

import json
from pathlib import Path

import pytest

from surefoot.cli.main import main
from surefoot.config.codec import to_toml
from surefoot.config.run import RunConfig
from surefoot.monitor.run import list_runs


@pytest.fixture
def recipe(config: RunConfig, tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(config))
    return str(path)


SHORT = ["--steps", "6", "--eval.final_rows=4", "--guard.policy", "observe", "--guard.probe_every=0"]


def test_a_sweep_runs_says_the_best_and_goes_on(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", recipe, "--vary", "optim.lr=1e-3,1e-2", "--jobs", "2", "--out", str(tmp_path / "out"), *SHORT]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "best: --optim.lr 0.01" in out
    assert "note: one seed each" in out
    assert "[2/2] lr=0.0" in err
    facts = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert facts["best"]["values"] == {"optim.lr": 0.01}
    assert (tmp_path / "out" / "sweep.html").read_text().startswith("<!doctype html>")
    assert [run.name for run in list_runs(tmp_path / "out")] == ["lr=0.001,seed=7", "lr=0.01,seed=7"]
    longer = [word.replace("1e-3,1e-2", "1e-3,1e-2,9") for word in words]
    assert main([*longer, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [len(run.attempts) for run in list_runs(tmp_path / "out")] == [1, 1, 1]
    wild = facts["settings"][-1]["runs"][0]
    assert (wild["ending"], wild["steps"]) == ("diverged", 6)
    assert "at the start" in wild["reason"]


def test_mistakes_come_at_once_and_nothing_starts(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none"
    assert (
        main(["sweep", recipe, "--vary", "optim.lrr=1,2", "--vary", "steps=0,5", "--out", str(out), "--sed", "3"]) == 2
    )
    err = capsys.readouterr().err
    assert "optim.lrr is not a setting; nearest: optim.lr" in err
    assert "sed is not a setting; nearest: seed" in err
    assert "steps=0" in err
    assert not out.exists()
    assert main(["sweep", recipe, "--vary", "optim.lr=1,2", "--seeds", "0", "--jobs", "0"]) == 2
    assert capsys.readouterr().err == "2 mistakes:\n--seeds 0: at least 1\n--jobs 0: at least 1\n"
    assert main(["sweep", "tinny", "--vary", "optim.lr=1,2"]) == 2
    assert "nearest recipe: tiny" in capsys.readouterr().err
