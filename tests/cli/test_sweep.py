"""``surefoot sweep`` from the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.cli.main import main
from surefoot.cli.sweep_live import SweepWatch
from surefoot.config.codec import to_toml
from surefoot.config.run import ByHours, ByTokens, RunConfig
from surefoot.monitor.run import list_runs
from surefoot.scale.sweep_axes import Combination


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
    assert f"best: {' '.join(SHORT)} --optim.lr 0.01" in out
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


def test_other_common_settings_are_another_sweep(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for norm in ("true", "false", "true"):
        words = ["--vary", "optim.lr=1e-3", *SHORT, f"--model.attention.qk_norm={norm}", "--json"]
        assert main(["sweep", recipe, *words]) == 0
        assert json.loads(capsys.readouterr().out)["best"]["flags"].endswith(f"qk_norm={norm} --optim.lr 0.001")
    folders = list((tmp_path / "runs" / "sweeps").iterdir())
    assert len(folders) == 2
    runs = [run for folder in folders for run in list_runs(folder)]
    assert [(run.name, len(run.attempts)) for run in runs] == [("lr=0.001,seed=7", 1)] * 2


def test_the_live_table_knows_the_last_step_where_a_budget_gives_it(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    bounds = {"tokens": ByTokens(tokens=2600.0), "hours": ByHours(hours=1.0)}
    listed = [
        Combination(name=name, values={"optim.lr": 1.0}, seed=7, config=vary(config, bound=bound))
        for name, bound in bounds.items()
    ]
    lines = [str(part) for part in SweepWatch(listed, tmp_path, None).picture(["tokens", "hours"]).renderables]
    assert lines[1:] == ["  tokens  step 0/11", "  hours  step 0"]


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
