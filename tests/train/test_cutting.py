"""A length ramp cuts rows, and changes nothing else."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.config.data import BatchStage, LengthStage
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Batch, Loader
from surefoot.guard.signals import StepSignals
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.optim.schedule import lr_at
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World, join_world
from surefoot.proof.rehearsal import Script, rehearse
from surefoot.train.cutting import seq_len_at
from surefoot.train.rows import regime, speed
from surefoot.train.setup import Setup, set_up
from surefoot.train.state import TrainState
from surefoot.train.step import split, train_step
from tolerances import FP64_ORDER, FP64_RANKS

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
Vary = Callable[..., RunConfig]
STAGES = (LengthStage(start_batch=0, seq_len=16), LengthStage(start_batch=2, seq_len=32))


def ramped(config: RunConfig, vary: Vary) -> RunConfig:
    """fp64, cut to a quarter, then to half; whole from batch 4 on."""
    stages = (*STAGES, LengthStage(start_batch=4, seq_len=64))
    return vary(config, **{"parallel.precision": "fp64", "data.length_stages": stages})


def gradients(state: TrainState, batch: Batch, setup: Setup) -> dict[str, torch.Tensor]:
    state.optimizer.zero_grad()
    setup.forward_backward(split(batch, setup), batch.num_targets)
    return {name: p.grad.clone() for name, p in state.parameters.items() if p.grad is not None}


def test_a_stage_holds_from_its_batch_to_the_next(config: RunConfig, vary: Vary) -> None:
    data = ramped(config, vary).data
    assert [seq_len_at(data, n) for n in range(6)] == [16, 16, 32, 32, 64, 64]
    later = dataclasses.replace(data, length_stages=STAGES[1:])
    assert [seq_len_at(later, n) for n in range(4)] == [64, 64, 32, 32]
    starts = Loader(data, prepare(data), 0).batch_starts
    assert [regime(data, starts, n) for n in range(6)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("micro", [0, 2])
def test_a_cut_batch_has_the_gradient_of_its_pieces_as_documents_of_their_own(
    config: RunConfig, vary: Vary, micro: int
) -> None:
    config = vary(ramped(config, vary), **{"parallel.micro_batch_size": micro})
    loader = Loader(config.data, prepare(config.data), config.seed)
    setup, state = set_up(config, ALONE)
    batch = loader.batch(0)
    pieces = np.arange(64, dtype=np.int32) // 16
    apart = dataclasses.replace(batch, documents_BT=batch.documents_BT * 4 + pieces)
    whole_setup, whole_state = set_up(vary(config, **{"data.length_stages": ()}), ALONE)
    expected = gradients(whole_state, apart, whole_setup)
    joined = gradients(whole_state, batch, whole_setup)
    found = gradients(state, batch, setup)
    assert [m.tokens_BT.shape for m in split(batch, setup)] == [((micro or 4) * 4, 16)] * (4 // (micro or 4))
    for name, grad in expected.items():
        assert torch.linalg.norm(found[name] - grad) / torch.linalg.norm(grad) < FP64_ORDER, name
    assert any(torch.linalg.norm(joined[n] - g) / torch.linalg.norm(g) > 1e-3 for n, g in expected.items())


def test_without_document_masks_pieces_are_rows_of_their_own_too(config: RunConfig, vary: Vary) -> None:
    config = vary(ramped(config, vary), **{"data.document_mask": False})
    loader = Loader(config.data, prepare(config.data), config.seed)
    setup, state = set_up(config, ALONE)
    batch = loader.batch(0)
    [micro] = split(batch, setup)
    assert micro.documents_BT is None
    changed = batch.tokens_BT.copy()
    changed[0, :16] = 65
    other = split(dataclasses.replace(batch, tokens_BT=changed), setup)[0]
    with torch.no_grad():
        one, two = (state.model(m.tokens_BT, m.positions_BT, None) for m in (micro, other))
    assert not torch.equal(one[0], two[0])
    assert torch.equal(one[1:], two[1:])
    assert micro.positions_BT[1, 0] == batch.positions_BT[0, 16] == 16


def test_losses_of_documents_are_of_the_whole_row(config: RunConfig, vary: Vary) -> None:
    """Documents of 40 tokens, cut into 16s: no piece of one has the 16 targets that a loss of a document needs, the whole has."""
    config = ramped(config, vary)
    loader = Loader(config.data, prepare(config.data), config.seed)
    whole = vary(config, **{"data.length_stages": ()})
    one, other = (
        train_step(state, loader.batch(0), setup).signals
        for setup, state in (set_up(c, ALONE) for c in (config, whole))
    )
    assert [d.num_documents for d in one.domains] == [d.num_documents for d in other.domains]
    assert one.num_targets == other.num_targets
    assert one.facts == other.facts


def signals_on(rank: int, world: int, config: RunConfig) -> list[StepSignals]:
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    loader = Loader(config.data, prepare(config.data), config.seed)
    return [train_step(state, loader.batch(i, (), rank, world), setup).signals for i in range(5)]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_cut_as_one(config: RunConfig, vary: Vary, layout: str) -> None:
    config = vary(ramped(config, vary), **{"parallel.data_parallel": layout})
    [alone] = run_ranks(1, signals_on, config)
    for mine in run_ranks(2, signals_on, config):
        for one, two in zip(alone, mine, strict=True):
            assert two.loss == pytest.approx(one.loss, rel=FP64_RANKS)
            assert two.gradient_norm == pytest.approx(one.gradient_norm, rel=FP64_RANKS)
            assert two.document_loss_max == pytest.approx(one.document_loss_max, rel=FP64_RANKS)


def test_a_rollback_across_a_stage_and_a_resume_go_through_it_again(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    stages = (LengthStage(start_batch=0, seq_len=16), LengthStage(start_batch=14, seq_len=64))
    config = vary(config, **{"data.length_stages": stages})
    never = rehearse(config, tmp_path / "never")
    back = rehearse(config, tmp_path / "back", Script(rollback_after=16, rollback_to=12))
    assert Run(tmp_path / "back").attempts[-1].from_batch <= 12
    assert back.digests == never.digests
    rehearse(config, tmp_path / "parts", Script(stop_after=13))
    assert rehearse(config, tmp_path / "parts").digests == never.digests
    assert compare(Run(tmp_path / "never"), Run(tmp_path / "parts")).same


def test_the_rate_follows_a_ramp_of_the_batch_and_rewinds_with_it(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    stages = (BatchStage(start_batch=6, batch_size=16), BatchStage(start_batch=12, batch_size=8))
    config = vary(config, **{"data.batch_stages": stages, "optim.ramp_lr": "sqrt"})
    rehearse(config, tmp_path / "run", Script(rollback_after=13, rollback_to=5))
    rates = Run(tmp_path / "run").metrics()["train/lr"].tolist()
    ramp = [1.0] * 6 + [2.0] * 6 + [2**0.5] * 12
    assert rates == pytest.approx([lr_at(n, config.optim, 24) * ramp[n] for n in range(24)], rel=1e-12)
    linear = vary(config, **{"optim.ramp_lr": "linear"})
    setup, state = set_up(linear, ALONE)
    loader = Loader(linear.data, prepare(linear.data), linear.seed)
    assert train_step(state, loader.batch(6), setup).metrics["train/lr"] == 4 * lr_at(0, linear.optim, 24)


def test_mfu_counts_what_cut_rows_really_need(config: RunConfig, vary: Vary) -> None:
    config = ramped(config, vary)
    setup, _ = set_up(config, ALONE, peak_flops=1e9)
    loader = Loader(config.data, prepare(config.data), config.seed)
    shares = [speed(setup, loader.batch(n), 1.0, 0.0)["perf/mfu"] for n in (0, 2, 4)]
    assert shares == pytest.approx([4 * 64 * setup.flops_at[n] / 1e9 for n in (16, 32, 64)])
    assert shares[0] < shares[1] < shares[2]
    assert setup.flops_per_token == setup.flops_at[64]
