"""Replay: what the guard would have done on a log."""

import json
import math
import subprocess
import sys
from dataclasses import replace

from guard_series import calm
from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Proceed
from surefoot.guard.guard import action_name
from surefoot.guard.replay import LoggedStep, Replay, replay, summary


def log(num_steps: int, seed: int = 0, loss: float = 2.2, first: int = 0) -> list[LoggedStep]:
    return [
        LoggedStep(step=first + n, loss=s.loss, gradient_norm=s.gradient_norm)
        for n, s in enumerate(calm(num_steps, loss=loss, seed=seed))
    ]


def test_a_healthy_log_has_no_finding() -> None:
    result = replay(log(500), GuardConfig())
    assert result == Replay(num_steps=500)
    assert summary(result) == "no finding in 500 steps"


def test_a_spike_and_a_nan_are_found_with_what_would_have_been_done() -> None:
    rows = log(300)
    rows[150] = replace(rows[150], loss=6.0, gradient_norm=9.0)
    rows[250] = replace(rows[250], loss=math.nan)
    found = replay(rows, GuardConfig()).findings
    assert [(item.step, item.finding.kind) for item in found] == [
        (150, "loss_spike"),
        (150, "gradient_spike"),
        (250, "nonfinite"),
    ]
    assert all(not isinstance(item.action, Proceed) for item in found)
    assert "2 steps" in summary(replay(rows, GuardConfig()))


def test_observing_says_the_same_and_does_nothing() -> None:
    rows = log(300)
    rows[150] = replace(rows[150], loss=6.0)
    found = replay(rows, replace(GuardConfig(), policy="observe")).findings
    assert [(item.step, action_name(item.action)) for item in found] == [(150, "proceed")]


def test_a_log_without_gradient_norms_is_judged_by_its_loss_alone() -> None:
    rows = [LoggedStep(step=row.step, loss=row.loss, gradient_known=False) for row in log(200)]
    assert replay(rows, GuardConfig()).findings == ()
    rows[150] = replace(rows[150], loss=6.0)
    (item,) = replay(rows, GuardConfig()).findings
    assert item.finding.kind == "loss_spike"
    assert action_name(item.action) in ("skip", "investigate")  # refused, as the device would have


def test_gaps_and_a_start_in_the_middle_are_no_findings() -> None:
    rows = [row for row in log(600, first=31_000) if not 31_100 <= row.step < 31_130 and row.step % 7]
    assert replay(rows, GuardConfig()).findings == ()


def test_a_level_that_stays_is_accepted_and_the_replay_goes_on() -> None:
    result = replay([*log(200), *log(200, loss=3.5, first=200, seed=1)], GuardConfig())
    steps = [item.step for item in result.findings if item.finding.kind == "loss_spike"]
    assert steps[0] == 200
    assert steps[-1] < 215
    assert result.halted == ""
    assert result.num_steps == 400


def test_a_log_that_never_recovers_stops_the_run_in_words() -> None:
    broken = [LoggedStep(step=100 + n, loss=math.nan) for n in range(300)]
    result = replay([*log(100), *broken], GuardConfig())
    assert result.halted
    assert result.num_steps < 400
    assert action_name(result.findings[-1].then or result.findings[-1].action) == "halt"
    assert summary(result).endswith("stopped the run at the last")


def test_a_finding_is_strict_json() -> None:
    rows = log(100)
    rows[90] = replace(rows[90], loss=math.nan, gradient_norm=math.inf)
    (item,) = replay(rows, GuardConfig()).findings
    row = json.loads(json.dumps(item.to_dict(), allow_nan=False))
    assert (row["step"], row["kind"], row["value"]) == (90, "nonfinite", "NaN")
    assert row["action"] == action_name(item.action)


def test_replay_and_the_readers_of_logs_import_no_torch() -> None:
    code = "import sys, surefoot.guard.replay, surefoot.interop.logs, surefoot.cli.guard; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
