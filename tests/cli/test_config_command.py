"""``surefoot config`` and completion."""

import json
from pathlib import Path

import pytest

from surefoot.cli.completion import candidates
from surefoot.cli.main import main
from surefoot.config.codec import from_dict, from_toml, to_toml
from surefoot.config.fingerprint import fingerprint
from surefoot.config.run import RunConfig
from surefoot.recipes.tiny import tiny

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(
        to_toml(tiny()).replace("lr = 0.003", "lr = 0.001").replace("\nevery = 200\n", "\nevery = 50\n")
    )
    return folder


def test_show_prints_toml_that_is_the_config(capsys: Captured, tmp_path: Path) -> None:
    assert main(["config", "show", "tiny", "--optim.lr", "1e-3"]) == 0
    file = tmp_path / "shown.toml"
    file.write_text(capsys.readouterr().out)
    config = from_toml(RunConfig, file)
    assert config.optim.lr == 1e-3
    assert file.read_text().startswith(f"# fingerprint {fingerprint(config)}\n")


def test_show_as_json_holds_config_and_fingerprint(capsys: Captured) -> None:
    assert main(["config", "show", "tiny", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert from_dict(RunConfig, shown["config"]) == tiny()
    assert shown["fingerprint"] == fingerprint(tiny())


def test_show_takes_a_run_folder(capsys: Captured, run_folder: Path) -> None:
    assert main(["config", "show", str(run_folder)]) == 0
    assert "lr = 0.001\n" in capsys.readouterr().out


def test_diff_names_what_differs_and_whether_it_decides_the_run(capsys: Captured, run_folder: Path) -> None:
    assert main(["config", "diff", "tiny", str(run_folder)]) == 0
    assert capsys.readouterr().out == (
        "optim.lr          0.003 -> 0.001\ncheckpoint.every  200 -> 50   (does not change the run)\n"
    )
    assert main(["config", "diff", "tiny", str(run_folder / "config.toml"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["differences"] == [
        {"key": "optim.lr", "a": "0.003", "b": "0.001", "decides": True},
        {"key": "checkpoint.every", "a": "200", "b": "50", "decides": False},
    ]
    assert shown["a"] == fingerprint(tiny()) != shown["b"]


def test_diff_of_a_config_with_itself_says_so(capsys: Captured) -> None:
    assert main(["config", "diff", "tiny", "tiny"]) == 0
    assert capsys.readouterr().out == "the same config\n"


def test_what_is_no_config_is_told_with_the_nearest_recipe(capsys: Captured, tmp_path: Path) -> None:
    assert main(["config", "diff", "tyny", "tiny"]) == 2
    assert capsys.readouterr().err == (
        "tyny: is no recipe, no run folder with a config.toml, and no file; nearest recipe: tiny\n"
    )
    half = tmp_path / "half.toml"
    half.write_text("recipe = 'tiny'\nsteps = 'x'\n")
    assert main(["config", "show", str(half)]) == 2
    assert f"{half}:2: steps = 'x' is not a whole number\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["do"], ["doctor"]),
        (["train", ""], ["tiny"]),
        (["train", "tiny", "--fr"], ["--fresh"]),
        (
            ["train", "tiny", "--optim.schedule.decay"],
            ["--optim.schedule.decay_fraction", "--optim.schedule.decay_steps"],
        ),
        (
            ["train", "tiny", "--optim.schedule.kind", ""],
            ["constant", "cosine", "linear", "one_minus_sqrt", "inverse_sqrt", "power", "wsd"],
        ),
        (["train", "--parallel.precision", "f"], ["fp32", "fp16", "fp8", "fp64"]),
        (["train", "--optim.gated", ""], ["true", "false"]),
        (["train", "--config", ""], []),
        (["config", ""], ["show", "diff"]),
        (["config", "show", "t"], ["tiny"]),
    ],
)
def test_completion_offers_what_may_come_next(words: list[str], expected: list[str]) -> None:
    assert candidates(words) == expected


def test_the_completion_script_is_for_a_known_shell(capsys: Captured) -> None:
    assert main(["--completion", "bash"]) == 0
    assert "complete -o default -F _surefoot surefoot" in capsys.readouterr().out
    assert main(["--completion", "bsh"]) == 2
    assert capsys.readouterr().err == "shell = 'bsh' is not one of bash, zsh; nearest: 'bash'\n"
