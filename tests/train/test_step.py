"""Gradients under the right denominators, whatever the accumulation; clipping; what the rows say."""

from collections.abc import Callable

import pytest
import torch

from surefoot.config.errors import ConfigError
from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.optim.schedule import lr_at
from surefoot.parallel.mesh import World
from surefoot.train.setup import check_rows, set_up
from surefoot.train.step import SMOOTHING, smoothed, split, train_step
from tolerances import CLIPPED_NORM, FP64_ORDER

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


def gradients(config: RunConfig, loader: Loader, index: int) -> dict[str, torch.Tensor]:
    setup, state = set_up(config, ALONE)
    batch = loader.batch(index)
    setup.forward_backward(split(batch, setup), batch.num_targets)
    return {name: p.grad.clone() for name, p in state.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_one_two_and_four_micro_batches_give_the_same_gradients(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader, z_loss: float
) -> None:
    import dataclasses

    config = vary(config, **{"parallel.precision": "fp64"})
    config = vary(config, **{"model.loss": dataclasses.replace(config.model.loss, z_loss=z_loss)})
    whole = gradients(config, loader, 3)
    assert whole
    for rows in (2, 1):
        parts = gradients(vary(config, **{"parallel.micro_batch_size": rows}), loader, 3)
        assert parts.keys() == whole.keys()
        for name, grad in whole.items():
            assert torch.linalg.norm(parts[name] - grad) / torch.linalg.norm(grad) < FP64_ORDER, name


def test_the_objective_is_the_mean_over_targets_of_the_global_batch(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader
) -> None:
    config = vary(config, **{"parallel.precision": "fp64"})
    setup, state = set_up(config, ALONE)
    batch = loader.batch(0)
    arrays = (batch.tokens_BT, batch.positions_BT, batch.documents_BT)
    logits = state.model(*map(torch.from_numpy, arrays))
    targets = torch.from_numpy(batch.targets_BT)
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    mean.backward()
    expected = {name: p.grad.clone() for name, p in state.parameters.items()}
    norm = torch.linalg.norm(torch.stack([torch.linalg.norm(g) for g in expected.values()]))
    outcome = train_step(state, batch, setup)
    assert outcome.metrics["train/loss"] == pytest.approx(float(mean.detach()), rel=1e-12)
    assert outcome.metrics["train/gradient_norm"] == pytest.approx(float(norm), rel=1e-6)
    clipped = max(1.0, float(norm) / config.optim.clip_norm)
    for name, moment in ((n, state.optimizer.state[p]["exp_avg"]) for n, p in state.parameters.items()):
        first = (1 - config.optim.optimizer.beta1) * expected[name] / clipped
        assert torch.linalg.norm(moment - first) / torch.linalg.norm(first) < 1e-6, name


@pytest.mark.parametrize(("precision", "tolerance"), list(CLIPPED_NORM.items()))
def test_a_gradient_far_too_large_leaves_with_the_largest_norm_allowed(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader, precision: str, tolerance: float
) -> None:
    config = vary(config, **{"parallel.precision": precision, "optim.clip_norm": 1e-3})
    setup, state = set_up(config, ALONE)
    outcome = train_step(state, loader.batch(0), setup)
    assert outcome.metrics["train/gradient_norm"] > 1
    beta = config.optim.optimizer.beta1
    moments = torch.stack([torch.linalg.norm(state.optimizer.state[p]["exp_avg"]) for p in state.parameters.values()])
    assert float(torch.linalg.norm(moments)) / (1 - beta) == pytest.approx(1e-3, rel=tolerance)


def test_rows_carry_the_rate_of_their_update_and_a_bias_corrected_mean(config: RunConfig, loader: Loader) -> None:
    setup, state = set_up(config, ALONE)
    losses = []
    for index in range(5):
        outcome = train_step(state, loader.batch(index), setup)
        losses.append(outcome.metrics["train/loss"])
        assert outcome.metrics["train/lr"] == lr_at(index, config.optim, config.steps)
    weights = [SMOOTHING ** (4 - i) for i in range(5)]
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert state.smoothed_loss == pytest.approx(mean)
    assert smoothed(0.0, 3.0, 1) == pytest.approx(3.0)


@pytest.mark.parametrize("gated", [True, False])
def test_no_step_draws_from_torchs_own_generator(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader, gated: bool
) -> None:
    setup, state = set_up(vary(config, **{"optim.gated": gated}), ALONE)
    before = torch.get_rng_state()
    train_step(state, loader.batch(0), setup)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_that_do_not_divide_over_ranks_and_micro_batches_are_refused_with_the_nearest(
    config: RunConfig, vary: Callable[..., RunConfig]
) -> None:
    with pytest.raises(ConfigError, match=r"data.batch_size=4 does not divide over 3 ranks.*nearest: 3, 6"):
        check_rows(config, 3)
    with pytest.raises(ConfigError, match=r"nearest: 6"):
        check_rows(vary(config, **{"parallel.micro_batch_size": 3}), 2)
    check_rows(config, 2)


def test_document_numbers_reach_the_model_only_where_they_mask(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader
) -> None:
    for mask in (True, False):
        setup, _ = set_up(vary(config, **{"data.document_mask": mask}), ALONE)
        assert (split(loader.batch(0), setup)[0].documents_BT is not None) == mask
