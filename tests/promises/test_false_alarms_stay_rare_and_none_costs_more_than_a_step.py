"""Promise 11: what the guard does to healthy runs; here for some hundred steps, and as published for all that were counted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from surefoot.proof.alarm_rates import read_segments
from surefoot.proof.false_alarms import KINDS, run_segment

PUBLISHED = Path(__file__).parents[2] / "docs" / "proof" / "drill" / "healthy"
STEPS = 240
CHEAP = {"skip", "exclude", "clip_harder"}
"""Actions that cost a batch at most."""


def lost(segment: Mapping[str, Any]) -> int:
    """Batches consumed beyond the steps."""
    return int(segment["batches"]) - int(segment["steps"])


def at_most(segment: Mapping[str, Any]) -> int:
    """A skipped batch is lost, one with a document left out is read twice: a step each."""
    return int(segment["actions"].get("skip", 0) + segment["actions"].get("exclude", 0))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(("kind", "seed"), [(kind, 9000 + n) for n, kind in enumerate(KINDS)])
def test_a_healthy_run_is_left_alone(kind: str, seed: int, cache: Path) -> None:
    """With a ramp and a mixture switch; stopped, resumed and re-warmed; read dozens of times."""
    segment = run_segment(kind, seed, STEPS, cache, "test")
    assert segment["ending"] == "done"
    assert set(segment["actions"]) <= CHEAP, segment["texts"]
    assert sum(count for kind, count in segment["findings"].items() if kind.endswith("alarm")) <= 1, segment["texts"]
    assert lost(segment) <= at_most(segment)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the drill's healthy runs are not published yet")
def test_in_all_healthy_runs_published_no_false_alarm_cost_more_than_a_step() -> None:
    segments = read_segments(PUBLISHED)
    assert sum(segment["steps"] for segment in segments) >= 300_000
    dear = {
        f"{segment['kind']}-{segment['seed']}": segment["actions"]
        for segment in segments
        if segment["ending"] != "done" or not set(segment["actions"]) <= CHEAP or lost(segment) > at_most(segment)
    }
    assert dear == {}, json.dumps(dear)
