"""The gradient noise scale of a run: against brute force, without a trace, the same on any number of ranks."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.guard.limits import Limits
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.monitor.summary import summarise
from surefoot.optim.noise_scale import NoiseState
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train.rollback import restore_initial
from surefoot.train.setup import Setup, set_up
from surefoot.train.state import TrainState
from surefoot.train.step import split, train_step
from tolerances import FP64_RANKS, NOISE_SCALE

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
Vary = Callable[..., RunConfig]
FIGURES = ("train/noise_scale", "train/noise_scale_rows", "train/noise_signal", "train/noise_trace")


def loaded(config: RunConfig) -> Loader:
    return Loader(config.data, prepare(config.data), config.seed)


def noisy(config: RunConfig, vary: Vary, every: int = 1, pieces: int = 2) -> RunConfig:
    return vary(config, **{"log.noise_every": every, "log.noise_pieces": pieces, "data.batch_size": 8})


def brute_force(state: TrainState, setup: Setup, loader: Loader, num_batches: int) -> tuple[float, float]:
    """|G|^2 and the trace of one row's covariance, from the gradient of every row by itself."""
    rows = []
    for index in range(num_batches):
        batch = loader.batch(index)
        for row in range(len(batch.samples_B3)):
            [micro] = split(batch, setup, slice(row, row + 1))
            state.optimizer.zero_grad()
            setup.forward_backward([micro], int((micro.targets_BT != -100).sum()))
            rows.append(torch.cat([p.grad.flatten() for p in state.parameters.values() if p.grad is not None]))
    each = torch.stack(rows)
    mean = each.mean(0)
    trace = float((each - mean).square().sum() / (len(rows) - 1))
    return float(mean.square().sum()) - trace / len(rows), trace


def test_the_critical_batch_size_is_that_of_brute_force(config: RunConfig, vary: Vary) -> None:
    """60 batches at the weights of step 40, which hardly move: a rate of 1e-9 from there on."""
    config = noisy(config, vary)
    setup, state = set_up(vary(config, **{"log.noise_every": 0}), ALONE)
    loader = loaded(config)
    for index in range(40):
        train_step(state, loader.batch(index), setup)
    signal, trace = brute_force(state, setup, loader, 24)
    still, other = set_up(vary(config, **{"optim.lr": 1e-9}), ALONE)
    with torch.no_grad():
        for name, parameter in other.parameters.items():
            parameter.copy_(state.parameters[name])
    found = [train_step(other, loader.batch(index), still).metrics for index in range(60)]
    assert all(set(FIGURES) & set(row) for row in found)
    assert found[-1]["train/noise_signal"] == pytest.approx(signal, rel=NOISE_SCALE)
    assert found[-1]["train/noise_scale_rows"] == pytest.approx(trace / signal, rel=NOISE_SCALE)
    targets = found[-1]["train/num_targets"] / 8
    assert found[-1]["train/noise_scale"] == pytest.approx(found[-1]["train/noise_scale_rows"] * targets)


@pytest.mark.parametrize("gated", [True, False])
def test_a_measurement_leaves_no_bit(config: RunConfig, vary: Vary, gated: bool) -> None:
    config = vary(noisy(config, vary, every=0), **{"optim.gated": gated, "parallel.micro_batch_size": 4})
    loader = loaded(config)
    digests, gradients, losses = [], [], []
    for every in (0, 2):
        setup, state = set_up(vary(config, **{"log.noise_every": every}), ALONE)
        rows = [train_step(state, loader.batch(index), setup).metrics for index in range(4)]
        digests.append(digest_tensors(state.tensors()))
        gradients.append({n: p.grad.clone() for n, p in state.parameters.items() if p.grad is not None})
        losses.append([{k: v for k, v in row.items() if "noise" not in k} for row in rows])
        assert [("train/noise_trace" in row) for row in rows] == [bool(every) and n % 2 == 1 for n in range(4)]
    assert digests[0] == digests[1]
    assert losses[0] == losses[1]
    assert all(torch.equal(gradients[0][name], grad) for name, grad in gradients[1].items())


def test_skipped_and_broken_batches_do_not_enter(config: RunConfig, vary: Vary, tmp_path: Path) -> None:
    config = noisy(config, vary)
    rehearse(config, tmp_path / "run", Script(nan_batches=(3,), nan_activation_batches=(6,), empty_batches=(9,)))
    rows = Run(tmp_path / "run").rows
    without = [row["batch_index"] for row in rows if "train/noise_trace" not in row]
    assert without == [3, 6, 9]
    assert all(math.isfinite(row["train/noise_trace"]) for row in rows if row["batch_index"] not in without)
    assert summarise(Run(tmp_path / "run")).critical_batch > 0


def figures_on(rank: int, world: int, config: RunConfig) -> list[dict[str, float]]:
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    loader = loaded(config)
    rows = [train_step(state, loader.batch(i, (), rank, world), setup).metrics for i in range(4)]
    return [{k: v for k, v in row.items() if k.startswith("train/noise") or k == "train/loss"} for row in rows]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_measure_what_one_does(config: RunConfig, vary: Vary, layout: str) -> None:
    config = vary(noisy(config, vary), **{"parallel.precision": "fp64", "parallel.data_parallel": layout})
    [alone] = run_ranks(1, figures_on, config)
    first, second = run_ranks(2, figures_on, config)
    assert first == second
    for one, two in zip(alone, first, strict=True):
        assert set(FIGURES) <= set(one) == set(two)
        assert one == pytest.approx(two, rel=FP64_RANKS * 100)


def test_a_resumed_and_a_rolled_back_run_have_the_rows_of_one_that_was_neither(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    config = noisy(config, vary, every=3)
    whole = rehearse(config, tmp_path / "whole")
    rehearse(config, tmp_path / "parts", Script(stop_after=8))
    assert rehearse(config, tmp_path / "parts").digests == whole.digests
    rehearse(config, tmp_path / "back", Script(rollback_after=13, rollback_to=5))
    quiet = rehearse(vary(config, **{"log.noise_every": 0}), tmp_path / "quiet")
    assert quiet.digests == whole.digests
    for name in ("parts", "back"):
        assert compare(Run(tmp_path / "whole"), Run(tmp_path / name)).same
    told = [row["step"] for row in Run(tmp_path / "back").rows if "train/noise_trace" in row]
    assert told == list(range(3, 25, 3))


def test_back_at_the_initial_weights_nothing_was_measured(config: RunConfig, vary: Vary) -> None:
    setup, state = set_up(noisy(config, vary), ALONE)
    train_step(state, loaded(noisy(config, vary)).batch(0), setup)
    assert state.noise.count == 1
    restore_initial(state, setup)
    assert state.noise == NoiseState()


def test_an_update_that_a_limit_refuses_does_not_enter_though_its_pieces_are_sound(
    config: RunConfig, vary: Vary
) -> None:
    setup, state = set_up(noisy(config, vary), ALONE)
    loader = loaded(noisy(config, vary))
    train_step(state, loader.batch(0), setup)
    before = state.noise
    outcome = train_step(state, loader.batch(1), setup, limits=Limits(loss=0.0))
    assert outcome.skipped
    assert not any("noise" in name for name in outcome.metrics)
    assert state.noise == before
