"""Promise 3: a skipped step leaves no trace in weights, moments, step count, detector baselines or random numbers."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.mesh import World
from surefoot.proof.faults import with_nan_gradients
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train.setup import set_up
from surefoot.train.step import train_step

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_skipped_step_leaves_no_trace(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader, gated: bool, precision: str
) -> None:
    config = vary(config, **{"optim.gated": gated, "parallel.precision": precision})
    setup, state = set_up(config, ALONE)
    setup = with_nan_gradients(setup, state, {4})
    for index in range(4):
        train_step(state, loader.batch(index), setup)
    before = digest_tensors(state.tensors())
    counts = [float(rule.step_count()) for rule in state.optimizer.rules]
    smoothed, draws = state.smoothed_loss, (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    outcome = train_step(state, loader.batch(4), setup)

    assert outcome.skipped
    assert np.isnan(outcome.signals.gradient_norm)
    assert digest_tensors(state.tensors()) == before
    assert [float(rule.step_count()) for rule in state.optimizer.rules] == counts == [4.0] * len(counts)
    assert (state.step, state.batch_index, state.smoothed_loss) == (4, 5, smoothed)
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]
    assert np.random.get_state()[1].tolist() == draws[2]


def test_after_a_skip_the_run_is_the_one_that_never_saw_the_batch(config: RunConfig, loader: Loader) -> None:
    setup, skipping = set_up(config, ALONE)
    faulty = with_nan_gradients(setup, skipping, {3})
    for index in range(8):
        train_step(skipping, loader.batch(index), faulty)
    jumping_setup, jumping = set_up(config, ALONE)
    for index in (0, 1, 2, 4, 5, 6, 7):
        jumping.batch_index = index
        train_step(jumping, loader.batch(index), jumping_setup)
    assert digest_tensors(skipping.tensors()) == digest_tensors(jumping.tensors())
    assert (skipping.step, skipping.smoothed_loss) == (jumping.step, jumping.smoothed_loss)


def test_the_first_step_may_be_skipped(config: RunConfig, loader: Loader) -> None:
    setup, state = set_up(config, ALONE)
    before = digest_tensors(state.tensors())
    outcome = train_step(state, loader.batch(0), with_nan_gradients(setup, state, {0}))
    assert outcome.skipped
    assert digest_tensors(state.tensors()) == before


def test_the_gated_and_the_synchronous_path_give_the_same_bits(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path
) -> None:
    script = Script(nan_batches=(0, 5, 6))
    gated = rehearse(vary(config, **{"optim.gated": True}), tmp_path / "a", script)
    synchronous = rehearse(vary(config, **{"optim.gated": False}), tmp_path / "b", script)
    assert gated.digests == synchronous.digests


def test_a_batch_without_targets_is_consumed_without_an_update(config: RunConfig, loader: Loader) -> None:
    setup, state = set_up(config, ALONE)
    train_step(state, loader.batch(0), setup)
    before = digest_tensors(state.tensors())
    batch = loader.batch(1)
    empty = dataclasses.replace(batch, targets_BT=np.full_like(batch.targets_BT, -100), num_targets=0)
    outcome = train_step(state, empty, setup)
    assert outcome.skipped
    assert outcome.signals.num_targets == 0
    assert (state.step, state.batch_index) == (1, 2)
    assert digest_tensors(state.tensors()) == before
