"""The words after ``surefoot train``."""

from pathlib import Path

import pytest

from surefoot.cli.train_args import parse_train_args
from surefoot.config.errors import ConfigError


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_train_args(argv)
    return list(caught.value.problems)


def test_own_flags_recipe_and_settings_are_told_apart_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 4")
    args = parse_train_args(
        [
            *("--optim.lr", "1e-3", "--fresh", "tiny", "--run", "runs/x", f"--config={file}", "--steps=700", "--json"),
            *("--allow-change", "optim.lr", "--allow-change", "data", "--dry-run"),
        ]
    )
    assert (args.recipe, args.run, args.config_files) == ("tiny", Path("runs/x"), (file,))
    assert (args.fresh, args.dry_run, args.json) == (True, True, True)
    assert args.allow_change == ("optim.lr", "data")
    assert args.flags == ("--optim.lr", "1e-3", "--steps=700")
    assert (args.config.optim.lr, args.config.steps, args.config.seed) == (1e-3, 700, 4)


def test_a_bare_recipe_is_its_own_config() -> None:
    args = parse_train_args(["tiny"])
    assert (args.run, args.fresh, args.dry_run, args.json, args.flags) == (None, False, False, False, ())
    assert args.config.recipe == "tiny"


def test_a_value_may_start_with_one_dash() -> None:
    assert problems_of("tiny", "--seed", "-1") == ["--seed: seed=-1 must be from 0 to 2**63 - 1"]


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        ([], ["command line: no recipe is named; there are: tiny"]),
        (["tyny"], ["command line: recipe = 'tyny' is not one of tiny; nearest: 'tiny'"]),
        (["tiny", "--dryrun"], ["command line: --dryrun is not a flag; nearest: --dry-run"]),
        (["tiny", "--rn", "x"], ["command line: --rn is not a flag; nearest: --run"]),
        (["tiny", "--run"], ["command line: --run needs a value: --run DIR"]),
        (["tiny", "--run", "--fresh"], ["command line: --run needs a value: --run DIR"]),
        (["tiny", "--fresh=yes"], ["command line: --fresh takes no value"]),
        (["tiny", "--step", "900"], ["--step: step is not a setting; nearest: steps (a whole number, required)"]),
        (["tiny", "--lr", "1"], ["--lr: lr is not a setting; nearest: optim.lr (a number, default 0.003)"]),
        (
            ["tiny", "--row", "1"],
            ["--row: row is not a setting; nearest: eval.rows (a whole number, default 64)"],
        ),
        (["tiny", "500"], ["command line: '500' is not a flag; settings are given as --key value"]),
        (["tiny", "-v"], ["command line: '-v' is not a flag; settings are given as --key value"]),
        (
            ["tiny", "--fesh", "--optim.lr", "x", "--steps", "0"],
            [
                "command line: --fesh is not a flag; nearest: --fresh",
                "--optim.lr: optim.lr: 'x' is not a number",
                "--steps: steps=0 must be at least 1",
            ],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_told_together(argv: list[str], problems: list[str]) -> None:
    assert problems_of(*argv) == problems
