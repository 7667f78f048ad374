"""Opening a run: what is decided once, and what is refused before anything is trained."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.config.errors import ConfigError
from surefoot.config.run import RunConfig
from surefoot.data.errors import DataError
from surefoot.data.loader import Loader
from surefoot.monitor.run import Run
from surefoot.parallel.mesh import EnvironmentFault, World, join_world
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train import run as opened
from surefoot.train.first_batch import prove_first_batch
from surefoot.train.opening import environment_changes
from surefoot.train.run import open_run, settle
from surefoot.train.stock import ResumeRefused

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


def test_what_auto_meant_at_the_start_it_means_ever_after(
    config: RunConfig, vary: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that a run is resumed on may be quicker in another precision, or lack a compiler."""
    asked = vary(config, **{"parallel.precision": "auto", "parallel.compile": "auto", "parallel.device": "auto"})
    monkeypatch.setattr(opened, "choose_precision", lambda device: "bf16")
    monkeypatch.setattr(opened, "compiles", lambda parallel: True)
    first = settle(asked, None, ALONE).parallel
    assert (first.precision, first.compile, first.device) == ("bf16", "on", "cpu")
    monkeypatch.setattr(opened, "choose_precision", lambda device: "fp32")
    monkeypatch.setattr(opened, "compiles", lambda parallel: False)
    assert settle(asked, settle(asked, None, ALONE), ALONE).parallel.precision == "fp32"
    before = vary(config, **{"parallel.precision": "bf16", "parallel.compile": "on"})
    again = settle(asked, before, ALONE).parallel
    assert (again.precision, again.compile, again.device) == ("bf16", "on", "cpu")


def test_what_is_asked_for_outright_is_not_settled_otherwise(config: RunConfig, vary: Callable[..., RunConfig]) -> None:
    before = vary(config, **{"parallel.precision": "bf16"})
    assert settle(config, before, ALONE) == config


def test_data_that_are_not_what_the_run_started_with_are_refused_with_both_fingerprints(
    config: RunConfig, tmp_path: Path
) -> None:
    rehearse(config, tmp_path / "run", Script(stop_after=6))
    path = tmp_path / "run" / "env.json"
    environment = json.loads(path.read_text())
    truth = environment["data_fingerprint"]
    path.write_text(json.dumps(environment | {"data_fingerprint": "0123456789abcdef"}))
    with pytest.raises(ResumeRefused, match=rf"fingerprint 0123456789abcdef, now {truth}.*surefoot fork"):
        rehearse(config, tmp_path / "run")
    assert len(Run(tmp_path / "run").attempts) == 1
    with open_run(config, tmp_path / "run", ALONE, notify=ignore, peak=0.0, allow_change=("data.cache_dir",)) as run:
        assert run.state.step == 7


def ignore(kind: str, row: Mapping[str, Any]) -> None:
    return None


def test_snapshots_over_their_budget_are_refused_before_the_first_step(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFault, match=r"guard.snapshots=2 take .* GiB, over guard.snapshot_budget_gib=1e-06"):
        rehearse(vary(config, **{"guard.snapshot_budget_gib": 1e-6}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_config_against_the_rules_is_refused_before_the_folder_is_made(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    world = join_world(config.parallel)
    with (
        pytest.raises(ConfigError, match=r"checkpoint.keep_last=0"),
        open_run(vary(config, **{"checkpoint.keep_last": 0}), tmp_path / "run", world, notify=ignore, peak=0.0),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_a_change_of_what_decides_bits_is_said_and_of_what_does_not_is_not() -> None:
    before = {"threads": 1, "cpu": "one", "commit": "a", "versions": {"torch": "2.13.0"}}
    now = {"threads": 2, "cpu": "one", "commit": "b", "versions": {"torch": "2.13.0"}, "world_size": 2}
    assert environment_changes(before, now) == ["threads was 1, is 2"]
    assert environment_changes(now, now) == []


def test_a_batch_of_sources_in_other_shares_than_their_weights_is_refused_at_step_0(
    config: RunConfig, loader: Loader
) -> None:
    """The order was drawn for other weights than the config has now."""
    swapped = tuple(
        dataclasses.replace(source, weight=other.weight)
        for source, other in zip(config.data.sources, config.data.sources[::-1], strict=True)
    )
    loader.data = dataclasses.replace(config.data, sources=swapped)
    with pytest.raises(DataError, match=r"source 'calm' has .* of the first .* rows, its weight asks for"):
        prove_first_batch(loader.batch(0), loader, (), ALONE)
    prove_first_batch(loader.batch(1), loader, (), ALONE)
