"""Rules between settings: the numbers and the nearest legal values."""

import dataclasses
import math
from typing import Any

import pytest

from sample_config import tiny
from surefoot.config.bounds import AT_LEAST_0, BOUNDS, numbers
from surefoot.config.codec import resolve
from surefoot.config.errors import ConfigError
from surefoot.config.run import RunConfig
from surefoot.config.schema import every_setting
from surefoot.config.validate import validate

DOCUMENT = "0123456789abcdef"


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (
            ["--model.attention.num_kv_heads=4"],
            ["model.attention.num_heads=6 is not divisible by num_kv_heads=4; nearest num_kv_heads: 2, 3"],
        ),
        (
            ["--model.attention.num_kv_heads=12"],
            ["model.attention.num_heads=6 is not divisible by num_kv_heads=12; nearest num_kv_heads: 3, 6"],
        ),
        (["--model.attention.d_head=33"], ["model.attention.d_head=33 must be even, for RoPE; nearest: 32, 34"]),
        (["--model.attention.d_head=1"], ["model.attention.d_head=1 must be at least 2"]),
        (["--model.attention.num_heads=0"], ["model.attention.num_heads=0 must be at least 1"]),
        (
            ["--model.init.truncate=0.1"],
            ["model.init.truncate=0.1 redraws nearly everything; 0 for none, else at least 0.5"],
        ),
        (
            ["--model.attention.kind=custom", "--model.attention.build=x", "--model.attention_backend=sdpa"],
            [
                "model.attention.build='x' must be package.module:function",
                "model.attention_backend='sdpa' has no effect on a custom attention; leave it 'auto'",
            ],
        ),
        (
            ["--model.attention_backend=flex", "--parallel.device=cpu"],
            ["model.attention_backend='flex' needs a GPU, and parallel.device='cpu'; on CPU: 'eager', 'sdpa', 'auto'"],
        ),
        (
            ["--model.attention_backend=flex", "--parallel.precision=fp64"],
            ["model.attention_backend='flex' has no fp64 kernel, and parallel.precision='fp64'; use 'eager' or 'sdpa'"],
        ),
        (
            ["--model.parametrization.kind=mup", "--model.parametrization.base_d_head=31"],
            [
                "model.parametrization.base_d_head=31 must be even, as heads are for RoPE, or 0 where heads keep their width; nearest: 30, 32"
            ],
        ),
        (
            [
                "--model.parametrization.kind=completep",
                "--model.parametrization.base_d_head=32",
                "--model.attention.kind=custom",
                "--model.attention.build=a:b",
            ],
            [
                "model.parametrization.base_d_head=32 has no effect on a custom attention, which scales its own logits; leave it 0"
            ],
        ),
        (
            ["--model.parametrization.kind=completep", "--model.parametrization.alpha=0.4"],
            ["model.parametrization.alpha=0.4 must be from 0.5 to 1"],
        ),
        (["--data.sources=[]"], ["data.sources is empty: a run needs at least one source of documents"]),
        (
            ["--data.sources.1.name=code"],
            ["data.sources.1.name='code' is also the name of data.sources.0; names must differ"],
        ),
        (
            ["--data.sources.1.name=my code"],
            ["data.sources.1.name='my code' must be letters, digits, '_' and '-': it is part of metric names"],
        ),
        (
            ["--data.sources.1.documents.part=code"],
            ["data.sources.1.documents are those of data.sources.0; give that source the sum of both weights"],
        ),
        (["--data.sources.0.weight=0"], ["data.sources.0.weight=0.0 must be above 0"]),
        (["--data.sources.0.weight=-1"], ["data.sources.0.weight=-1.0 must be above 0"]),
        (
            ["--data.mixture_stages", "[{start_row=5, weights=[1]}, {start_row=5, weights=[1, 0]}]"],
            [
                "data.mixture_stages.1.weights.1=0.0 must be above 0",
                "data.mixture_stages.0.weights has 1 weights for 2 sources; one each, in the order code, prose",
                "data.mixture_stages.1.start_row=5 must be above the stage before, 5",
            ],
        ),
        (
            ["--data.batch_stages", "[{start_batch=9, batch_size=64}, {start_batch=8, batch_size=128}]"],
            ["data.batch_stages.1.start_batch=8 must be above the stage before, 9"],
        ),
        (
            ["--data.exclude", f"[{{document='{DOCUMENT}'}}, {{document='{DOCUMENT}'}}, {{document='ABC'}}]"],
            [
                f"data.exclude.1.document='{DOCUMENT}' is excluded twice, also as item 0",
                "data.exclude.2.document='ABC' must be 16 hex digits (0-9, a-f), as the ledger and `data inspect` show",
            ],
        ),
        (["--data.val_fraction=1"], ["data.val_fraction=1.0 must be above 0 and below 1"]),
        (
            ["--data.tokenizer.vocab_size=5000"],
            [
                "model.vocab_size=4096 has no row for data.tokenizer.vocab_size=5000; "
                "at least 5000, or 5056 (a multiple of 64)"
            ],
        ),
        (
            ["--data.tokenizer.kind=bytes", "--model.vocab_size=256"],
            [
                "model.vocab_size=256 has no row for the 257 ids of the byte tokenizer; at least 257, or 320 (a multiple of 64)"
            ],
        ),
        (
            ["--data.tokenizer.vocab_size=256"],
            ["data.tokenizer.vocab_size=256 must be at least 257: every byte and the end of a document"],
        ),
        (["--optim.optimizer.beta2=1"], ["optim.optimizer.beta2=1.0 must be at least 0 and below 1"]),
        (
            ["--optim.lr=20"],
            ["optim.lr=20.0 times weight_decay=0.1 is 2: one step would turn the weights over; it must be below 1"],
        ),
        (
            ["--parallel.micro_batch_size=5"],
            ["data.batch_size=32 is not divisible by parallel.micro_batch_size=5; nearest: 30, 35"],
        ),
        (
            ["--checkpoint.keep_every=300"],
            [
                "checkpoint.keep_every=300 is not a multiple of checkpoint.every=200: no checkpoint falls there; nearest: 200, 400"
            ],
        ),
        (
            ["--checkpoint.every=0", "--checkpoint.keep_every=300"],
            ["checkpoint.keep_every=300 has no effect without checkpoints on the way; set checkpoint.every"],
        ),
        (
            ["--steps=300", "--optim.schedule.decay_steps=301"],
            ["optim.schedule.decay_steps=301 is longer than the run: steps=300; at most 300"],
        ),
        (["--optim.schedule.decay_fraction=1.5"], ["optim.schedule.decay_fraction=1.5 must be above 0 and at most 1"]),
        (["--optim.schedule.min_ratio=-0.1"], ["optim.schedule.min_ratio=-0.1 must be from 0 to 1"]),
        (["--bound.kind=tokens", "--bound.tokens=0"], ["bound.tokens=0.0 must be above 0"]),
        (
            ["--bound.kind=hours", "--bound.hours=2", "--optim.schedule.kind=cosine"],
            [
                "optim.schedule.kind='cosine' needs the last step from the start, which bound.kind='hours' decides on the way; "
                "use optim.schedule.kind='wsd', or bound.kind 'steps', 'tokens' or 'flops'"
            ],
        ),
        (
            ["--bound.kind=money", "--bound.money=9", "--bound.price_per_hour=3", "--optim.schedule.decay_fraction=1"],
            [
                "optim.schedule.decay_fraction=1.0 decays from the first step, before bound.kind='money' can say how steeply; "
                "below 1, such as 0.2"
            ],
        ),
        (
            ["--optim.ramp_lr=sqrt"],
            ["optim.ramp_lr='sqrt' has no effect without data.batch_stages; set it to 'none', or give stages"],
        ),
        (
            ["--data.length_stages", "[{start_batch=0, seq_len=100}, {start_batch=0, seq_len=512}]"],
            [
                "data.length_stages.0.seq_len=100 does not divide data.seq_len=256, whose rows are cut into pieces of it; nearest: 64, 128",
                "data.length_stages.1.start_batch=0 must be above the stage before, 0",
                "data.length_stages.1.seq_len=512 does not divide data.seq_len=256, whose rows are cut into pieces of it; nearest: 128, 256",
            ],
        ),
        (
            ["--log.noise_every=10", "--log.noise_pieces=5"],
            [
                "log.noise_pieces=5 does not divide the 32 rows of data.batch_size=32; pieces that do: 2, 4; "
                "nearest data.batch_size: 30, 35"
            ],
        ),
        (["--log.trackers=wandb,wandb"], ["log.trackers=['wandb', 'wandb'] names a tracker twice"]),
        (["--recipe=a/b"], ["recipe='a/b' must be letters, digits, '_' and '-': it names the run folder"]),
        (["--seed=-1"], ["seed=-1 must be from 0 to 2**63 - 1"]),
    ],
)
def test_a_broken_rule_is_told_with_its_numbers(flags: list[str], problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(tiny(), [], flags)
    assert [problem.partition(": ")[2] for problem in caught.value.problems] == problems


@pytest.mark.parametrize("kind", ["constant", "inverse_sqrt", "power"])
def test_a_schedule_that_needs_no_end_may_be_bounded_by_time(kind: str) -> None:
    resolve(tiny(), [], [f"--optim.schedule.kind={kind}", "--bound.kind=hours", "--bound.hours=2"])


def test_a_rule_points_at_the_setting_that_was_given_and_not_at_the_recipe() -> None:
    with pytest.raises(ConfigError, match=r"^--model.attention.num_heads: model.attention.num_heads=7 is not"):
        resolve(tiny(), [], ["--model.attention.num_heads", "7"])


def test_ranks_must_share_every_batch_evenly() -> None:
    config = resolve(
        tiny(), [], ["--parallel.micro_batch_size=4", "--data.batch_stages=[{start_batch=5,batch_size=52}]"]
    )
    assert validate(config) == []
    assert validate(config, world_size=1) == []
    assert validate(config, world_size=2) == [
        "data.batch_stages.0.batch_size=52 is not divisible by 2 ranks times parallel.micro_batch_size=4; nearest: 48, 56\n"
        "nearest layout on 2 ranks: --parallel.micro_batch_size 2"
    ]
    assert validate(tiny(), world_size=5) == ["data.batch_size=32 is not divisible by 5 ranks; nearest: 30, 35"]
    assert validate(tiny(), world_size=64) == [
        "data.batch_size=32 is not divisible by 64 ranks; nearest: 64\nnearest layout on 64 ranks: --parallel.tp 2"
    ]


def test_every_rank_must_have_rows_for_every_piece_of_a_noise_measurement() -> None:
    config = resolve(tiny(), [], ["--log.noise_every=10", "--log.noise_pieces=16"])
    assert validate(config, world_size=2) == []
    assert validate(config, world_size=4) == [
        "log.noise_pieces=16 does not divide the 8 rows of data.batch_size=32 over 4 ranks; pieces that do: 4, 8; "
        "nearest data.batch_size: 64"
    ]


def test_a_warm_up_of_clipping_is_held_against_steps_only_where_they_end_the_run() -> None:
    words = ["--steps=20", "--optim.clipping.kind=zclip", "--optim.clipping.warmup_steps=25"]
    with pytest.raises(ConfigError, match=r"leaves none of steps=20"):
        resolve(tiny(), [], words)
    assert resolve(tiny(), [], [*words, "--bound.kind=tokens", "--bound.tokens=1e6"]).steps == 20


def test_a_recipe_breaks_no_rule() -> None:
    assert validate(tiny()) == []


def test_every_number_of_the_config_has_a_range() -> None:
    tables = every_setting(RunConfig)
    held = {key.replace(".0", ".*") for key, setting in tables if setting.annotation in (int, float)}
    held |= {"data.mixture_stages.*.weights.*", "parallel.pipeline.layers.*"}
    assert held == set(BOUNDS)


def test_every_number_of_a_value_is_looked_at() -> None:
    found = {key for part in dataclasses.fields(RunConfig) for key in keys_of(getattr(tiny(), part.name), part.name)}
    assert {"steps", "data.sources.1.weight", "model.attention.d_head", "optim.schedule.decay_fraction"} <= found


def keys_of(value: Any, name: str) -> list[str]:
    return [key for key, _, _ in numbers(value, name)]


def test_no_range_holds_what_is_not_finite() -> None:
    assert AT_LEAST_0.holds(1e300)
    assert not AT_LEAST_0.holds(math.inf)
    assert not AT_LEAST_0.holds(math.nan)
