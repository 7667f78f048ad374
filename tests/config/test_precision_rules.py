"""Settings of one precision, and what they must be: value, rule, way out."""

import dataclasses

import pytest

from surefoot.config.parallel import Fp8Config, LossScaleConfig, ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.config.validate import validate


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        (
            ParallelConfig(precision="bf16", fp8=Fp8Config(high=("down",))),
            "parallel.fp8.high=('down',) has no effect with parallel.precision='bf16'; it is for 'fp8'",
        ),
        (
            ParallelConfig(loss_scale=LossScaleConfig(growth_every=10)),
            "parallel.loss_scale.growth_every=10 has no effect with parallel.precision='auto'; it is for 'fp16'",
        ),
        (
            ParallelConfig(precision="fp16", loss_scale=LossScaleConfig(initial=3000.0)),
            "parallel.loss_scale.initial=3000.0 is not a power of two, so that scaling would round; nearest: 2048, 4096",
        ),
        (
            ParallelConfig(precision="fp16", loss_scale=LossScaleConfig(initial=8.0, smallest=16.0)),
            "parallel.loss_scale.initial=8 is below parallel.loss_scale.smallest=16: start there or above",
        ),
        (
            ParallelConfig(precision="fp8", fp8=Fp8Config(high_first_blocks=1, high_last_blocks=1)),
            "parallel.fp8.high_first_blocks=1 and high_last_blocks=1 keep all 2 blocks high; together at most 1, or "
            "parallel.precision='bf16'",
        ),
        (
            ParallelConfig(precision="fp8", fp8=Fp8Config(high_first_blocks=-1)),
            "parallel.fp8.high_first_blocks=-1 must be at least 0",
        ),
        (
            ParallelConfig(precision="fp16", loss_scale=LossScaleConfig(smallest=0.0)),
            "parallel.loss_scale.smallest=0.0 must be above 0",
        ),
    ],
)
def test_a_broken_rule_is_told_with_its_way_out(config: RunConfig, parallel: ParallelConfig, problem: str) -> None:
    assert validate(dataclasses.replace(config, parallel=parallel)) == [problem]


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(precision="fp8", fp8=Fp8Config(recipe="blockwise", high=("attention",), high_last_blocks=1)),
        ParallelConfig(precision="fp16", loss_scale=LossScaleConfig(initial=2.0**24, growth_every=100, smallest=0.25)),
        ParallelConfig(precision="bf16_pure"),
    ],
)
def test_what_is_sound_breaks_no_rule(config: RunConfig, parallel: ParallelConfig) -> None:
    assert validate(dataclasses.replace(config, parallel=parallel)) == []
