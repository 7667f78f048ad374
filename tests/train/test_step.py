"""Gradients under the right denominators, whatever the accumulation; limits; every signal against plain sums, whatever the layout."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Batch, Loader
from surefoot.guard.limits import Limits
from surefoot.guard.lr_change import LrChange
from surefoot.guard.signals import StepSignals
from surefoot.optim.schedule import lr_at
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.proof.faults import with_nan_gradients
from surefoot.train.setup import set_up
from surefoot.train.step import SMOOTHING, StepOutcome, smoothed, split, train_step
from tolerances import CLIPPED_NORM, FP64_ORDER, FP64_RANKS

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
    for name, moment in ((n, state.tensors()[f"exp_avg/{n}"]) for n in state.parameters):
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
    moments = torch.stack([torch.linalg.norm(state.tensors()[f"exp_avg/{n}"]) for n in state.parameters])
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


def test_document_numbers_reach_the_model_only_where_they_mask(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader
) -> None:
    for mask in (True, False):
        setup, _ = set_up(vary(config, **{"data.document_mask": mask}), ALONE)
        assert (split(loader.batch(0), setup)[0].documents_BT is not None) == mask


# Signals


@pytest.fixture
def wide(config: RunConfig, vary: Callable[..., RunConfig]) -> RunConfig:
    """fp64, and rows long enough to hold several documents."""
    return vary(config, **{"parallel.precision": "fp64", "data.seq_len": 256, "data.batch_size": 8})


def loaded(config: RunConfig) -> Loader:
    return Loader(config.data, prepare(config.data), config.seed)


def pieces_by_hand(batch: Batch, logits_BTV: torch.Tensor) -> list[tuple[int, float]]:
    """(source, mean loss) of every piece of a document with 16 targets or more, one token at a time."""
    codes = -torch.log_softmax(logits_BTV, dim=-1)
    found = []
    for row, (source, _, _) in enumerate(batch.samples_B3.tolist()):
        for number in sorted(set(batch.documents_BT[row].tolist()) - {-1}):
            at = [t for t in np.flatnonzero(batch.documents_BT[row] == number) if batch.targets_BT[row, t] != -100]
            losses = [float(codes[row, t, batch.targets_BT[row, t]]) for t in at]
            if len(losses) >= 16:
                found.append((source, sum(losses) / len(losses)))
    return found


def test_every_signal_is_what_a_plain_computation_says(wide: RunConfig) -> None:
    loader = loaded(wide)
    setup, state = set_up(wide, ALONE)
    for index in range(3):
        train_step(state, loader.batch(index), setup)
    batch = loader.batch(3)
    arrays = [torch.from_numpy(a) for a in (batch.tokens_BT, batch.positions_BT, batch.documents_BT)]
    logits = state.model(*arrays).detach()
    pieces = pieces_by_hand(batch, logits)
    counted = batch.targets_BT != -100
    normalisers = torch.logsumexp(logits, -1)[torch.from_numpy(counted)]
    before = {name: p.detach().clone() for name, p in state.parameters.items()}
    signals = train_step(state, batch, setup, regime=2).signals

    assert (signals.batch_index, signals.step, signals.regime, signals.optimizer_steps) == (3, 4, 2, 4)
    assert signals.applied
    assert not signals.clipped_harder
    assert len(pieces) > len(batch.samples_B3)
    assert signals.document_loss_max == pytest.approx(max(loss for _, loss in pieces), rel=1e-12)
    assert signals.document_loss_p999 == signals.document_loss_max
    assert [d.name for d in signals.domains] == [source.name for source in wide.data.sources]
    for source, domain in enumerate(signals.domains):
        losses = [loss for s, loss in pieces if s == source]
        assert domain.num_documents == len(losses)
        assert domain.mean == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        assert domain.mean_square == pytest.approx(sum(x * x for x in losses) / len(losses), rel=1e-12)
    assert signals.logsumexp_mean == pytest.approx(float(normalisers.mean()), rel=1e-12)
    assert signals.logsumexp_max == pytest.approx(float(normalisers.max()), rel=1e-12)
    assert signals.num_targets == counted.sum()
    # AdamW left the clipped gradient behind
    scale = max(1.0, signals.gradient_norm / wide.optim.clip_norm)
    squares: dict[str, float] = {}
    for name, parameter in state.parameters.items():
        assert parameter.grad is not None
        role = setup.roles[name]
        squares[role] = squares.get(role, 0.0) + float(parameter.grad.square().sum()) * scale**2
    assert dict(signals.role_gradient_norms) == pytest.approx({r: math.sqrt(x) for r, x in squares.items()}, rel=1e-12)
    assert sum(squares.values()) == pytest.approx(signals.gradient_norm**2, rel=1e-12)
    moved = torch.cat(
        [
            (p.detach() - before[name]).flatten()
            for name, p in state.parameters.items()
            if setup.roles[name] != "embedding"
        ]
    )[:: setup.sample.stride]
    assert signals.update_size == pytest.approx(float(moved.square().mean().sqrt()), rel=1e-12)
    assert (signals.nonfinite, signals.first_nonfinite) == (0, "")
    assert signals.facts.misaligned == signals.facts.repeated == 0
    assert signals.facts.copied == pytest.approx((batch.tokens_BT == batch.targets_BT).sum() / counted.sum())


def numbers(signals: StepSignals) -> dict[str, Any]:
    """Every field, flat."""
    flat: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add(f"{name}/{key}", item)
        elif isinstance(value, list | tuple):
            for at, item in enumerate(value):
                add(f"{name}/{at}", item)
        else:
            flat[name] = value

    add("", asdict(signals))
    return flat


def assert_same(one: StepSignals, other: StepSignals) -> None:
    mine, theirs = numbers(one), numbers(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, float):
            assert theirs[name] == pytest.approx(value, rel=FP64_RANKS, nan_ok=True), name
        else:
            assert theirs[name] == value, name


def signals_on(rank: int, world: int, config: RunConfig, nan_ranks: tuple[int, ...] = ()) -> list[StepSignals]:
    """Of four batches, the third of which has NaN in a gradient of some ranks."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    setup = with_nan_gradients(setup, state, (2,), nan_ranks)
    loader = loaded(config)
    return [train_step(state, loader.batch(i, (), rank, world), setup).signals for i in range(4)]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_give_every_signal_of_one(wide: RunConfig, vary: Callable[..., RunConfig], layout: str) -> None:
    [alone] = run_ranks(1, signals_on, wide)
    first, second = run_ranks(2, signals_on, vary(wide, **{"parallel.data_parallel": layout}))
    for one, mine, theirs in zip(alone, first, second, strict=True):
        assert numbers(mine) == numbers(theirs)
        assert one.update_size > 0
        assert_same(one, mine)


def test_micro_batches_give_every_signal_of_the_whole(wide: RunConfig, vary: Callable[..., RunConfig]) -> None:
    [whole] = run_ranks(1, signals_on, wide)
    [parts] = run_ranks(1, signals_on, vary(wide, **{"parallel.micro_batch_size": 2}))
    for one, other in zip(whole, parts, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_is_counted_and_named_on_all(
    wide: RunConfig, vary: Callable[..., RunConfig], layout: str
) -> None:
    first, second = run_ranks(2, signals_on, vary(wide, **{"parallel.data_parallel": layout}), (1,))
    assert {k: str(v) for k, v in numbers(first[2]).items()} == {k: str(v) for k, v in numbers(second[2]).items()}
    assert not first[2].applied
    assert first[2].first_nonfinite == "embedding.weight"
    size = wide.model.vocab_size * wide.model.d_model
    # of a replica all of it, of a shard the rows that rank 1 holds
    rows = wide.model.vocab_size - -(-wide.model.vocab_size // 2)
    assert first[2].nonfinite == (size if layout == "ddp" else rows * wide.model.d_model)
    assert first[2].update_size == 0
    assert (first[2].optimizer_steps, first[3].optimizer_steps) == (2, 3)
    assert first[3].applied
    assert first[3].nonfinite == 0


# Limits


def outcome_under(config: RunConfig, loader: Loader, limits: Limits, **changes: Any) -> tuple[StepOutcome, bool, float]:
    """The second step under limits: its outcome, whether no bit of weights and moments changed, and the norm of the first moment."""
    setup, state = set_up(config, ALONE)
    train_step(state, loader.batch(0), setup)
    before = digest_tensors(state.tensors())
    outcome = train_step(state, dataclasses.replace(loader.batch(1), **changes), setup, limits=limits)
    moments = [m for name, m in state.tensors().items() if name.startswith("exp_avg/")]
    norm = float(torch.linalg.norm(torch.stack([torch.linalg.norm(m) for m in moments])))
    return outcome, digest_tensors(state.tensors()) == before, norm


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("limit", "measured"),
    [("loss", "loss"), ("document_loss", "document_loss_max"), ("gradient_norm", "gradient_norm")],
)
def test_an_update_is_refused_beyond_each_limit_and_not_at_it(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader, limit: str, measured: str, gated: bool
) -> None:
    config = vary(config, **{"optim.gated": gated})
    free, untouched, _ = outcome_under(config, loader, Limits())
    assert free.signals.applied
    assert not untouched
    value = getattr(free.signals, measured)
    above = outcome_under(config, loader, Limits(**{limit: value * 1.0001}))[0]
    assert numbers(above.signals) == numbers(free.signals)
    below, untouched, _ = outcome_under(config, loader, Limits(**{limit: value * 0.9999}))
    assert below.skipped
    assert untouched
    assert not below.signals.applied
    assert (below.signals.step, below.signals.update_size, below.signals.optimizer_steps) == (1, 0.0, 1)
    assert getattr(below.signals, measured) == value


@pytest.mark.parametrize("own", [0.0, 1e-2, 1e3])
def test_the_smaller_of_both_clipping_norms_holds(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader, own: float
) -> None:
    config = vary(config, **{"optim.clip_norm": own, "parallel.precision": "fp64"})
    free, _, _ = outcome_under(config, loader, Limits())
    held, _, _ = outcome_under(config, loader, Limits(clip_norm=0.1))
    assert held.signals.gradient_norm == free.signals.gradient_norm > 0.1
    assert held.signals.clipped_harder == (own != 1e-2)
    assert not free.signals.clipped_harder
    by_hand, _, _ = outcome_under(vary(config, **{"optim.clip_norm": 0.1}), loader, Limits())
    assert not by_hand.signals.clipped_harder
    setup, state = set_up(config, ALONE)
    train_step(state, loader.batch(0), setup, limits=Limits(clip_norm=0.1))
    smaller = min(own or math.inf, 0.1)
    moments = torch.stack([torch.linalg.norm(state.tensors()[f"exp_avg/{n}"]) for n in state.parameters])
    assert float(torch.linalg.norm(moments)) / (1 - config.optim.optimizer.beta1) == pytest.approx(smaller, rel=1e-6)


def test_a_batch_whose_targets_are_out_of_place_is_refused(config: RunConfig, loader: Loader) -> None:
    shifted = np.roll(loader.batch(1).targets_BT, 1, axis=1)
    outcome, untouched, _ = outcome_under(config, loader, Limits(), targets_BT=shifted)
    assert outcome.skipped
    assert untouched
    assert outcome.signals.facts.misaligned > 0.5
    assert outcome.signals.finite


def test_what_is_only_observed_is_applied_be_it_nan_or_out_of_place(config: RunConfig, loader: Loader) -> None:
    watching = Limits(refuse_nonfinite=False)
    shifted = np.roll(loader.batch(1).targets_BT, 1, axis=1)
    assert outcome_under(config, loader, watching, targets_BT=shifted)[0].signals.applied
    setup, state = set_up(config, ALONE)
    setup = with_nan_gradients(setup, state, (0,))
    outcome = train_step(state, loader.batch(0), setup, limits=watching)
    assert outcome.signals.applied
    assert state.step == outcome.signals.optimizer_steps == 1
    assert outcome.signals.first_nonfinite == "embedding.weight"
    assert outcome.signals.nonfinite == config.model.vocab_size * config.model.d_model
    assert math.isfinite(state.smoothed_loss)
    assert not torch.isfinite(state.parameters["embedding.weight"]).all()


def test_an_lr_change_multiplies_the_scheduled_rate(config: RunConfig, loader: Loader) -> None:
    setup, state = set_up(config, ALONE)
    change = LrChange(start_step=1, factor=0.25, hold_steps=2, ramp_steps=1, settle=1.0)
    rates = [train_step(state, loader.batch(i), setup, lr_changes=(change,)).signals.lr for i in range(4)]
    scheduled = [lr_at(i, config.optim, config.steps) for i in range(4)]
    assert rates == [scheduled[0], 0.25 * scheduled[1], 0.25 * scheduled[2], scheduled[3]]


def test_the_row_holds_what_was_measured_and_leaves_out_what_was_not(
    config: RunConfig, vary: Callable[..., RunConfig]
) -> None:
    for seq_len, measured in ((64, True), (12, False)):
        narrow = vary(config, **{"data.seq_len": seq_len})
        setup, state = set_up(narrow, ALONE)
        outcome = train_step(state, loaded(narrow).batch(0), setup)
        assert ("train/document_loss_max" in outcome.metrics) == measured
        assert math.isnan(outcome.signals.document_loss_max) == (not measured)
        assert bool(outcome.signals.domains) == measured
        assert all(math.isfinite(value) for value in outcome.metrics.values())
        assert outcome.metrics["train/gradient_norm/hidden"] == dict(outcome.signals.role_gradient_norms)["hidden"]
