"""What the guard and the rows are told is the same whatever the layout: probes, evaluation, noise, clipping per tensor, QK-clip, broken gradients."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from surefoot.config.layout import layout_of
from surefoot.config.model import GroupedQueryAttention
from surefoot.config.optim import AdaGC, OptimConfig
from surefoot.config.parallel import ParallelConfig, PipelineConfig
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.guard.limits import Limits
from surefoot.guard.signals import ProbeSignals
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import join_world
from surefoot.train.evaluate import TrainingData, evaluate
from surefoot.train.investigate import token_losses
from surefoot.train.probes import probe_rows, take_probe
from surefoot.train.setup import set_up
from surefoot.train.step import train_step
from tolerances import FP64_RANKS

FP64 = ParallelConfig(device="cpu", precision="fp64", threads=1)
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "ddp": (2, dataclasses.replace(FP64, data_parallel="ddp")),
    "fsdp": (2, dataclasses.replace(FP64, data_parallel="fsdp")),
    "hsdp": (4, dataclasses.replace(FP64, data_parallel="fsdp", shard_size=2)),
    "tp": (2, dataclasses.replace(FP64, tp=2)),
    "tp x fsdp": (4, dataclasses.replace(FP64, tp=2, data_parallel="fsdp")),
    "ring": (2, dataclasses.replace(FP64, cp=2)),
    "all to all": (2, dataclasses.replace(FP64, cp=2, cp_attention="all_to_all")),
    "pp": (2, dataclasses.replace(FP64, pp=2, micro_batch_size=1)),
    "zbv": (2, dataclasses.replace(FP64, pp=2, micro_batch_size=1, pipeline=PipelineConfig(schedule="zbv"))),
    "pp x tp": (4, dataclasses.replace(FP64, pp=2, tp=2, micro_batch_size=1)),
    "cp x tp": (4, dataclasses.replace(FP64, cp=2, tp=2)),
}


@pytest.fixture
def several(config: RunConfig, vary: Callable[..., RunConfig]) -> RunConfig:
    """Four layers, so that every stage has two in any order; grouped heads; clipping per tensor, QK-clip at a threshold that every head passes."""
    model = dataclasses.replace(
        config.model,
        num_layers=4,
        d_model=32,
        vocab_size=260,
        attention=GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=8, qk_norm=False),
        feed_forward=dataclasses.replace(config.model.feed_forward, d_ff=64),
    )
    optim = OptimConfig(warmup_steps=1, clipping=AdaGC(warmup_steps=1), qk_clip=1e-4)
    return vary(
        config,
        model=model,
        optim=optim,
        **{"parallel": FP64, "data.seq_len": 64, "data.batch_size": 8, "guard.probe_rows": 2, "log.noise_every": 2},
        **{"log.noise_pieces": 2},
    )


def told(rank: int, world: int, config: RunConfig) -> dict[str, object]:
    """All that a rank knows after two updates and a batch that is broken on one rank of the last stage."""
    here = join_world(config.parallel)
    setup, state = set_up(config, here)
    data = TrainingData.open(config, prepare(config.data))
    rows = []
    for index in range(3):
        batch = data.loader.batch(index, (), here.data_rank, here.data_size)
        if index == 2:
            losses = token_losses(batch, setup).sum(1).tolist()
            _break(setup, state, "blocks.3.feed_forward.down.weight")
        outcome = train_step(state, batch, setup, limits=Limits())
        rows.append(outcome.metrics | {"refused": float(outcome.skipped)})
    probe = take_probe(state, setup, probe_rows(data, setup), 1e-3)
    return {
        "rows": rows,
        "first broken": outcome.signals.first_nonfinite,
        "probe": probe,
        "evaluation": dataclasses.asdict(evaluate(setup, data.held_out[0], 4)),
        "token losses": losses,
        "clip": {name: float(t) for name, t in state.tensors().items() if name.startswith("clip/")},
        "data rank": here.data_rank,
    }


def _break(setup, state, name: str) -> None:  # type: ignore[no-untyped-def]
    """From now on one element of a gradient is infinite, on every rank that holds it."""
    inner = setup.forward_backward

    class Broken:
        def forward_only(self, micro_batches):  # type: ignore[no-untyped-def]
            return inner.forward_only(micro_batches)

        def __call__(self, micro_batches, num_targets):  # type: ignore[no-untyped-def]
            sums = inner(micro_batches, num_targets)
            if name in state.parameters:
                grad = state.parameters[name].grad
                local = getattr(grad, "_local_tensor", grad)
                if local.numel():
                    local.view(-1)[0] = math.inf
            return sums

    object.__setattr__(setup, "forward_backward", Broken())


def alone(config: RunConfig) -> dict[str, object]:
    (result,) = run_ranks(1, told, config)
    return result


def flat(probe: ProbeSignals) -> dict[str, float]:
    figures = {f"{r.role}/{k}": v for r in probe.roles for k, v in dataclasses.asdict(r).items() if k != "role"}
    figures |= {f"{p.layer}/{k}": v for p in probe.layers for k, v in dataclasses.asdict(p).items()}
    return figures | {"finite": float(probe.weights_finite), "beta2": probe.beta2}


def differing(found: dict[str, float], expected: dict[str, float]) -> dict[str, tuple[float, float]]:
    assert found.keys() == expected.keys()
    return {
        name: (value, expected[name])
        for name, value in found.items()
        if not (math.isnan(value) and math.isnan(expected[name]))
        and value != pytest.approx(expected[name], rel=FP64_RANKS, abs=FP64_RANKS)
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_is_told_what_one_process_knows(several: RunConfig, name: str) -> None:
    world, parallel = LAYOUTS[name]
    config = dataclasses.replace(several, parallel=parallel)
    expected = alone(several)
    assert expected["first broken"] == "blocks.3.feed_forward.down.weight"
    assert any(row.get("train/heads_clipped", 0) > 0 for row in expected["rows"])  # type: ignore[attr-defined]
    ranks = run_ranks(world, told, config, timeout_s=120)
    layout = layout_of(parallel, world)
    for found in ranks:
        for row, of_one in zip(found["rows"], expected["rows"], strict=True):  # type: ignore[call-overload]
            counted = {key for key in row if key != "train/nonfinite"}  # one element per rank that holds it
            assert not differing({k: row[k] for k in counted}, {k: of_one[k] for k in counted})
        assert found["first broken"] == expected["first broken"]
        assert not differing(flat(found["probe"]), flat(expected["probe"]))
        assert not differing(found["evaluation"], expected["evaluation"])
        assert not differing(found["clip"], expected["clip"])
        part = 8 // layout.data
        mine = expected["token losses"][found["data rank"] * part : (found["data rank"] + 1) * part]  # type: ignore[index]
        torch.testing.assert_close(torch.tensor(found["token losses"]), torch.tensor(mine), rtol=FP64_RANKS, atol=0)
