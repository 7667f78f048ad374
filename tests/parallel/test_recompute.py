"""What is computed again is what was computed: the same bits, for less memory, with nothing counted twice."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.attention_maxima import AttentionMaxima
from surefoot.model.loss import LossSums
from surefoot.model.parametrization import initialise
from surefoot.model.transformer import Transformer
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.parallel.recompute import recompute_blocks
from surefoot.train.setup import set_up
from surefoot.train.step import split
from tolerances import COMPILED

LAYERS, ROWS, TOKENS = 4, 2, 192
RECOMPUTE = ("full", "selective")


def network(recompute: str, backend: str = "eager", dtype: torch.dtype = torch.float32) -> Transformer:
    config = ModelConfig(
        vocab_size=64,
        d_model=32,
        num_layers=LAYERS,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8),
        feed_forward=SwiGLU(d_ff=80),
        attention_backend=backend,  # type: ignore[arg-type]
    )
    model = Transformer(config, dtype)
    initialise(model, config, seed=0)
    recompute_blocks(model, ParallelConfig(recompute=recompute))  # type: ignore[arg-type]
    return model


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    return tokens, positions, (positions // 70).int(), tokens.roll(-1, dims=1)


def passed(model: Transformer) -> tuple[LossSums, dict[str, Tensor]]:
    sums: LossSums = model(*batch())
    torch.autograd.backward(sums.objective / 100)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return sums, grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_losses_and_gradients_keep_their_bits_and_parameters_their_names(
    recompute: str, backend: str, dtype: torch.dtype
) -> None:
    sums, grads = passed(network("none", backend, dtype))
    again, grads_again = passed(network(recompute, backend, dtype))
    assert all(torch.equal(a, b) for a, b in zip(sums, again, strict=True))
    assert list(grads) == list(grads_again)
    assert [name for name in grads if not torch.equal(grads[name], grads_again[name])] == []


def held_after_forward(model: Transformer) -> float:
    """Bytes that a forward leaves in memory per layer."""
    model(*batch())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        sums = model(*batch())
    assert sums.objective.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiled.key_averages()) / LAYERS


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_full_keeps_a_block_s_input_and_selective_the_results_of_products(backend: str) -> None:
    """Besides, whatever the layout of the blocks keeps, the loss keeps its gradients and a forward its angles and its mask."""
    held = {kind: held_after_forward(network(kind, backend)) for kind in ("none", *RECOMPUTE)}
    token = ROWS * TOKENS * torch.float32.itemsize
    products = token * (32 + 16 + 16 + 32 + 80 + 80 + 32)
    attention = token * (32 + 4) if backend == "sdpa" else 0
    assert held["selective"] - held["full"] == pytest.approx(products + attention, rel=0.02)
    assert held["none"] > 2 * held["selective"]


class Count(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[str(func)] += 1
        return func(*args, **(kwargs or {}))


def runs_in_backward(recompute: str, backend: str) -> Counter[str]:
    sums = network(recompute, backend)(*batch())
    with Count() as count:
        torch.autograd.backward(sums.objective)
    return count.runs


def test_selective_computes_no_product_and_no_fused_attention_again() -> None:
    plain, full, selective = (runs_in_backward(kind, "sdpa") for kind in ("none", "full", "selective"))
    product, attention = "aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"
    # the last product of a block is needed by nothing in its backward
    assert (full[product] - plain[product], selective[product] - plain[product]) == (6 * LAYERS, 0)
    assert (full[attention], selective[attention]) == (LAYERS, 0)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_logits_computed_again_are_not_counted_again(recompute: str) -> None:
    found = []
    for kind in ("none", recompute):
        model = network(kind)
        model.maxima = AttentionMaxima(0.0, LAYERS, 4)
        seen: list[int] = []
        see = model.maxima.see
        model.maxima.see = lambda q, k, see=see, seen=seen: (seen.append(1), see(q, k))[1]  # type: ignore[misc]
        with model.maxima.watch():
            passed(model)
        assert len(seen) == LAYERS * (1 if kind == "none" else 2)
        found.append(model.maxima.largest_LN)
    assert torch.equal(*found)
    assert found[0].min() > -torch.inf


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_forward_without_gradients_is_what_it_was_and_keeps_nothing(recompute: str) -> None:
    with torch.no_grad():
        plain, again = network("none")(*batch()), network(recompute)(*batch())
    assert torch.equal(plain.token_losses_BT, again.token_losses_BT)
    assert not again.objective.requires_grad


@pytest.mark.filterwarnings("ignore")
def test_blocks_that_are_computed_again_are_compiled() -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    _, plain = passed(network("none"))
    model = network("selective")
    for block in model.blocks.children():
        block.compile()
    _, compiled = passed(model)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    for name, gradient in plain.items():
        assert float((compiled[name] - gradient).norm() / gradient.norm()) < COMPILED[torch.float32]


def gradients_of_ranks(rank: int, world: int, config: RunConfig) -> dict[str, Tensor]:
    """Of two micro-batches, twice, this rank's pieces."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    loader = Loader(config.data, prepare(config.data), config.seed)
    for index in range(2):
        rows = loader.batch(index, (), here.data_rank, here.data_size)
        setup.forward_backward(split(rows, setup), rows.num_targets)
    setup.forward_backward.forward_only(split(rows, setup))
    grads = {name: parameter.grad for name, parameter in state.parameters.items()}
    return {
        name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in grads.items() if grad is not None
    }


@pytest.mark.parametrize(
    ("num_ranks", "recompute", "layout"),
    [
        (2, "full", {"parallel.micro_batch_size": 1}),
        (2, "selective", {"parallel.micro_batch_size": 1, "parallel.data_parallel": "fsdp"}),
        (4, "selective", {"parallel.data_parallel": "fsdp", "parallel.tp": 2, "parallel.cp": 2}),
    ],
)
def test_ranks_compute_again_what_they_computed(
    config: RunConfig, vary: Callable[..., RunConfig], num_ranks: int, recompute: str, layout: dict[str, object]
) -> None:
    config = vary(config, **{"model.vocab_size": 258}, **layout)
    plain = run_ranks(num_ranks, gradients_of_ranks, config)
    again = run_ranks(num_ranks, gradients_of_ranks, vary(config, **{"parallel.recompute": recompute}))
    for one, other in zip(plain, again, strict=True):
        assert len(one) == len(other) == 20
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
