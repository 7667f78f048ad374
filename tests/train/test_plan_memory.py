"""Bytes a rank keeps by formula, against the storages that are alive after a real forward."""

import dataclasses
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from surefoot.config.errors import ConfigError
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.model.count import block_bytes, ends_bytes
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.forward_backward import PlainForwardBackward
from surefoot.parallel.mesh import join_world
from surefoot.train.dry_run import random_batch
from surefoot.train.plan_layout import plan_layout, tokens_of
from surefoot.train.setup import set_up
from surefoot.train.snapshot import GIB
from surefoot.train.step import split
from tolerances import ACTIVATION_SHARE


class Alive(TorchDispatchMode):
    """Every storage that an operator has made and nobody has let go."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage)
        return out

    def bytes_beside(self, known: set[int]) -> int:
        alive = (ref for key, ref in self.made.items() if key not in known and not ref.expired())
        return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in alive)


def kept(rank: int, ranks: int, config: RunConfig) -> int:
    """Bytes between forward and backward of one micro-batch, without weights: what autograd, recomputation and the loss keep."""
    world = join_world(config.parallel)
    setup, _ = set_up(config, world)
    passes = setup.forward_backward
    assert isinstance(passes, PlainForwardBackward)
    micro_batches = split(random_batch(setup), setup)
    passes(micro_batches, 100.0)
    mine = passes.rows.mine(micro_batches[0])
    with Alive() as alive:
        sums = passes.forward(*mine)
    assert sums.objective.isfinite()
    weights = [p for module in passes.model.modules() for p in module._parameters.values() if p is not None]
    local = [p._local_tensor if isinstance(p, DTensor) else p for p in weights]
    return alive.bytes_beside({p.untyped_storage()._cdata for p in local})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"tp": 2},
        {"tp": 2, "precision": "bf16"},
        {"tp": 2, "recompute": "selective"},
        {"recompute": "full"},
        {"cp": 2},
        {"cp": 2, "recompute": "selective"},
        {"cp": 2, "cp_attention": "all_to_all"},
    ],
    ids=str,
)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_activations_by_formula_are_what_is_alive_after_a_forward(
    small: RunConfig, vary: Callable[..., RunConfig], settings: dict[str, Any], qk_norm: bool
) -> None:
    config = vary(small, **{f"parallel.{key}": value for key, value in settings.items()})
    config = vary(config, **{"parallel.data_parallel": "fsdp", "parallel.micro_batch_size": 2, "data.seq_len": 128})
    attention = dataclasses.replace(config.model.attention, qk_norm=qk_norm)  # type: ignore[type-var]
    config = vary(config, **{"model.attention": attention})
    tokens = tokens_of(config, 2, on_cpu=True)
    formula = config.model.num_layers * block_bytes(config.model, tokens) + ends_bytes(config.model, tokens)
    assert run_ranks(2, kept, config)[0] == pytest.approx(formula, rel=ACTIVATION_SHARE)


def held(rank: int, ranks: int, config: RunConfig) -> tuple[int, int]:
    """Bytes of this rank's weights and moments."""
    _, state = set_up(config, join_world(config.parallel))
    local = {k: t._local_tensor if isinstance(t, DTensor) else t for k, t in state.tensors().items()}
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in local.items()}
    weights = sum(size for key, size in sizes.items() if key.startswith("weights/"))
    return weights, sum(sizes.values()) - weights


@pytest.mark.parametrize(
    "settings", [{}, {"data_parallel": "fsdp"}, {"data_parallel": "fsdp", "tp": 2}, {"pp": 2}], ids=str
)
def test_weights_and_moments_are_those_of_the_job(
    small: RunConfig, vary: Callable[..., RunConfig], settings: dict[str, Any]
) -> None:
    config = vary(small, **{f"parallel.{key}": value for key, value in settings.items()})
    plan = plan_layout(config, 2)
    ranks = run_ranks(2, held, config)
    assert (plan.memory.weights, plan.memory.moments) == ranks[0]
    fullest = (plan.fullest.weights, plan.fullest.moments)
    assert fullest == ranks[plan.fullest_pp] or plan.fullest_pp == 0


def llama_405b(small: RunConfig) -> RunConfig:
    """arXiv:2407.21783 table 3, and section 3.3.2 for the layout: 16,384 GPUs, 16 million tokens a batch."""
    model = ModelConfig(
        vocab_size=128256,
        d_model=16384,
        num_layers=126,
        attention=GroupedQueryAttention(num_heads=128, num_kv_heads=8, d_head=128, rope_theta=500000.0),
        feed_forward=SwiGLU(d_ff=53248),
        tie_embeddings=False,
    )
    return dataclasses.replace(
        small,
        model=model,
        data=dataclasses.replace(small.data, seq_len=8192, batch_size=2048),
        parallel=ParallelConfig(data_parallel="fsdp", tp=8, pp=16, micro_batch_size=1, precision="bf16"),
    )


def test_llama_405b_on_16384_gpus_is_planned_here_in_seconds(small: RunConfig) -> None:
    begun = time.perf_counter()
    plan = plan_layout(llama_405b(small), 16384)
    assert time.perf_counter() - begun < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2 * GIB
    assert plan.num_params == 405_853_388_800
    assert plan.axes == {"pp": 16, "replicate": 1, "shard": 128, "cp": 1, "tp": 8, "data": 128}
    assert plan.micro_batches == 16
    matrices = 8 * (2 * 16384 * 128 * (128 + 8) + 3 * 16384 * 53248) // 8 // 128
    embedding = 126 * 16384  # of 128256 / 8 / 128 = 125.25 rows the first shard has the odd one
    norms = 8 * 2 * 16384 // 128
    assert plan.memory.weights == 4 * (matrices + embedding + norms)
    assert plan.memory.moments == 2 * plan.memory.weights
    assert not dist.is_initialized()


def test_recomputing_and_fewer_micro_batches_on_their_way_keep_less(
    small: RunConfig, vary: Callable[..., RunConfig]
) -> None:
    config = llama_405b(small)
    none, selective, full = (
        plan_layout(vary(config, **{"parallel.recompute": kind}), 16384).memory.activations
        for kind in ("none", "selective", "full")
    )
    assert none > selective > full > 0
    block = tokens_of(vary(config, **{"parallel.device": "cuda"}), 1, on_cpu=False)
    assert none > 16 * 8 * block_bytes(config.model, block), "the first of 16 ranks has 16 micro-batches on their way"


def test_an_illegal_layout_is_refused_in_words(small: RunConfig, vary: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp=3 does not divide"):
        plan_layout(vary(small, **{"parallel.tp": 3}), 6)
