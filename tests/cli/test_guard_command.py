"""``surefoot guard replay``: facts in JSON, sentences for a person, mistakes with a way out."""

import json
from pathlib import Path

import pytest

from guard_series import calm
from surefoot.cli.main import main


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """300 steps with one spike, at step 200."""
    rows = [
        f"{n},{6.5 if n == 200 else s.loss},{9.0 if n == 200 else s.gradient_norm}" for n, s in enumerate(calm(300))
    ]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["step,loss,grad_norm", *rows]) + "\n")
    return path


def test_json_holds_step_kind_and_action_of_every_finding(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guard", "replay", str(log), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == ["findings"]
    assert [(row["step"], row["kind"]) for row in facts["findings"]] == [(200, "loss_spike"), (200, "gradient_spike")]
    assert all(list(row)[:3] == ["step", "kind", "action"] for row in facts["findings"])
    assert {row["action"] for row in facts["findings"]} != {"proceed"}


def test_a_person_reads_a_table_and_a_summary(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guard", "replay", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["step", "kind", "action"]
    assert lines[1].split()[:2] == ["200", "loss_spike"]
    assert "nats above its trend" in lines[1]
    assert lines[-1].startswith("2 findings in 300 steps (1 loss_spike, 1 gradient_spike)")


def test_settings_of_the_guard_change_the_verdict(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loose = ["--set", "guard.thresholds.loss_nats=9", "--set", "guard.thresholds.gradient_ratio=1000"]
    assert main(["guard", "replay", str(log), *loose, "--set", "guard.thresholds.clip_sigmas=99"]) == 0
    assert capsys.readouterr().out == "no finding in 300 steps\n"
    assert main(["guard", "replay", str(log), "--json", "--set", "guard.policy=observe"]) == 0
    assert {row["action"] for row in json.loads(capsys.readouterr().out)["findings"]} == {"proceed"}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("guard.thresholds.los_sigmas=9", "loss_sigmas"),
        ("guard.thresholds.loss_sigmas=-1", "must be above 0"),
        ("optim.lr=1", "only settings of the guard matter here"),
        ("guard.policy", "KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_rule(
    log: Path, capsys: pytest.CaptureFixture[str], setting: str, words: str
) -> None:
    assert main(["guard", "replay", str(log), "--set", setting]) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_log_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("step,loss\n1,2\n2,x\n")
    assert main(["guard", "replay", str(bad)]) == 3
    assert (
        capsys.readouterr().err
        == f"{bad}: line 3: loss 'x' is not a number; leave the cell empty where there is none\n"
    )


def test_help_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guard", "replay", "--help"]) == 0
    assert "KEY=VALUE" in capsys.readouterr().out
