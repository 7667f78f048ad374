"""Rows whose tokens lie on several ranks train as whole rows on one: through a whole step, weights and moments included."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.config.data import Exclusion, LengthStage
from surefoot.config.model import GroupedQueryAttention
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.loss import LossSums
from surefoot.parallel import ring
from surefoot.parallel.context_pieces import Pieces
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.parallel.ring import what_is_seen
from surefoot.parallel.ring_kernel import Pair
from surefoot.train.setup import set_up
from surefoot.train.step import split, train_step
from tolerances import CONTEXT_RUN, FP64_RANKS

STEPS = 2
Vary = Callable[..., RunConfig]


class Trained(NamedTuple):
    """What a rank knows after some steps; tensors whole."""

    data_rank: int
    sums: list[LossSums]
    """Of every micro-batch of the first batch, before any step."""
    tensors: dict[str, Tensor]
    """Gradients of every step, weights and moments after the last."""
    metrics: list[dict[str, float]]


def whole(x: Tensor) -> Tensor:
    return x.full_tensor().clone() if isinstance(x, DTensor) else x.detach().clone()


def trained(rank: int, world: int, config: RunConfig) -> Trained:
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    loader = Loader(config.data, prepare(config.data), config.seed)
    batches = [loader.batch(index, (), here.data_rank, here.data_size) for index in range(STEPS)]
    sums = setup.forward_backward.forward_only(split(batches[0], setup))
    metrics, tensors = [], {}
    for index, batch in enumerate(batches):
        metrics.append(train_step(state, batch, setup).metrics)
        for name, parameter in state.parameters.items():
            assert parameter.grad is not None
            tensors[f"gradient/{index}/{name}"] = whole(parameter.grad)
    tensors |= {name: whole(x) for name, x in state.tensors().items()}
    return Trained(here.data_rank, sums, tensors, metrics)


def deviations(found: Trained, expected: Trained) -> dict[str, float]:
    """By name, relative; of the sums and token losses of this rank's rows too. Metrics count as far as they are not about weights' samples."""
    pairs: dict[str, tuple[Any, Any]] = {n: (found.tensors[n], x) for n, x in expected.tensors.items()}
    rows = torch.cat([s.token_losses_BT for s in found.sums])
    all_rows = torch.cat([s.token_losses_BT for s in expected.sums])
    start = found.data_rank * len(rows)
    pairs["token losses"] = (rows, all_rows[start : start + len(rows)])
    for index, metrics in enumerate(expected.metrics):
        assert found.metrics[index].keys() == metrics.keys()
        pairs |= {f"{index}/{name}": (found.metrics[index][name], value) for name, value in metrics.items()}
    if len(rows) == len(all_rows):
        for field in LossSums._fields:
            mine, theirs = ([getattr(s, field) for s in t.sums] for t in (found, expected))
            pairs[field] = (torch.cat([x.reshape(-1) for x in mine]), torch.cat([x.reshape(-1) for x in theirs]))
    return {name: relative(*map(torch.as_tensor, pair)) for name, pair in pairs.items()}


def relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    if torch.equal(a, b):
        return 0.0
    found = float((a.double() - b.double()).norm() / b.double().norm())
    return found if math.isfinite(found) else math.inf


def worst(found: list[Trained], expected: Trained) -> tuple[float, str]:
    return max((value, name) for rank in found for name, value in deviations(rank, expected).items())


@pytest.fixture
def exact(config: RunConfig, vary: Vary) -> RunConfig:
    """Fp64, normed heads."""
    attention = GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8, qk_norm=True)
    return vary(config, **{"parallel.precision": "fp64", "model.attention": attention})


def with_exclusion(config: RunConfig) -> RunConfig:
    """Without the longest document of the first row."""
    loader = Loader(config.data, prepare(config.data), config.seed)
    source, _, row = loader.batch(0).samples_B3[0].tolist()
    span = max(loader.row_documents(source, row), key=lambda span: span.stop - span.start)
    excluded = dataclasses.replace(config.data, exclude=(Exclusion(document=span.document),))
    return dataclasses.replace(config, data=excluded)


def plain_heads(config: RunConfig) -> RunConfig:
    attention = GroupedQueryAttention(num_heads=4, num_kv_heads=4, d_head=8)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention=attention))


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"cp": 2}),
        (4, {"cp": 4}),
        (4, {"cp": 2, "micro_batch_size": 1}),
        (4, {"cp": 2, "data_parallel": "fsdp"}),
        (2, {"cp": 2, "data_parallel": "zero2", "micro_batch_size": 1}),
        (2, {"cp": 2, "recompute": "full"}),
        (2, {"cp": 2, "recompute": "selective"}),
    ],
    ids=["cp2", "cp4", "cp2 x dp2 micro", "cp2 x fsdp2", "cp2 zero2 micro", "cp2 full", "cp2 selective"],
)
def test_tokens_over_ranks_give_the_training_of_one(
    exact: RunConfig, vary: Vary, kind: str, ranks: int, settings: dict[str, Any]
) -> None:
    """Sums, token losses, every gradient, norm, weights and moments; a document is excluded, heads are grouped where they may be."""
    config = with_exclusion(exact)
    if settings["cp"] == 4:
        config = plain_heads(config)
    alone = trained(0, 1, vary(config, **{"parallel.micro_batch_size": settings.get("micro_batch_size", 0)}))
    spread = {f"parallel.{key}": value for key, value in settings.items()}
    found = run_ranks(ranks, trained, vary(config, **spread, **{"parallel.cp_attention": kind}))
    assert alone.metrics[0]["train/tokens_excluded"] > 8
    assert worst(found, alone)[0] <= FP64_RANKS, worst(found, alone)


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_rows_that_are_one_document_and_grow_longer_are_split_alike(exact: RunConfig, vary: Vary, kind: str) -> None:
    """No document mask; the second batch has rows twice as long as the first."""
    stages = (LengthStage(start_batch=0, seq_len=32), LengthStage(start_batch=1, seq_len=64))
    config = vary(exact, **{"data.document_mask": False, "data.length_stages": stages})
    found = run_ranks(2, trained, vary(config, **{"parallel.cp": 2, "parallel.cp_attention": kind}))
    assert worst(found, trained(0, 1, config))[0] <= FP64_RANKS


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_bf16_differs_by_its_rounding(exact: RunConfig, vary: Vary, kind: str) -> None:
    """Loss, norm and gradients of the first step; Adam makes steps of the size of the rate out of noise in small gradients."""
    config = vary(with_exclusion(exact), **{"parallel.precision": "bf16"})
    alone = trained(0, 1, config)
    for rank in run_ranks(2, trained, vary(config, **{"parallel.cp": 2, "parallel.cp_attention": kind})):
        found = deviations(rank, alone)
        assert found["0/train/loss"] <= CONTEXT_RUN["loss"]
        assert max(value for name, value in found.items() if name.startswith("gradient/0/")) <= CONTEXT_RUN["gradient"]


def blind_to_documents(documents_BT: Tensor | None, pieces: Pieces, step: int, at: tuple[int, int]) -> Pair:
    """Right inside a chunk."""
    pair = what_is_seen(documents_BT, pieces, step, at)
    return pair if pair.same else Pair(None, False)


def in_order_of_ranks(self: Pieces, everyone: list[Tensor]) -> Tensor:
    return torch.cat(list(everyone), dim=1)


@pytest.mark.parametrize(
    ("of", "name", "wrong", "shown_by"),
    [
        (ring, "what_is_seen", blind_to_documents, "gradient/"),
        (Pieces, "in_order", in_order_of_ranks, "token losses"),
    ],
)
def test_a_mask_or_an_order_that_is_wrong_is_noticed(
    exact: RunConfig, vary: Vary, of: type, name: str, wrong: object, shown_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = trained(0, 1, exact)
    monkeypatch.setattr(of, name, wrong)
    found = run_ranks(2, trained, vary(exact, **{"parallel.cp": 2}))
    assert max(value for name, value in deviations(found[1], alone).items() if name.startswith(shown_by)) > 1e-3


def rings(rank: int, world: int, config: RunConfig) -> int:
    """Times that keys go round for a forward in a training step of two layers."""
    here = join_world(config.parallel)
    setup, _ = set_up(config, here)
    batch = Loader(config.data, prepare(config.data), config.seed).batch(0, (), here.data_rank, here.data_size)
    attend, calls = ring.attend, []

    def counting(*args: Any) -> tuple[Tensor, Tensor]:
        calls.append(args)
        return attend(*args)

    ring.attend = counting  # this rank's process ends with the test
    setup.forward_backward(split(batch, setup), batch.num_targets)
    return len(calls) // (2 * world + 1)


@pytest.mark.parametrize(("recompute", "times"), [("none", 2), ("full", 4), ("selective", 2)])
def test_selective_recomputation_does_not_send_keys_round_again(
    exact: RunConfig, vary: Vary, recompute: str, times: int
) -> None:
    """What attention gave is kept, with its log-sum-exp, as that of fused kernels is."""
    config = vary(exact, **{"parallel.cp": 2, "parallel.recompute": recompute})
    assert run_ranks(2, rings, config) == [times, times]
