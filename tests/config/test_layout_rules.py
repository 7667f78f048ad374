"""What cannot be cut is refused with numbers, and with the nearest layout that can be."""

import dataclasses
import random
import time
from typing import Any

import pytest

from sample_config import tiny
from surefoot.config.codec import resolve
from surefoot.config.errors import ConfigError
from surefoot.config.layout import in_words, layout_of
from surefoot.config.layout_rules import fills_pipeline, stages_per_rank
from surefoot.config.layout_search import as_flags, check_layout, is_legal, nearest_layout
from surefoot.config.model import GroupedQueryAttention, SwiGLU
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.config.validate import validate

SEARCH_S = 1.0
"""Longest search for a layout, seconds of processor time; 0.1 alone, up to three times that on a busy machine."""
BUILD = ["--model.attention.kind=custom", "--model.attention.build=a:b"]
PIPELINE = ["--parallel.pp=2", "--parallel.micro_batch_size=4"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--parallel.tp=4"],
            "parallel.tp=4 does not divide model.attention.num_heads=6, which its ranks share out; nearest: 1, 2",
        ),
        (["--parallel.tp=3"], "parallel.tp=3 does not divide model.attention.num_kv_heads=2"),
        (["--parallel.tp=3", "--model.feed_forward.d_ff=510"], "parallel.tp=3 does not divide model.vocab_size=4096"),
        (["--parallel.tp=2", "--model.feed_forward.d_ff=511"], "does not divide model.feed_forward.d_ff=511"),
        (["--parallel.tp=2", "--data.seq_len=255"], "data.seq_len=255 tokens are not divided evenly by parallel.cp=1"),
        (
            ["--parallel.cp=4", "--data.seq_len=260"],
            "data.seq_len=260 tokens are not divided evenly by parallel.cp=4 in two pieces for each rank of the ring: "
            "rows are multiples of 8; nearest: 256, 264",
        ),
        (
            ["--parallel.cp=4", "--data.length_stages=[{start_batch=0,seq_len=4}]"],
            "data.length_stages.0.seq_len=4 tokens are not divided evenly by parallel.cp=4",
        ),
        (
            ["--parallel.cp=4", "--parallel.cp_attention=all_to_all"],
            "parallel.cp=4 does not divide model.attention.num_heads=6, which parallel.cp_attention='all_to_all' deals out; "
            "nearest: 1, 2, or parallel.cp_attention='ring'",
        ),
        (
            ["--parallel.cp=2", "--parallel.tp=2", "--parallel.cp_attention=all_to_all"],
            "parallel.cp=2 does not divide model.attention.num_kv_heads=2 (1 on each of parallel.tp=2)",
        ),
        (
            ["--parallel.cp=2", "--model.attention_backend=sdpa"],
            "model.attention_backend='sdpa' has no effect with parallel.cp_attention='ring'",
        ),
        (["--parallel.cp=2", *BUILD], "parallel.cp=2 cannot run model.attention.build='a:b'"),
        (
            ["--parallel.cp=2", "--model.feed_forward.kind=custom", "--model.feed_forward.build=a:b"],
            "parallel.cp=2 cannot run model.feed_forward.build='a:b': it would be given a part of the row's tokens",
        ),
        (
            [*PIPELINE, "--parallel.pipeline.schedule=zbv", "--parallel.recompute=selective"],
            "parallel.recompute='selective' keeps results for one backward, and parallel.pipeline.schedule='zbv' runs two",
        ),
        (["--parallel.cp_attention=all_to_all"], "has no effect with parallel.cp=1; leave it 'ring'"),
        (
            ["--parallel.pp=8"],
            "model.num_layers=4 are fewer than the 8 stages of parallel.pp=8; at most parallel.pp=4",
        ),
        (
            [*PIPELINE, "--parallel.pipeline.schedule=zbv", "--parallel.pipeline.stages_per_rank=3"],
            "parallel.pipeline.stages_per_rank=3 does not go with parallel.pipeline.schedule='zbv', which runs 2 on a rank",
        ),
        (
            [*PIPELINE, "--parallel.pipeline.stages_per_rank=2"],
            "does not go with parallel.pipeline.schedule='1f1b', which runs 1 on a rank; set 1, or 0",
        ),
        (
            [*PIPELINE, "--parallel.pipeline.schedule=interleaved", "--parallel.pipeline.stages_per_rank=1"],
            "which runs at least 2 on a rank",
        ),
        (
            [*PIPELINE, "--parallel.pipeline.layers=2,1,1"],
            "parallel.pipeline.layers gives 3 numbers for the 2 stages of parallel.pp=2; give 2",
        ),
        (
            [*PIPELINE, "--parallel.pipeline.layers=2,1"],
            "parallel.pipeline.layers=[2, 1] are 3 layers of model.num_layers=4; together 4",
        ),
        ([*PIPELINE, "--parallel.pipeline.layers=4,0"], "parallel.pipeline.layers.1=0 must be at least 1"),
        (
            ["--parallel.pipeline.schedule=zbv"],
            "parallel.pipeline.schedule='zbv' has no effect with parallel.pp=1; leave it '1f1b'",
        ),
        (["--parallel.shard_size=2"], "parallel.shard_size=2 has no effect with parallel.data_parallel='ddp'"),
        (["--parallel.offload=true"], "parallel.offload=true needs sharded moments"),
        (["--parallel.nccl.tp.max_ctas=8"], "parallel.nccl.tp.max_ctas=8 has no effect with parallel.tp=1"),
        (
            ["--parallel.nccl.data.high_priority=true", "--parallel.device=cpu"],
            "parallel.nccl.data.high_priority=True has no effect on a CPU, where there is no NCCL",
        ),
        (["--parallel.tp=2", "--parallel.precision=fp8"], "parallel.precision='fp8' with parallel.tp=2 would take"),
        (
            ["--parallel.recompute=full", "--parallel.compile=on", "--optim.qk_clip=100"],
            "parallel.compile='on' would compile nothing with parallel.recompute='full' and optim.qk_clip=100",
        ),
        (
            ["--parallel.recompute=full", "--parallel.compile=on", "--parallel.tp=2", *BUILD],
            "and a custom part under parallel.tp=2, which leaves the compiled graph of a block",
        ),
    ],
)
def test_what_no_number_of_ranks_can_run_is_refused_at_once(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny(), [], flags)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--parallel.tp=0"],
        ["--parallel.cp=-1"],
        ["--parallel.pp=0"],
        ["--parallel.tp=2", "--model.attention.num_heads=0", "--model.attention.num_kv_heads=0"],
        ["--parallel.pp=2", "--parallel.pipeline.stages_per_rank=-1"],
    ],
)
def test_numbers_out_of_range_are_the_only_mistake(flags: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny(), [], flags)
    assert all("must be at least" in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("flags", "world_size", "problem"),
    [
        (["--parallel.tp=2"], 1, "parallel.tp=2 needs 2 ranks, and there is one: torchrun --nproc-per-node 2"),
        (
            PIPELINE,
            3,
            "3 ranks do not divide over parallel.pp=2; nearest numbers of ranks: 2, 4",
        ),
        (
            ["--parallel.data_parallel=fsdp", "--parallel.shard_size=3"],
            8,
            "parallel.shard_size=3 does not divide 8 data-parallel ranks; nearest: 2, 4\n"
            "nearest layout on 8 ranks: --parallel.shard_size 4",
        ),
        (
            ["--parallel.tp=2"],
            128,
            "data.batch_size=32 is not divisible by 64 data-parallel ranks (of 128); nearest: 64\n"
            "nearest layout on 128 ranks: --parallel.cp 2",
        ),
        (
            ["--parallel.pp=2"],
            8,
            "parallel.pipeline.schedule='1f1b' takes at least 2 micro-batches, one for each stage, and data.batch_size=32 on "
            "4 data-parallel ranks (of 8) makes 1 of 8 rows; nearest parallel.micro_batch_size: 2, 4\n"
            "nearest layout on 8 ranks: --parallel.micro_batch_size 4",
        ),
        (
            ["--parallel.pp=2", "--parallel.pipeline.schedule=dualpipev", "--parallel.micro_batch_size=8"],
            4,
            "takes at least 4 micro-batches, one for each stage, and data.batch_size=32 on 2 data-parallel ranks (of 4) makes 2",
        ),
        (
            [*PIPELINE, "--log.noise_every=10", "--log.noise_pieces=4"],
            4,
            "log.noise_pieces=4 leaves 4 rows of data.batch_size=32 to a piece on each of 2 data-parallel ranks, which "
            "micro-batches of 4 do not fill the pipeline with; parallel.micro_batch_size: at most 2",
        ),
    ],
)
def test_what_these_ranks_cannot_run_is_refused_with_the_nearest_layout(
    flags: list[str], world_size: int, problem: str
) -> None:
    config = resolve(tiny(), [], flags)
    found = validate(config, world_size)
    assert [problem in text for text in found] == [True]
    with pytest.raises(ConfigError):
        check_layout(config, world_size)


def test_the_nearest_layout_is_as_easily_typed() -> None:
    config = resolve(tiny(), [], ["--parallel.pp=2", "--parallel.pipeline.layers=1,3", "--parallel.micro_batch_size=8"])
    near = nearest_layout(config.model, config.data, config.parallel, config.log, 3 * 4)
    assert near is not None
    flags = as_flags(config.parallel, near)
    typed = resolve(config, [], flags.split())
    assert typed.parallel == near
    assert validate(typed, 12) == []


def test_micro_batches_are_counted_as_torchs_schedules_count_them() -> None:
    """Which numbers the schedules themselves refuse, in torch.distributed.pipelining.schedules of 2.13."""
    parallel = dataclasses.replace(tiny().parallel, pp=4)
    legal = {
        name: [n for n in range(1, 13) if fills_pipeline(_with_schedule(parallel, name), n)]
        for name in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
    }
    assert legal["gpipe"] == legal["zbv"] == list(range(1, 13))
    assert legal["1f1b"] == list(range(4, 13))
    assert legal["interleaved"] == legal["zero_bubble"] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert legal["dualpipev"] == list(range(8, 13))


def _with_schedule(parallel: Any, name: str) -> Any:
    return dataclasses.replace(parallel, pipeline=dataclasses.replace(parallel.pipeline, schedule=name))


def random_config(draw: random.Random) -> RunConfig | None:
    """None where the settings are wrong on any number of ranks."""
    pick = draw.choice
    flags = {
        "model.num_layers": pick([4, 6, 8, 12]),
        "model.attention.num_heads": 12,
        "model.attention.num_kv_heads": pick([2, 4, 6, 12]),
        "data.seq_len": pick([192, 256, 384]),
        "data.batch_size": pick([24, 32, 48, 96]),
        "parallel.data_parallel": pick(["ddp", "zero1", "fsdp"]),
        "parallel.tp": pick([1, 1, 2, 3, 4]),
        "parallel.pp": pick([1, 1, 2, 3]),
        "parallel.cp": pick([1, 1, 2, 4]),
        "parallel.micro_batch_size": pick([0, 1, 2, 4]),
    }
    if flags["parallel.data_parallel"] != "ddp":
        flags["parallel.shard_size"] = pick([0, 0, 1, 2, 3])
    if flags["parallel.pp"] > 1:
        flags["parallel.pipeline.schedule"] = pick(["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"])
    if flags["parallel.cp"] > 1:
        flags["parallel.cp_attention"] = pick(["ring", "all_to_all"])
    try:
        return resolve(tiny(), [], [f"--{key}={value}" for key, value in flags.items()])
    except ConfigError:
        return None


def test_what_is_accepted_has_a_layout_and_what_is_suggested_is_accepted() -> None:
    draw = random.Random(5)
    accepted = suggested = hopeless = 0
    while accepted + suggested < 200:
        config, world_size = random_config(draw), draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
        if config is None:
            continue
        problems = validate(config, world_size)
        near = nearest_layout(config.model, config.data, config.parallel, config.log, world_size)
        if not problems:
            accepted += 1
            layout = layout_of(config.parallel, world_size)
            assert layout.size == world_size
            assert layout.shard * layout.replicate == layout.data * layout.cp
            assert near == config.parallel
            assert stages_per_rank(config.parallel.pipeline) * layout.pp <= config.model.num_layers
        elif near is None:
            hopeless += 1
        else:
            suggested += 1
            assert validate(dataclasses.replace(config, parallel=near), world_size) == []
            assert world_size == 1 or as_flags(config.parallel, near) in problems[-1]
    assert min(accepted, suggested) > 50
    assert hopeless < 40


def test_the_search_is_quick_at_sixteen_thousand_ranks() -> None:
    small = tiny()
    model = dataclasses.replace(
        small.model,
        vocab_size=128256,
        d_model=16384,
        num_layers=126,
        attention=GroupedQueryAttention(num_heads=128, num_kv_heads=8, d_head=128),
        feed_forward=SwiGLU(d_ff=53248),
    )
    data = dataclasses.replace(small.data, batch_size=2048, seq_len=8192)
    parallel = dataclasses.replace(small.parallel, data_parallel="fsdp")
    begun = time.process_time()
    near = nearest_layout(model, data, parallel, small.log, 16384)
    assert time.process_time() - begun < SEARCH_S
    assert near is not None
    assert is_legal(model, data, near, small.log, 16384)
    assert as_flags(parallel, near) == "--parallel.tp 8"


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({}, 2, "ddp 2"),
        ({"tp": 2}, 2, "tp 2"),
        ({"data_parallel": "fsdp", "shard_size": 4, "tp": 2, "pp": 2}, 32, "pp 2, 2 x fsdp 4, tp 2"),
        ({"data_parallel": "zero1", "cp": 2}, 4, "zero1 2, cp 2"),
    ],
)
def test_a_layout_is_said_axis_by_axis(settings: dict[str, Any], ranks: int, words: str) -> None:
    parallel = ParallelConfig(**settings)
    assert in_words(parallel, layout_of(parallel, ranks)) == words


def test_a_batch_of_fewer_rows_than_ranks_is_refused_where_noise_is_measured_too() -> None:
    config = resolve(tiny(), [], ["--log.noise_every=2", "--data.batch_size=4"])
    assert any("data.batch_size=4" in text for text in validate(config, 8))


def test_offload_is_refused_where_one_rank_would_ignore_it() -> None:
    config = resolve(tiny(), [], ["--parallel.offload=true", "--parallel.data_parallel=zero1"])
    assert validate(config, 2) == []
    assert any("parallel.offload=true has no effect on one rank" in text for text in validate(config, 1))
