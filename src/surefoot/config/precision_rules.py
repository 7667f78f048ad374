"""Rules for what a precision needs, and for settings that only one precision has."""

import math
from collections.abc import Iterator

from surefoot.config.model import ModelConfig
from surefoot.config.parallel import Fp8Config, LossScaleConfig, ParallelConfig
from surefoot.config.rule import Rule


def precision_rules(parallel: ParallelConfig) -> Iterator[Rule]:
    """Settings of fp8 and of the loss scale, where they have an effect; the scale's numbers."""
    for name, of, default in (("fp8", "fp8", Fp8Config()), ("loss_scale", "fp16", LossScaleConfig())):
        value, key = getattr(parallel, name), f"parallel.{name}"
        if value != default and parallel.precision != of:
            field = next(f for f in default.__dataclass_fields__ if getattr(value, f) != getattr(default, f))
            text = (
                f"{key}.{field}={getattr(value, field)!r} has no effect with parallel.precision={parallel.precision!r}"
            )
            yield Rule((f"{key}.{field}", "parallel.precision"), f"{text}; it is for {of!r}")
    scale = parallel.loss_scale
    for field in ("initial", "smallest"):
        number, key = getattr(scale, field), f"parallel.loss_scale.{field}"
        if number > 0 and math.frexp(number)[0] != 0.5:
            below = 2.0 ** math.floor(math.log2(number))
            text = f"{key}={number!r} is not a power of two, so that scaling would round; nearest: {below:g}, {2 * below:g}"
            yield Rule((key,), text)
    if scale.initial < scale.smallest:
        keys = ("parallel.loss_scale.initial", "parallel.loss_scale.smallest")
        yield Rule(keys, f"{keys[0]}={scale.initial:g} is below {keys[1]}={scale.smallest:g}: start there or above")


def fp8_blocks(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    """Some block is left in fp8."""
    first, last = parallel.fp8.high_first_blocks, parallel.fp8.high_last_blocks
    if first + last >= model.num_layers and parallel.precision == "fp8":
        keys = ("parallel.fp8.high_first_blocks", "parallel.fp8.high_last_blocks", "model.num_layers")
        text = f"parallel.fp8.high_first_blocks={first} and high_last_blocks={last} keep all {model.num_layers} blocks high"
        yield Rule(keys, f"{text}; together at most {model.num_layers - 1}, or parallel.precision='bf16'")
