"""Every optimiser inside runs: two ranks are one, a stop is not seen, a NaN leaves no trace, and settings by role come back by name."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.distributed.tensor import DTensor

from surefoot.config.optim import Adam, AdamW, Lion, OptimConfig, RolesConfig, RoleSettings, StableAdamW
from surefoot.config.run import CheckpointConfig, EvalConfig, RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.proof.faults import with_nan_gradients
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train.evaluate import TrainingData
from surefoot.train.probes import probe_rows, take_probe
from surefoot.train.setup import set_up
from surefoot.train.step import train_step
from tolerances import FP64_RANKS

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
Vary = Callable[..., RunConfig]
KINDS: dict[str, AdamW | Adam | StableAdamW | Lion] = {
    "adamw": AdamW(),
    "adam": Adam(weight_decay=1e-3),
    "stable_adamw": StableAdamW(),
    "lion": Lion(),
}
RATES = {"lion": 5e-4}
ROLES = RolesConfig(
    embedding=RoleSettings(lr=0.5, decay=0.1),
    hidden=RoleSettings(lr=1.5),
    norm=RoleSettings(lr=0.7, decay=0.0),
)


def moved_by(config: RunConfig, kind: str, moments: str = "fp32", **others: object) -> RunConfig:
    """The rehearsal with this optimiser and every role its own rate and decay."""
    optim = dataclasses.replace(
        config.optim, optimizer=KINDS[kind], lr=RATES.get(kind, 3e-3), roles=ROLES, moments=moments, **others
    )  # type: ignore[arg-type]
    return dataclasses.replace(
        config,
        optim=optim,
        steps=9,
        checkpoint=CheckpointConfig(every=4),
        eval=EvalConfig(every=0, rows=2, final_rows=2, batch_size=2),
    )


@pytest.mark.parametrize(
    ("kind", "moments", "precision"),
    [
        *((kind, "bf16", "fp32") for kind in KINDS),
        ("stable_adamw", "fp32", "fp32"),
        ("lion", "fp32", "bf16_pure"),
        ("adamw", "bf16", "bf16_pure"),
    ],
)
def test_a_run_stopped_and_continued_equals_an_uninterrupted_one(
    config: RunConfig, vary: Vary, tmp_path: Path, kind: str, moments: str, precision: str
) -> None:
    config = vary(moved_by(config, kind, moments), **{"parallel.precision": precision})
    nan = Script(nan_batches=(2, 7))
    whole = rehearse(config, tmp_path / "whole", nan)
    first = rehearse(config, tmp_path / "parts", Script(nan_batches=(2, 7), stop_after=5))
    last = rehearse(config, tmp_path / "parts", nan)
    assert (first.reason, first.step, last.reason) == ("stopped", 5, "done")
    assert last.digests == whole.digests
    narrow = {name for name in last.digests if name.startswith("exp_avg")}
    assert len(narrow) == len([name for name in last.digests if name.startswith("weights/")]) * (
        1 if kind == "lion" else 2
    )


def test_a_rolled_back_run_with_narrow_moments_ends_as_the_uninterrupted_one(config: RunConfig, tmp_path: Path) -> None:
    """Draws are of the batch, so what is run again is rounded as before."""
    config = moved_by(config, "stable_adamw", "bf16")
    whole = rehearse(config, tmp_path / "whole")
    back = rehearse(config, tmp_path / "back", Script(rollback_after=7, rollback_to=4))
    assert back.digests == whole.digests


def states(config: RunConfig, world: World) -> dict[str, npt.NDArray[np.float64]]:
    """Whole weights and moments after six steps under each optimiser, ``<kind>/<tensor>``."""
    loader, found = Loader(config.data, prepare(config.data), config.seed), {}
    for kind in KINDS:
        setup, state = set_up(moved_by(config, kind), world)
        for index in range(6):
            train_step(state, loader.batch(index, (), world.rank, world.size), setup)
        for name, tensor in state.tensors().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{kind}/{name}"] = whole.detach().numpy().copy()
    return found


def states_of_a_rank(rank: int, world: int, config: RunConfig) -> dict[str, npt.NDArray[np.float64]]:
    return states(config, join_world(config.parallel))


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_move_as_one_under_every_optimiser(config: RunConfig, vary: Vary, layout: str) -> None:
    config = vary(config, **{"parallel.precision": "fp64", "parallel.data_parallel": layout})
    one, two = states(config, ALONE), run_ranks(2, states_of_a_rank, config)
    for other in two:
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert np.linalg.norm(tensor - other[name]) <= FP64_RANKS * np.linalg.norm(tensor), name


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_batch_leaves_no_trace(config: RunConfig, loader: Loader, kind: str, moments: str) -> None:
    config = moved_by(config, kind, moments)
    setup, state = set_up(config, ALONE)
    setup = with_nan_gradients(setup, state, {0, 3})
    for index in range(3):
        train_step(state, loader.batch(index), setup)
    before = digest_tensors(state.tensors())
    assert train_step(state, loader.batch(3), setup).skipped
    assert digest_tensors(state.tensors()) == before
    assert float(state.optimizer.step_count()) == state.step == 2
    jumped_setup, jumped = set_up(config, ALONE)
    for index in (1, 2):
        jumped.batch_index = index
        train_step(jumped, loader.batch(index), jumped_setup)
    assert digest_tensors(jumped.tensors()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_size_follows_the_rate_of_the_role_and_the_loss_falls(
    config: RunConfig, vary: Vary, loader: Loader, kind: str
) -> None:
    """Doubling the rate of the hidden role doubles how far its weights go, and leaves the first step of the others."""
    moved = []
    for factor in (1.0, 2.0):
        roles = dataclasses.replace(ROLES, hidden=RoleSettings(lr=factor, decay=0.0))
        varied = moved_by(config, kind)
        varied = dataclasses.replace(varied, optim=dataclasses.replace(varied.optim, roles=roles))
        setup, state = set_up(varied, ALONE)
        before = {name: p.detach().clone() for name, p in state.parameters.items()}
        losses = [train_step(state, loader.batch(0), setup).signals.loss]
        moved.append({name: (p.detach() - before[name]).double() for name, p in state.parameters.items()})
        losses += [train_step(state, loader.batch(0), setup).signals.loss for _ in range(8)]
        assert losses[-1] < losses[0] - 0.05
    for name, once in moved[0].items():
        expected = 2.0 if setup.roles[name] == "hidden" else 1.0
        assert float(moved[1][name].norm() / once.norm()) == pytest.approx(expected, rel=1e-3), name


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_finds_the_update_of_every_optimiser_and_leaves_no_trace(
    config: RunConfig, vary: Vary, kind: str, precision: str
) -> None:
    """Of Lion, whose every weight moves by the rate, to the digit."""
    varied = vary(moved_by(config, kind, "bf16"), **{"parallel.precision": precision})
    setup, state = set_up(varied, ALONE)
    data = TrainingData.open(varied, prepare(varied.data))
    for index in range(3):
        lr = train_step(state, data.loader.batch(index), setup).signals.lr
    before = digest_tensors(state.tensors())
    probe = take_probe(state, setup, probe_rows(data, setup), lr, with_layers=False)
    assert digest_tensors(state.tensors()) == before
    for role in probe.roles:
        assert 0 < role.update_norm < math.inf
        assert math.isnan(role.rms_t) == (kind == "lion" or role.role == "embedding")
        size = math.sqrt(sum(p.numel() for name, p in state.parameters.items() if setup.roles[name] == role.role))
        assert role.update_norm / size / (lr * getattr(ROLES, role.role).lr) == pytest.approx(
            1, rel=0.01 if kind == "lion" else 1
        )
    assert math.isnan(probe.beta2) == (kind == "lion")


def test_optimisers_are_told_apart_by_the_config_that_is_read(config: RunConfig, loader: Loader) -> None:
    """No kind falls back to another: after three steps all weights differ pairwise."""
    ends = []
    for kind in KINDS:
        for moments in ("fp32", "bf16"):
            setup, state = set_up(moved_by(config, kind, moments), ALONE)
            for index in range(3):
                train_step(state, loader.batch(index), setup)
            ends.append(state.parameters["blocks.0.attention.query.weight"].detach())
    assert all(not torch.equal(a, b) for place, a in enumerate(ends) for b in ends[:place])
    assert OptimConfig().optimizer == AdamW()
