"""README says only what is there: every command parses, every path exists, every make target is one."""

import re
from pathlib import Path

import pytest

from surefoot.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"surefoot ([a-z]+) ", README)) & set(COMMANDS)))
def test_every_command_named_has_a_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"surefoot {command}" in capsys.readouterr().out


def test_every_word_after_surefoot_is_a_command() -> None:
    named = re.findall(r"(?m)^surefoot ([a-z]+)", README) + re.findall(r"`surefoot ([a-z]+) ", README)
    assert named
    assert set(named) <= set(COMMANDS)


def test_every_path_named_exists() -> None:
    paths = re.findall(r"`((?:src|docs|tests|train)/[\w./-]+|docs/[\w./-]+)`", README) + re.findall(
        r"\]\((docs/[^)]+)\)", README
    )
    assert paths
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "src" / "surefoot" / path).exists(), path


def test_every_make_target_named_is_one() -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = set(re.findall(r"(?m)^make ([a-z-]+)$", README)) | set(re.findall(r"`make ([a-z-]+)`", README))
    assert {"train", "test"} <= named <= targets


def test_every_setting_shown_is_one() -> None:
    from surefoot.config.run import RunConfig
    from surefoot.config.schema import every_setting

    known = {key for key, _ in every_setting(RunConfig)}
    shown = set(re.findall(r"--([a-z]+\.[a-z_.]+)", README)) | set(re.findall(r"--set ([a-z_.]+)=", README))
    assert shown
    assert shown <= known, shown - known


def test_the_exit_codes_are_those_of_the_program() -> None:
    from surefoot.cli.exit_codes import MEANINGS

    sentence = re.search(r"Exit codes: ([^.]+)\.", README)
    assert sentence is not None
    assert set(map(int, re.findall(r"\b\d+\b", sentence[1]))) == set(MEANINGS) - {1}


def test_the_figures_of_the_drill_are_those_of_its_result_files() -> None:
    from surefoot.proof.alarm_rates import read_segments
    from surefoot.proof.drill_cells import read_cells
    from surefoot.proof.drill_score import score

    folder = ROOT / "docs" / "proof" / "drill"
    found, segments = score(read_cells(folder)), read_segments(folder / "healthy")
    cured = sum(line.cured for line in found.curable)
    actions = sum(sum(segment["actions"].values()) for segment in segments)
    for figure in (
        f"**{len(found.detected)} of {len(found.harmful)}** harmful faults",
        f"**{found.right} of {len(found.detected)}** causes",
        f"**{cured} of {len(found.curable)}** curable kinds",
        f"**{sum(segment['steps'] for segment in segments):,}** healthy steps",
        f"**{actions}** times for nothing",
    ):
        assert figure in README.replace("\n", " "), figure
