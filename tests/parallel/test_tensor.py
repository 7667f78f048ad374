"""Matrices cut over ranks, and the residual stream by tokens, train as one rank does: through whole steps, weights and moments included."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from surefoot.config.data import Exclusion
from surefoot.config.model import Custom, GroupedQueryAttention, LossConfig, MuP
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.loss import LossSums
from surefoot.optim.clip import local_part
from surefoot.parallel import tensor_products, tensor_tokens
from surefoot.parallel.boxes import box_of
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.train.setup import set_up
from surefoot.train.step import split, train_step
from tolerances import FP64_RANKS, TENSOR_BF16

STEPS = 2
Vary = Callable[..., RunConfig]
Pieces = dict[str, tuple[tuple[slice, ...], Tensor]]


class Trained(NamedTuple):
    """What a rank knows after some steps."""

    data: tuple[int, int]
    """Which of how many parts of the rows it has."""
    sums: list[LossSums]
    """Of every micro-batch of the first batch, with gradients and then without."""
    pieces: Pieces
    """Its pieces of the gradients of every step, and of weights and moments after the last."""
    metrics: list[dict[str, float]]


def piece(x: Tensor) -> tuple[tuple[slice, ...], Tensor]:
    return box_of(x).slices, local_part(x).clone()


def trained(rank: int, world: int, config: RunConfig, plant: Callable[[], None] | None = None) -> Trained:
    if plant is not None:
        plant()
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    loader = Loader(config.data, prepare(config.data), config.seed)
    batches = [loader.batch(index, (), here.data_rank, here.data_size) for index in range(STEPS)]
    sums = setup.forward_backward(split(batches[0], setup), batches[0].num_targets)
    sums += setup.forward_backward.forward_only(split(batches[0], setup))
    sums = [LossSums(*(x.detach() for x in s)) for s in sums]
    metrics, pieces = [], {}
    for index, batch in enumerate(batches):
        metrics.append(train_step(state, batch, setup).metrics)
        for name, parameter in state.parameters.items():
            assert parameter.grad is not None
            pieces[f"gradient/{index}/{name}"] = piece(parameter.grad)
    pieces |= {name: piece(x) for name, x in state.tensors().items()}
    return Trained((here.data_rank, here.data_size), sums, pieces, metrics)


def relative(a: Any, b: Any) -> float:
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    assert a.shape == b.shape
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def deviations(found: Trained, expected: Trained) -> dict[str, float]:
    """Of a rank's pieces from those of one rank's tensors, of its rows' token losses, and of metrics: relative, by name."""
    assert found.pieces.keys() == expected.pieces.keys()
    far = {name: relative(x, expected.pieces[name][1][where]) for name, (where, x) in found.pieces.items()}
    part, parts = found.data
    rows, all_rows = (torch.cat([s.token_losses_BT for s in t.sums]) for t in (found, expected))
    mine = torch.cat([half.chunk(parts)[part] for half in all_rows.chunk(2)])
    far["token losses"] = relative(rows, mine)
    for index, metrics in enumerate(expected.metrics):
        assert found.metrics[index].keys() == metrics.keys()
        far |= {f"{index}/{name}": relative(found.metrics[index][name], value) for name, value in metrics.items()}
    if parts == 1:
        for field in ("objective", "ce_sum", "z_sum", "lse_sum", "lse_max"):
            far[field] = relative(*(torch.stack([getattr(s, field) for s in t.sums]) for t in (found, expected)))
    return far


KNOWN: dict[str, Trained] = {}
"""What one rank did, by config."""


def by_one_rank(config: RunConfig, vary: Vary) -> Trained:
    config = vary(config, **{"parallel.tp": 1, "parallel.data_parallel": "ddp", "parallel.recompute": "none"})
    if repr(config) not in KNOWN:
        [KNOWN[repr(config)]] = run_ranks(1, trained, config)
    return KNOWN[repr(config)]


def worst(config: RunConfig, vary: Vary, world: int, plant: Callable[[], None] | None = None) -> tuple[str, float]:
    """The name that is furthest from one rank's, on any rank, and how far."""
    alone = by_one_rank(config, vary)
    found = run_ranks(world, trained, config, plant)
    by_name = [entry for rank in found for entry in deviations(rank, alone).items()]
    return max(by_name, key=lambda entry: float("inf") if entry[1] != entry[1] else entry[1])


@pytest.fixture
def model(config: RunConfig, vary: Vary) -> RunConfig:
    """In fp64, divisible by four, with a document excluded; clipped, so that the norm matters."""
    loader = Loader(config.data, prepare(config.data), config.seed)
    source, _, row = loader.batch(0).samples_B3[0].tolist()
    gone = max(loader.row_documents(source, row), key=lambda span: span.stop - span.start).document
    cut = dataclasses.replace(config.model, vocab_size=260, loss=LossConfig(z_loss=1e-3, chunk_tokens=48))
    return vary(
        config,
        model=cut,
        **{"parallel.precision": "fp64", "optim.clip_norm": 0.1, "data.exclude": (Exclusion(document=gone),)},
    )


VARIANTS: dict[str, tuple[int, dict[str, object]]] = {
    "tp2": (2, {"parallel.tp": 2}),
    "tp4, a key head each": (
        4,
        {
            "parallel.tp": 4,
            "model.attention": GroupedQueryAttention(num_heads=8, num_kv_heads=4, d_head=4, qk_norm=True),
        },
    ),
    "tp2 x ddp2, untied": (4, {"parallel.tp": 2, "model.tie_embeddings": False, "parallel.micro_batch_size": 1}),
    "tp2 x fsdp2, QK-norm, recomputed but for products": (
        4,
        {
            "parallel.tp": 2,
            "parallel.recompute": "selective",
            "parallel.data_parallel": "fsdp",
            "parallel.micro_batch_size": 1,
            "model.attention": GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8, qk_norm=True),
        },
    ),
    "tp2, no document mask, muP, share of the embedding's gradient": (
        2,
        {
            "parallel.tp": 2,
            "data.document_mask": False,
            "model.parametrization": MuP(base_d_model=16),
            "model.embedding_gradient": 0.1,
            "model.tie_embeddings": False,
            "model.attention_backend": "sdpa",
        },
    ),
    "tp2, parts of a user's own": (
        2,
        {
            "parallel.tp": 2,
            "model.attention": Custom(build="model.out_of_tree:build", kwargs={"width": 12}),
            "model.norm": Custom(build=f"{__name__}:build_norm"),
        },
    ),
    "tp2, a feed-forward of a user's own, recomputed": (
        2,
        {
            "parallel.tp": 2,
            "parallel.recompute": "full",
            "model.feed_forward": Custom(build="model.out_of_tree:build", kwargs={"width": 9}),
        },
    ),
}


class MeanShifted(nn.Module):
    """A norm nobody merged: it looks at all tokens of a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD - 0.1 * x_BTD.cumsum(1) / torch.arange(1, x_BTD.shape[1] + 1)[:, None]
        return x_BTD * x_BTD.square().mean(-1, keepdim=True).add(1e-5).rsqrt() * self.gain.to(x_BTD.dtype)

    def roles(self) -> dict[str, str]:
        return {"gain": "norm"}

    def flops_per_token(self, seq_len: int) -> float:
        return 0.0


def build_norm(cfg: object, layer: int) -> nn.Module:
    return MeanShifted(cfg.d_model)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", VARIANTS)
def test_cut_matrices_train_as_whole_ones(model: RunConfig, vary: Vary, name: str) -> None:
    world, settings = VARIANTS[name]
    tensor_name, far = worst(vary(model, **settings), vary, world)
    assert far < FP64_RANKS, tensor_name


def test_ranks_that_share_rows_know_the_same_bits_of_them(model: RunConfig, vary: Vary) -> None:
    one, other = run_ranks(2, trained, vary(model, **{"parallel.tp": 2, "parallel.precision": "fp32"}))
    for mine, theirs in zip(one.sums, other.sums, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert one.metrics == other.metrics
    for name in ("weights/norm.weight", "exp_avg/blocks.0.attention_norm.weight", "gradient/1/norm.weight"):
        assert torch.equal(one.pieces[name][1], other.pieces[name][1])


def test_in_bf16_cut_matrices_differ_by_the_rounding_of_partial_sums(model: RunConfig, vary: Vary) -> None:
    config = vary(model, **{"parallel.tp": 2, "parallel.precision": "bf16"})
    alone = by_one_rank(config, vary)
    loss, norm, gradient = TENSOR_BF16
    for rank in run_ranks(2, trained, config):
        far = deviations(rank, alone)
        assert far["0/train/loss"] < loss
        assert far["0/train/gradient_norm"] < norm
        assert max(value for name, value in far.items() if name.startswith("gradient/0/")) < gradient


def drop_gain_sum() -> None:
    """Norms keep the gradient of their own tokens."""
    tensor_products.sum_gradient = lambda weight, ranks: weight


def drop_gathered_sum() -> None:
    """The backward of gathering keeps the rank's own part of the gradient."""
    tensor_tokens._GatherToShare.backward = staticmethod(
        lambda ctx, grad: (tensor_tokens._piece(grad, 1, ctx.ranks), None)
    )


def sum_repeated() -> None:
    """Gradients of parts that every rank computes whole are summed as if they were shares."""
    tensor_products.gather_to_repeat = tensor_products.gather_to_share


def count_heads_twice() -> None:
    """What is summed over tokens is already the sum on the first rank."""
    tensor_products.sum_to_pieces = tensor_products.keep_piece


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (drop_gain_sum, "tp4, a key head each"),
        (drop_gathered_sum, "tp2"),
        (sum_repeated, "tp2, a feed-forward of a user's own, recomputed"),
        (count_heads_twice, "tp2"),
    ],
)
def test_a_reduction_left_out_is_noticed(model: RunConfig, vary: Vary, plant: Callable[[], None], name: str) -> None:
    world, settings = VARIANTS[name]
    assert worst(vary(model, **settings), vary, world, plant)[1] > 1e-3
