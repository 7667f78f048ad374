"""A probe's row tells of every role the rate and the decay that moved its parameters."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.config.model import MuP
from surefoot.config.optim import Adam, AdamW, RolesConfig, RoleSettings
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.monitor.run import Run
from surefoot.monitor.summary import summarise
from surefoot.parallel.mesh import World
from surefoot.proof.rehearsal import rehearse
from surefoot.train.evaluate import TrainingData
from surefoot.train.probes import probe_metrics, probe_rows, take_probe
from surefoot.train.setup import set_up
from surefoot.train.step import train_step

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
Vary = Callable[..., RunConfig]
ROLES = RolesConfig(
    embedding=RoleSettings(lr=0.25, decay=0.0), hidden=RoleSettings(decay=2.0), norm=RoleSettings(lr=3.0, decay=0.0)
)


def probed(config: RunConfig) -> tuple[dict[str, float], float]:
    """The row of a probe after one step, and the schedule's rate."""
    setup, state = set_up(config, ALONE)
    data = TrainingData.open(config, prepare(config.data))
    lr = train_step(state, data.loader.batch(0), setup).signals.lr
    return probe_metrics(take_probe(state, setup, probe_rows(data, setup), lr, with_layers=False)), lr


def test_rates_and_decays_of_a_probe_are_those_the_config_multiplies_out(config: RunConfig, vary: Vary) -> None:
    row, lr = probed(vary(config, **{"optim.roles": ROLES, "optim.optimizer": AdamW(weight_decay=0.1)}))
    assert lr > 0
    assert [row[f"inside/{role}/lr"] for role in ("embedding", "hidden", "norm")] == [0.25 * lr, lr, 3 * lr]
    assert [row[f"inside/{role}/weight_decay"] for role in ("embedding", "norm")] == [0.0, 0.0]
    assert row["inside/hidden/weight_decay"] == pytest.approx(0.2 * lr, rel=1e-12)


def test_the_rate_of_a_wider_model_is_told_with_its_multiplier(config: RunConfig, vary: Vary) -> None:
    row, lr = probed(vary(config, **{"model.parametrization": MuP(base_d_model=8)}))
    assert row["inside/hidden/lr"] == pytest.approx(lr / 4, rel=1e-12)
    assert row["inside/embedding/lr"] == lr
    assert row["inside/hidden/weight_decay"] == pytest.approx(0.1 * lr, rel=1e-12)


def test_a_penalty_inside_the_gradient_is_no_share_of_a_weight(config: RunConfig, vary: Vary) -> None:
    row, lr = probed(vary(config, **{"optim.optimizer": Adam(weight_decay=0.1)}))
    assert row["inside/hidden/lr"] == lr
    assert "inside/hidden/weight_decay" not in row
    assert row["inside/norm/weight_decay"] == 0.0


def test_the_weights_shrink_by_the_decay_that_is_told(config: RunConfig, vary: Vary) -> None:
    """Without gradients to speak of, an update is its decay."""
    optimizer = AdamW(weight_decay=0.1, eps=1e12)
    row, _ = probed(vary(config, **{"optim.optimizer": optimizer, "parallel.precision": "fp64"}))
    decay = row["inside/hidden/weight_decay"]
    assert decay > 0
    assert row["inside/hidden/update_ratio"] == pytest.approx(decay / (1 - decay), rel=1e-6)


def test_a_runs_summary_holds_the_figures_of_its_last_probe(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    guard = dataclasses.replace(config.guard, probe_every=4)
    rehearse(vary(config, steps=10, guard=guard), tmp_path / "run")
    run = Run(tmp_path / "run")
    (last,) = [row for row in run.joined_rows if row["step"] == 8 and "inside/hidden/lr" in row]
    told = {role["role"]: role for role in summarise(run).to_dict()["roles"]}
    assert list(told) == ["embedding", "norm", "hidden"]
    for role, figures in told.items():
        assert figures["step"] == 8
        for name in ("lr", "weight_decay", "update_ratio"):
            assert figures[name] == last[f"inside/{role}/{name}"]
    assert told["hidden"]["lr"] == last["train/lr"]
