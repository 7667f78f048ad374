"""What a run would take, against the run itself."""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.config.layout import Layout
from surefoot.config.run import RunConfig
from surefoot.parallel.mesh import EnvironmentFault, World
from surefoot.train.dry_run import dry_run, random_batch
from surefoot.train.first_batch import initial_loss_band
from surefoot.train.setup import set_up
from surefoot.train.snapshot import GIB

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


def test_the_figures_are_those_of_the_model_that_would_be_trained(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = dry_run(config, ALONE)
    setup, state = set_up(config, ALONE)
    weights = sum(p.numel() for p in state.parameters.values())
    assert found.num_params == weights
    assert found.embedding_params == state.parameters["embedding.weight"].numel()
    assert found.tokens_per_step == config.data.batch_size * config.data.seq_len
    assert found.total_tokens == config.steps * found.tokens_per_step
    assert found.flops_per_token == setup.flops_per_token < found.flops_per_token_full_attention
    assert found.total_flops == pytest.approx(found.flops_per_token * found.total_tokens)
    assert found.state_gib == pytest.approx(4 * 4 * weights / GIB)
    assert found.snapshot_gib == pytest.approx(config.guard.snapshots * 3 * 4 * weights / GIB)
    assert found.estimated_s == pytest.approx(found.step_s * config.steps)
    assert found.step_s > 0
    assert found.peak_memory_gib > found.state_gib
    low, high = initial_loss_band(config.model)
    assert low < found.loss < high
    assert os.listdir(tmp_path) == [], "nothing is written"


def test_a_smaller_micro_batch_keeps_less_for_its_backward(config: RunConfig, vary: Callable[..., RunConfig]) -> None:
    whole, row = dry_run(config, ALONE), dry_run(vary(config, **{"parallel.micro_batch_size": 1}), ALONE)
    assert 0 < row.activation_gib < whole.activation_gib / 2


def test_snapshots_that_would_be_refused_are_refused_now(config: RunConfig, vary: Callable[..., RunConfig]) -> None:
    with pytest.raises(EnvironmentFault, match=r"guard.snapshots=2 take"):
        dry_run(vary(config, **{"guard.snapshot_budget_gib": 1e-6}), ALONE)


def test_random_batches_are_as_the_model_takes_them_and_ranks_have_other_rows(config: RunConfig) -> None:
    setup, _ = set_up(config, ALONE)
    batch = random_batch(setup)
    rows, length = config.data.batch_size, config.data.seq_len
    assert batch.tokens_BT.shape == batch.targets_BT.shape == batch.positions_BT.shape == (rows, length)
    assert np.array_equal(batch.tokens_BT[:, 1:], batch.targets_BT[:, :-1])
    assert 0 <= batch.tokens_BT.min() <= batch.tokens_BT.max() < config.model.vocab_size
    starts = np.flatnonzero(np.diff(batch.documents_BT[0])) + 1
    assert batch.positions_BT[0, starts].tolist() == [0] * len(starts) == [0]
    assert batch.num_targets == rows * length
    second = dataclasses.replace(ALONE, rank=1, size=2, layout=Layout(data=2))
    other = random_batch(dataclasses.replace(setup, world=second))
    assert other.tokens_BT.shape == (rows // 2, length)
    assert not np.array_equal(other.tokens_BT, batch.tokens_BT[: rows // 2])
    assert math.isclose(other.num_targets * 2, batch.num_targets)
