"""QK-clip inside steps and runs: what it clips, what it leaves, and that no layout, resume or skip changes it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.guard.limits import Limits
from surefoot.model.attention_maxima import AttentionMaxima
from surefoot.monitor.run import Run
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World
from surefoot.proof.faults import with_nan_gradients
from surefoot.proof.rehearsal import Script, rehearse, rehearse_on_rank
from surefoot.train.evaluate import TrainingData, evaluate
from surefoot.train.probes import probe_rows, take_probe
from surefoot.train.setup import Setup, set_up
from surefoot.train.state import TrainState
from surefoot.train.step import split, train_step
from tolerances import COMPILED, FP64_RANKS, QK_CLIPPED

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
TAU = 0.06
"""The rehearsal's heads start with largest logits around it."""
Vary = Callable[..., RunConfig]


@pytest.fixture
def clipped(config: RunConfig, vary: Vary) -> RunConfig:
    return vary(config, **{"optim.qk_clip": TAU, "parallel.precision": "fp64"})


def with_heads(config: RunConfig, vary: Vary, kv_heads: int, layers: int = 2) -> RunConfig:
    attention = dataclasses.replace(config.model.attention, num_kv_heads=kv_heads)
    return vary(config, **{"model.attention": attention, "model.num_layers": layers})


def largest(state: TrainState, setup: Setup, loader: Loader, index: int) -> Tensor:
    """Exact maxima of every head on a batch, at the weights as they are."""
    shape = (setup.config.model.num_layers, setup.config.model.attention.num_heads)
    own, state.model.maxima = state.model.maxima, AttentionMaxima(-math.inf, *shape)
    with state.model.maxima.watch(), torch.no_grad():
        state.model(*split(loader.batch(index), setup)[0])
    found, state.model.maxima = state.model.maxima.largest_LN, own
    return found


def rows_of_heads(state: TrainState, part: str, layer: int = 0) -> Tensor:
    """(heads, H, D)."""
    weight = state.parameters[f"blocks.{layer}.attention.{part}.weight"].detach()
    return weight.view(-1, 8, weight.shape[1]).clone()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_after_the_step_clipped_heads_are_at_the_threshold_and_the_rest_keep_their_bits(
    config: RunConfig, vary: Vary, loader: Loader, kv_heads: int
) -> None:
    """One layer: a clipped one changes what the next reads."""
    config = vary(with_heads(config, vary, kv_heads, layers=1), **{"optim.lr": 1e-9})
    setup, plain = set_up(config, ALONE)
    before = largest(plain, setup, loader, 0)[0]
    tau = float(before.sort().values[1:3].mean())
    train_step(plain, loader.batch(0), setup)
    setup, state = set_up(vary(config, **{"optim.qk_clip": tau}), ALONE)
    metrics = train_step(state, loader.batch(0), setup).metrics
    above = before > tau
    assert metrics["train/heads_clipped"] == above.sum() == 2
    assert metrics["train/attention_logit_max"] == pytest.approx(float(before.max()), rel=1e-6)
    after = largest(state, setup, loader, 0)[0]
    assert (after[above] / tau - 1).abs().max() < QK_CLIPPED
    torch.testing.assert_close(after[~above], before[~above], rtol=1e-5, atol=0)
    own = kv_heads == 4
    for part, touched in (("query", above), ("key", above if own else torch.zeros(kv_heads, dtype=torch.bool))):
        here, there = rows_of_heads(state, part), rows_of_heads(plain, part)
        assert [not torch.equal(a, b) for a, b in zip(here, there, strict=True)] == touched.tolist()
    others = [
        n for n in plain.tensors() if not n.endswith(("query.weight", "key.weight")) or not n.startswith("weights")
    ]
    assert all(torch.equal(plain.tensors()[n], state.tensors()[n]) for n in others)


def trained(
    config: RunConfig, loader: Loader, batches: Sequence[int] = range(4)
) -> tuple[TrainState, list[dict[str, float]]]:
    setup, state = set_up(config, ALONE)
    return state, [train_step(state, loader.batch(index), setup).metrics for index in batches]


def test_a_threshold_that_nothing_reaches_is_the_run_without_to_the_bit(
    config: RunConfig, vary: Vary, loader: Loader
) -> None:
    without, rows = trained(config, loader)
    high, watched = trained(vary(config, **{"optim.qk_clip": 1e30}), loader)
    assert digest_tensors(high.tensors()) == digest_tensors(without.tensors())
    assert [row.pop("train/heads_clipped") for row in watched] == [0.0] * 4
    assert watched == rows


@pytest.mark.parametrize("rows", [2, 1])
def test_the_largest_of_all_micro_batches_counts(clipped: RunConfig, vary: Vary, loader: Loader, rows: int) -> None:
    whole, first = trained(clipped, loader)
    parts, second = trained(vary(clipped, **{"parallel.micro_batch_size": rows}), loader)
    assert sum(row["train/heads_clipped"] for row in first) > 0
    for one, other in zip(first, second, strict=True):
        assert one["train/heads_clipped"] == other["train/heads_clipped"]
        assert one["train/attention_logit_max"] == pytest.approx(other["train/attention_logit_max"], rel=FP64_RANKS)
    for name, tensor in whole.tensors().items():
        difference = torch.linalg.norm(parts.tensors()[name] - tensor)
        assert difference <= FP64_RANKS * torch.linalg.norm(tensor), name


def test_the_host_and_the_device_may_decide_with_the_same_bits(clipped: RunConfig, vary: Vary, loader: Loader) -> None:
    one, _ = trained(clipped, loader)
    other, _ = trained(vary(clipped, **{"optim.gated": False}), loader)
    assert digest_tensors(one.tensors()) == digest_tensors(other.tensors())


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_clip_as_one(clipped: RunConfig, vary: Vary, tmp_path: Path, layout: str) -> None:
    config = vary(clipped, steps=8)
    one = rehearse(config, tmp_path / "one")
    two = run_ranks(2, rehearse_on_rank, vary(config, **{"parallel.data_parallel": layout}), tmp_path / "two")[0]
    rows = [Run(tmp_path / name).metrics() for name in ("one", "two")]
    assert np.nansum(rows[0]["train/heads_clipped"]) > 8
    assert rows[0]["train/heads_clipped"].tolist() == rows[1]["train/heads_clipped"].tolist()
    np.testing.assert_allclose(*(row["train/attention_logit_max"] for row in rows), rtol=FP64_RANKS)
    for name, tensor in one.tensors.items():
        assert np.linalg.norm(tensor - two.tensors[name]) <= FP64_RANKS * np.linalg.norm(tensor), name


def test_a_resumed_and_a_rolled_back_run_end_as_the_uninterrupted_one(
    clipped: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    config = vary(clipped, steps=12)
    whole = rehearse(config, tmp_path / "whole")
    rehearse(config, tmp_path / "run", Script(stop_after=7))
    assert rehearse(config, tmp_path / "run").digests == whole.digests
    back = rehearse(config, tmp_path / "back", Script(rollback_after=9, rollback_to=5))
    assert back.digests == whole.digests


@pytest.mark.parametrize("why", ["nan", "limit"])
def test_a_skipped_step_clips_nothing(clipped: RunConfig, loader: Loader, why: str) -> None:
    setup, state = set_up(clipped, ALONE)
    train_step(state, loader.batch(0), setup)
    before = digest_tensors(state.tensors())
    setup = with_nan_gradients(setup, state, {1} if why == "nan" else set())
    outcome = train_step(
        state, loader.batch(1), setup, limits=Limits(gradient_norm=1e-9 if why == "limit" else math.inf)
    )
    assert outcome.skipped
    assert outcome.metrics["train/heads_clipped"] == 0
    assert outcome.metrics["train/attention_logit_max"] > TAU
    assert digest_tensors(state.tensors()) == before
    assert train_step(state, loader.batch(2), setup).metrics["train/heads_clipped"] > 0


def test_the_size_of_the_update_is_the_optimisers_alone(clipped: RunConfig, vary: Vary, loader: Loader) -> None:
    """It is judged against the rate, which QK-clip does not follow."""
    _, (plain,) = trained(vary(clipped, **{"optim.qk_clip": 0.0}), loader, [0])
    _, (row,) = trained(vary(clipped, **{"optim.qk_clip": TAU / 1e3}), loader, [0])
    assert row["train/heads_clipped"] == 8
    assert row["train/update_size"] == plain["train/update_size"]


def test_evaluation_probes_and_replays_are_not_watched(clipped: RunConfig, loader: Loader) -> None:
    setup, state = set_up(clipped, ALONE)
    data = TrainingData.open(clipped, prepare(clipped.data))
    lr = train_step(state, loader.batch(0), setup).signals.lr
    assert setup.qk_clip is not None
    kept = setup.qk_clip.maxima.largest_LN.clone()

    def refuse(*looked_at: Any) -> NoReturn:
        raise AssertionError("watched")

    setup.qk_clip.maxima.see = refuse
    evaluate(setup, data.held_out[0], 4)
    take_probe(state, setup, probe_rows(data, setup), lr)
    setup.forward_backward(split(loader.batch(1), setup), 100)
    assert torch.equal(setup.qk_clip.maxima.largest_LN, kept)
    with pytest.raises(AssertionError, match="watched"):
        train_step(state, loader.batch(1), setup)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_show_the_same_logits(
    config: RunConfig, vary: Vary, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and differentiated as ever, but without the minute that C++ takes."""
    compile_in_place = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_in_place(module, backend="aot_eager"))
    rows = {}
    for choice in ("off", "on"):
        settings = {"optim.qk_clip": TAU, "parallel.compile": choice}
        rows[choice] = trained(vary(config, **settings), loader, range(2))[1]
    for eager, compiled in zip(rows["off"], rows["on"], strict=True):
        assert eager["train/heads_clipped"] == compiled["train/heads_clipped"] > 0
        for name in ("train/attention_logit_max", "train/loss"):
            assert compiled[name] == pytest.approx(eager[name], rel=COMPILED[torch.float32])
