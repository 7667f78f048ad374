"""What the layouts promise beyond equal results: the order of sums, and the type that gradients are summed in."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.model.parts import Embedding
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.forward_backward import PlainForwardBackward, WideForwardBackward
from surefoot.parallel.mesh import join_world
from surefoot.train.setup import set_up
from surefoot.train.step import split, train_step


def rebuilt_buckets(rank: int, world: int, config: RunConfig) -> bool:
    """Whether DDP has regrouped its buckets after three steps."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    loader = Loader(config.data, prepare(config.data), config.seed)
    for index in range(3):
        train_step(state, loader.batch(index, (), rank, world), setup)
    assert isinstance(setup.forward_backward, PlainForwardBackward)
    facts = setup.forward_backward.forward._get_ddp_logging_data()  # type: ignore[operator]
    return bool(facts["has_rebuilt_buckets"])


@pytest.mark.parametrize(("determinism", "rebuilt"), [("strict", False), ("fast", True)])
def test_under_strict_determinism_the_first_step_sums_in_the_order_of_all_others(
    config: RunConfig, vary: Callable[..., RunConfig], determinism: str, rebuilt: bool
) -> None:
    """A resumed process begins with a first step where the uninterrupted one is far beyond it."""
    assert run_ranks(2, rebuilt_buckets, vary(config, determinism=determinism)) == [rebuilt, rebuilt]


def gradients_beyond_bf16(rank: int, world: int, config: RunConfig) -> float:
    """The share of this rank's gradient elements that bf16 could not hold."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    batch = Loader(config.data, prepare(config.data), config.seed).batch(0, (), rank, world)
    setup.forward_backward(split(batch, setup), batch.num_targets)
    beyond = total = 0
    for parameter in state.parameters.values():
        assert isinstance(parameter.grad, DTensor)
        local = parameter.grad.to_local()
        assert local.dtype == torch.float32
        beyond += int((local != local.bfloat16().float()).sum())
        total += local.numel()
    return beyond / total


def test_bf16_gradients_are_summed_over_shards_in_fp32(config: RunConfig, vary: Callable[..., RunConfig]) -> None:
    config = vary(config, **{"parallel.precision": "bf16", "parallel.data_parallel": "fsdp"})
    assert min(run_ranks(2, gradients_beyond_bf16, config)) > 0.2


def first_losses(rank: int, world: int, config: RunConfig) -> torch.Tensor:
    """Token losses of the whole first batch at the initial weights, by a forward of all rows on every rank."""
    here = join_world(config.parallel)
    setup, _ = set_up(config, here)
    batch = Loader(config.data, prepare(config.data), config.seed).batch(0)
    return setup.forward_backward.forward_only(split(batch, setup))[0].token_losses_BT


@pytest.mark.parametrize("kind", ["fsdp", "zero1"])
def test_under_sharding_a_bf16_forward_keeps_its_bits(
    config: RunConfig, vary: Callable[..., RunConfig], kind: str
) -> None:
    """FSDP2 casts what it finds among a block's arguments: the angles of rotary positions were rounded to bf16 by it, unseen."""
    config = vary(config, **{"parallel.precision": "bf16"})
    alone = first_losses(0, 1, config)
    for found in run_ranks(2, first_losses, vary(config, **{"parallel.data_parallel": kind})):
        assert torch.equal(found, alone)


class Idle(Embedding):
    """Has a parameter that it does not use."""

    def __init__(self, like: Embedding) -> None:
        super().__init__(*like.weight.shape, like.compute_dtype)
        self.weight, self.idle = like.weight, torch.nn.Parameter(torch.ones(3, dtype=like.weight.dtype))


def gradients_there(rank: int, world: int, config: RunConfig) -> tuple[bool, bool]:
    """Whether the idle parameter and the embedding have a gradient after two micro-batches in bf16."""
    here = join_world(config.parallel)
    setup, _ = set_up(config, here)
    passes = setup.forward_backward
    assert isinstance(passes, WideForwardBackward)
    embedding = passes.model.embedding
    assert isinstance(embedding, Embedding)
    passes.model.embedding = idle = Idle(embedding)
    batch = Loader(config.data, prepare(config.data), config.seed).batch(0, (), rank, world)
    passes(split(batch, setup), batch.num_targets)
    return idle.idle.grad is not None, idle.weight.grad is not None


def test_what_nothing_uses_has_no_gradient_under_pure_bf16_either(
    config: RunConfig, vary: Callable[..., RunConfig]
) -> None:
    """A zero instead of none would be decayed."""
    config = vary(config, **{"parallel.precision": "bf16_pure", "parallel.micro_batch_size": 1})
    assert run_ranks(2, gradients_there, config) == [(False, True)] * 2
