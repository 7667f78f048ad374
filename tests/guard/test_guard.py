"""The one rule so far: non-finite is a skipped step, and too many in a row halt the run."""

import json
import math

import pytest

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Halt, Proceed, SkipUpdate
from surefoot.guard.guard import GuardState, judge
from surefoot.guard.record import Record
from surefoot.guard.signals import StepSignals


def signals(loss: float = 2.0, gradient_norm: float = 1.0, num_targets: int = 100) -> StepSignals:
    return StepSignals(batch_index=41, step=40, loss=loss, gradient_norm=gradient_norm, num_targets=num_targets)


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf), (-math.inf, math.nan)]
)
def test_what_is_not_finite_is_a_skipped_step_with_its_numbers(loss: float, norm: float) -> None:
    verdict = judge(GuardState(healthy_batches=9), signals(loss, norm), GuardConfig(), Record())
    assert isinstance(verdict.action, SkipUpdate)
    assert "batch 41" in verdict.action.cause
    assert "not finite" in verdict.action.cause
    assert verdict.state == GuardState(consecutive_skips=1, healthy_batches=0)


def test_a_finite_step_proceeds_and_counts_as_healthy() -> None:
    verdict = judge(GuardState(consecutive_skips=3), signals(loss=1e9, gradient_norm=1e9), GuardConfig(), Record())
    assert verdict.action == Proceed()
    assert verdict.findings == ()
    assert verdict.state == GuardState(consecutive_skips=0, healthy_batches=1)


def test_the_limit_of_skips_in_a_row_halts_with_what_to_do_next() -> None:
    config, state = GuardConfig(max_consecutive_skips=3), GuardState()
    actions = []
    for _ in range(3):
        verdict = judge(state, signals(math.nan), config, Record())
        state = verdict.state
        actions.append(verdict.action)
    assert [type(action) for action in actions] == [SkipUpdate, SkipUpdate, Halt]
    assert isinstance(actions[-1], Halt)
    assert "3 skipped steps in a row" in actions[-1].reason
    assert "surefoot fork" in actions[-1].reason


def test_a_batch_without_targets_changes_nothing() -> None:
    before = GuardState(consecutive_skips=2, healthy_batches=0)
    verdict = judge(before, signals(math.nan, math.nan, num_targets=0), GuardConfig(), Record())
    assert verdict.action == Proceed()
    assert verdict.state == before


def test_the_state_survives_json() -> None:
    state = GuardState(consecutive_skips=2, healthy_batches=7)
    assert GuardState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
