"""What a run is bounded by, as its last step where that can be known before it starts."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from surefoot.config.data import DataConfig
from surefoot.config.errors import ConfigError
from surefoot.config.optim import WSD
from surefoot.config.run import ByFlops, ByHours, ByMoney, BySteps, ByTokens, RunConfig
from surefoot.data.mixture import BatchStarts
from surefoot.model.count import flops_per_token
from surefoot.model.parts import custom_count
from surefoot.model.transformer import Transformer
from surefoot.train.cutting import seq_len_at

OPEN_END = 2**53
"""The last step of a run whose clock has not decided it yet: beyond any."""


def bound_seconds(config: RunConfig) -> float:
    """Training time that a bound in hours or money allows; 0 for the others."""
    match config.bound:
        case ByHours(hours=hours):
            return 3600.0 * hours
        case ByMoney(money=money, price_per_hour=price):
            return 3600.0 * money / price
    return 0.0


def planned_steps(config: RunConfig, flops_at: Callable[[int], float]) -> int:
    """The run's last step, as far as it is known before the run starts; ``OPEN_END`` where the clock decides.

    ``flops_at``: operations per token of rows of a length. Batches whose update is skipped come on top of tokens and FLOPs. Raises
    ConfigError when the decay of WSD is longer than the run.
    """
    match config.bound:
        case BySteps():
            steps, asked = config.steps, f"steps={config.steps}"
        case ByTokens(tokens=tokens):
            steps = batches_until(config.data, tokens, lambda _: 1.0)
            asked = f"bound.tokens={tokens:g} ends it at step {steps}"
        case ByFlops(flops=flops):
            steps = batches_until(config.data, flops, flops_at)
            asked = f"bound.flops={flops:g} ends it at step {steps}"
        case ByHours() | ByMoney():
            return OPEN_END
    schedule = config.optim.schedule
    if isinstance(schedule, WSD) and schedule.decay_steps > steps:
        key = "optim.schedule.decay_steps"
        raise ConfigError([f"{key}={schedule.decay_steps} is longer than the run: {asked}; at most {steps}"])
    return steps


def steps_of(config: RunConfig) -> int:
    """``planned_steps`` from the config alone; the model is built without memory where its own parts have to say what they cost."""
    if not isinstance(config.bound, ByFlops):
        return planned_steps(config, lambda _: 0.0)
    with torch.device("meta"):
        model = Transformer(config.model, torch.float32)
    return planned_steps(config, lambda n: flops_per_token(config.model, n, custom_count(model, n)))


def batches_until(data: DataConfig, amount: float, per_token: Callable[[int], float]) -> int:
    """How many batches it takes to bring tokens, each counting ``per_token`` of its row's length, to an amount; at least 1."""
    spent, starts = 0.0, BatchStarts(data)
    for begin, end in pairwise([*_stage_starts(data), math.inf]):
        first, stop = starts.rows_of(int(begin))
        cost = (stop - first) * data.seq_len * per_token(seq_len_at(data, int(begin)))
        needed = math.ceil((amount - spent) / cost)
        if needed <= end - begin:
            return max(int(begin) + needed, 1)
        spent += cost * (end - begin)
    raise AssertionError("the last stage has no end")


def total_until(data: DataConfig, num_batches: int, per_token: Callable[[int], float]) -> float:
    """What so many batches come to, counted as in ``batches_until``."""
    total, starts = 0.0, BatchStarts(data)
    for begin, end in pairwise([*_stage_starts(data), math.inf]):
        first, stop = starts.rows_of(int(begin))
        cost = (stop - first) * data.seq_len * per_token(seq_len_at(data, int(begin)))
        total += cost * max(min(end, num_batches) - begin, 0)
    return total


def _stage_starts(data: DataConfig) -> list[int]:
    """First batches of stretches that cost the same batch by batch."""
    by_size = {stage.start_batch for stage in data.batch_stages}
    return sorted({0} | by_size | {stage.start_batch for stage in data.length_stages})
