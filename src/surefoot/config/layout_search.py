"""The legal layout nearest to one that is not."""

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from surefoot.config.data import DataConfig
from surefoot.config.errors import ConfigError
from surefoot.config.layout_rules import fills_pipeline, layout_rules, piece_rules, rank_rules, tokens_unit
from surefoot.config.model import GroupedQueryAttention, ModelConfig
from surefoot.config.parallel import NcclAxis, ParallelConfig, PipelineConfig
from surefoot.config.rule import Rule
from surefoot.config.run import LogConfig, RunConfig
from surefoot.config.schedule_rules import batch_sizes, noise_rules


class Distance(NamedTuple):
    """How far a layout is from the one asked for: first the number of axes whose ranks differ, then that of all settings, then the
    doublings in all of them; of layouts as far, less context parallelism is nearer."""

    axes: int
    settings: int
    doublings: float
    cp: int


def layout_problems(
    model: ModelConfig, data: DataConfig, parallel: ParallelConfig, log: LogConfig | None, world_size: int | None
) -> Iterator[Rule]:
    """What is wrong with a layout; where the number of ranks is known also on those, ending with the nearest layout that is right."""
    found = list(layout_rules(model, data, parallel))
    if world_size is not None:
        found += rank_rules(data, parallel, world_size)
        if found and world_size > 1:
            near = nearest_layout(model, data, parallel, log, world_size)
            if near is not None:
                keys, text = found.pop()
                found.append(Rule(keys, f"{text}\nnearest layout on {world_size} ranks: {as_flags(parallel, near)}"))
        found += _pieces(data, parallel, log, world_size)
    yield from found


def check_layout(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError where so many ranks cannot run the config."""
    if problems := list(layout_problems(config.model, config.data, config.parallel, config.log, world_size)):
        raise ConfigError(problem.text for problem in problems)


def nearest_layout(
    model: ModelConfig, data: DataConfig, parallel: ParallelConfig, log: LogConfig | None, world_size: int
) -> ParallelConfig | None:
    """The legal layout nearest to ``parallel`` on so many ranks; None where none of the same kind of data parallelism is legal.

    Settings that have no effect there are back at their defaults.
    """
    candidates = list(_candidates(model, data, parallel, world_size))
    for near, _ in sorted(candidates, key=lambda pair: distance(parallel, *pair)):
        if is_legal(model, data, near, log, world_size):
            return near
    return None


def distance(asked: ParallelConfig, given: ParallelConfig, rows: int) -> Distance:
    """Between two layouts; ``rows`` is all that a rank of the second has, which a micro-batch of size 0 holds."""
    doublings = abs(math.log2((given.micro_batch_size or rows) / (asked.micro_batch_size or rows)))
    for axis in ("tp", "pp", "cp"):
        doublings += abs(math.log2(getattr(given, axis) / getattr(asked, axis)))
    if asked.shard_size and given.shard_size:
        doublings += abs(math.log2(given.shard_size / asked.shard_size))
    axes = sum(getattr(asked, axis) != getattr(given, axis) for axis in ("tp", "pp", "cp", "shard_size"))
    return Distance(axes, len(_changes(asked, given)), doublings, given.cp)


def as_flags(asked: ParallelConfig, given: ParallelConfig) -> str:
    """What to add to the command line, or to change in it."""
    return " ".join(f"--parallel.{key} {_word(value)}" for key, value in _changes(asked, given))


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _changes(asked: Any, given: Any) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name in asked.__dataclass_fields__:
        before, after = getattr(asked, name), getattr(given, name)
        if before is after or before == after:
            continue
        if dataclasses.is_dataclass(before):
            rows += [(f"{name}.{key}", value) for key, value in _changes(before, after)]
        else:
            rows.append((name, after))
    return rows


def _pieces(data: DataConfig, parallel: ParallelConfig, log: LogConfig | None, world_size: int) -> Iterator[Rule]:
    ranks, left = divmod(world_size, parallel.pp * parallel.cp * parallel.tp)
    if log is not None and ranks and not left:
        yield from noise_rules(data, log, ranks)
        yield from piece_rules(data, parallel, log, ranks)


def is_legal(
    model: ModelConfig, data: DataConfig, parallel: ParallelConfig, log: LogConfig | None, world_size: int
) -> bool:
    """Whether so many ranks can run the layout."""
    broken = (
        layout_rules(model, data, parallel),
        rank_rules(data, parallel, world_size),
        _pieces(data, parallel, log, world_size),
    )
    return not any(map(any, broken))


def _candidates(
    model: ModelConfig, data: DataConfig, parallel: ParallelConfig, world_size: int
) -> Iterator[tuple[ParallelConfig, int]]:
    """Products of the right number of ranks whose batches divide, and the rows of a rank there; the other rules are asked of them in
    order of distance."""
    rows = math.gcd(*(size for _, size in batch_sizes(data)))
    length = math.gcd(data.seq_len, *(stage.seq_len for stage in data.length_stages))
    for tp in divisors(world_size):
        if tp > 1 and model.vocab_size % tp:
            continue
        for pp in divisors(world_size // tp):
            if pp > model.num_layers:
                break
            for cp in divisors(world_size // tp // pp):
                ranks = world_size // tp // pp // cp
                if rows % ranks or length % cp or (cp > 1 and not isinstance(model.attention, GroupedQueryAttention)):
                    continue
                for near in _settled(parallel, tp, pp, cp, ranks, rows // ranks, length):
                    yield near, rows // ranks


def _settled(
    parallel: ParallelConfig, tp: int, pp: int, cp: int, ranks: int, rows: int, length: int
) -> Iterator[ParallelConfig]:
    """The layouts on these axes: with either exchange of keys, the nearest shards that there can be, any micro-batches that fill the
    pipeline; what has no effect on an axis of one rank is at its default."""
    shard = parallel.shard_size if parallel.data_parallel != "ddp" else 0
    if shard and ranks % shard:
        shard = min(divisors(ranks), key=lambda n: abs(math.log2(n / shard)))
    pipeline = parallel.pipeline if pp > 1 else PipelineConfig()
    if pp != parallel.pp:
        pipeline = dataclasses.replace(pipeline, layers=())
    alone = {name: NcclAxis() for name, size in (("tp", tp), ("pp", pp), ("cp", cp)) if size == 1}
    nccl = dataclasses.replace(parallel.nccl, **alone)
    micros = dict.fromkeys([parallel.micro_batch_size, *divisors(rows)])
    exchanges: tuple[Literal["ring", "all_to_all"], ...] = ("ring", "all_to_all") if cp > 1 else ("ring",)
    for exchange in exchanges:
        near = dataclasses.replace(
            parallel, tp=tp, pp=pp, cp=cp, cp_attention=exchange, shard_size=shard, nccl=nccl, pipeline=pipeline
        )
        if length % tokens_unit(near):
            continue
        for micro in micros:
            if not micro or (rows % micro == 0 and (pp == 1 or fills_pipeline(near, rows // micro))):
                yield near if micro == near.micro_batch_size else dataclasses.replace(near, micro_batch_size=micro)


def divisors(number: int) -> list[int]:
    """In order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
