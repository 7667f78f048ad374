"""Bytes on the wire by theory, against what real ranks and rank 0 on a fake process group are seen to send."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surefoot.config.parallel import PipelineConfig
from surefoot.config.run import RunConfig
from surefoot.parallel.fake_world import fake_world
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.parallel.traffic import Flow, recorded_traffic, sent
from surefoot.train.dry_run import random_batch
from surefoot.train.plan_layout import plan_layout
from surefoot.train.plan_rank import record_step
from surefoot.train.setup import set_up
from surefoot.train.step import split

Sent = dict[tuple[str, str], tuple[int, int]]
"""(axis, kind) to (calls, payload)."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "zero1 in bf16": (2, {"data_parallel": "zero1", "precision": "bf16"}),
    "zero2": (2, {"data_parallel": "zero2"}),
    "hsdp": (4, {"data_parallel": "fsdp", "shard_size": 2}),
    "tp x fsdp": (4, {"data_parallel": "fsdp", "tp": 2}),
    "tp recomputed in bf16": (2, {"tp": 2, "recompute": "full", "precision": "bf16"}),
    "ring": (2, {"data_parallel": "fsdp", "cp": 2}),
    "ring recomputed": (2, {"data_parallel": "fsdp", "cp": 2, "recompute": "selective"}),
    "exchanged heads": (2, {"data_parallel": "fsdp", "cp": 2, "cp_attention": "all_to_all"}),
    "pp": (2, {"data_parallel": "fsdp", "pp": 2}),
    "pp x fsdp": (4, {"data_parallel": "zero1", "pp": 2}),
    "interleaved": (2, {"pp": 2, "pipeline": PipelineConfig(schedule="interleaved")}),
}


@pytest.fixture
def laid_out(small: RunConfig, vary: Callable[..., RunConfig]) -> Callable[[str], tuple[int, RunConfig]]:
    def change(name: str) -> tuple[int, RunConfig]:
        ranks, settings = LAYOUTS[name]
        return ranks, vary(small, **{f"parallel.{key}": value for key, value in settings.items()})

    return change


def observed(rank: int, ranks: int, config: RunConfig) -> Sent:
    """What a real step sends; the second one, for a pipeline votes before its first."""
    world = join_world(config.parallel)
    setup, _ = set_up(config, world)
    micro_batches = split(random_batch(setup), setup)
    setup.forward_backward(micro_batches, 100.0)
    with recorded_traffic(world) as found:
        setup.forward_backward(micro_batches, 100.0)
    return {(flow.axis, flow.kind): (amount.calls, amount.payload) for flow, amount in found.items()}


def planned(config: RunConfig, ranks: int) -> Sent:
    return {(flow.axis, flow.kind): (flow.calls, flow.payload) for flow in plan_layout(config, ranks).flows}


@pytest.mark.parametrize("name", LAYOUTS)
def test_theory_is_what_ranks_send_to_the_byte(name: str, laid_out: Callable[[str], tuple[int, RunConfig]]) -> None:
    ranks, config = laid_out(name)
    assert run_ranks(ranks, observed, config)[0] == planned(config, ranks) != {}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("ring recomputed", "zero2", "pp")])
def test_rank_0_alone_on_a_fake_group_sends_the_same(
    name: str, laid_out: Callable[[str], tuple[int, RunConfig]]
) -> None:
    ranks, config = laid_out(name)
    with fake_world(config.parallel, ranks, torch.device("cpu")) as world:
        found = record_step(config, world)
    assert {(f.axis, f.kind): (a.calls, a.payload) for f, a in found.items()} == planned(config, ranks)
    assert not dist.is_initialized()


def test_replicas_sum_every_gradient_once(small: RunConfig) -> None:
    theory, real = planned(small, 2), run_ranks(2, observed, small)[0]
    _, payload = theory["world", "all_reduce"]
    num_parameters = 4 * 9 + 2
    assert real["world", "all_reduce"][1] == payload + 4 * num_parameters, "DDP's map of used parameters comes on top"


def test_a_ring_sends_less_than_the_payload() -> None:
    assert sent(Flow("shard", "all_gather"), 800, 4) == 600
    assert sent(Flow("replicate", "all_reduce"), 800, 4) == 1200
    assert sent(Flow("pp", "send"), 800, 4) == 800
