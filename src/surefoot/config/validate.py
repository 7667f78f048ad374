"""Rules between settings, each with the numbers and the nearest legal values."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from surefoot.config.bounds import out_of_range
from surefoot.config.data import BpeTokenizer, BytesTokenizer, DataConfig, RepetitionMask
from surefoot.config.model import Custom, GroupedQueryAttention, ModelConfig
from surefoot.config.optim import GlobalNorm, OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import CheckpointConfig, LogConfig, RunConfig

NAME = re.compile(r"[A-Za-z0-9_-]+")
_BYTE_VOCABULARY = 257  # every byte and the end of a document
_LEAST_TRUNCATION = 0.5  # below it nearly every draw is redrawn


_NEAR = 4096


class Rule(NamedTuple):
    """A broken rule: the settings it is about, the one to point at first, and what is wrong."""

    keys: tuple[str, ...]
    text: str


def validate(cfg: RunConfig, world_size: int | None = None) -> list[str]:
    """Every broken rule of a config as a sentence; with ``world_size`` (ranks) also whether they can share a batch."""
    parts = {name: getattr(cfg, name) for name in RunConfig.__dataclass_fields__}
    return list(dict.fromkeys(rule.text for rule in broken_rules(parts, world_size)))


def broken_rules(parts: Mapping[str, Any], world_size: int | None = None) -> list[Rule]:
    """Broken rules among the fields of a RunConfig; a rule that needs a field which is not there is not asked."""
    found = [Rule((key,), text) for name, part in parts.items() for key, text in out_of_range(part, name)]
    checks = (
        (_recipe, ("recipe",)),
        (_model, ("model",)),
        (_attention_backend, ("model", "parallel")),
        (_sources, ("data",)),
        (_stages, ("data",)),
        (_exclusions, ("data",)),
        (_vocabulary, ("model", "data")),
        (_optim, ("optim",)),
        (_clipping, ("optim", "steps")),
        (_repetition, ("data",)),
        (_micro_batches, ("data", "parallel")),
        (_checkpoint, ("checkpoint",)),
        (_log, ("log",)),
    )
    wrong = {key for rule in found for key in rule.keys}
    for check, needs in checks:
        if all(name in parts for name in needs):
            rules = check(*(parts[name] for name in needs))
            # A number out of its range makes every rule that it enters noise.
            found += [rule for rule in rules if not wrong.intersection(rule.keys)]
    if world_size is not None and {"data", "parallel"} <= parts.keys() and not wrong:
        found += _ranks(parts["data"], parts["parallel"], world_size)
    return found


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of ``step`` around a value, as the end of an error."""
    below = value // step * step
    return ", ".join(str(near) for near in (below, below + step) if near > 0)


def nearest_divisors(value: int, wanted: int) -> list[int]:
    """The two divisors of ``value`` nearest to ``wanted``, smaller first; numbers far from it are not looked at."""
    candidates = range(max(1, wanted - _NEAR), min(value, wanted + _NEAR) + 1)
    divisors = [n for n in (1, *candidates, value) if value % n == 0]
    return sorted(sorted(set(divisors), key=lambda n: abs(n - wanted))[:2])


def _recipe(recipe: str) -> Iterator[Rule]:
    if not NAME.fullmatch(recipe):
        yield Rule(("recipe",), f"recipe={recipe!r} must be letters, digits, '_' and '-': it names the run folder")


def _model(model: ModelConfig) -> Iterator[Rule]:
    attention = model.attention
    if isinstance(attention, GroupedQueryAttention):
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        keys = ("model.attention.num_kv_heads", "model.attention.num_heads")
        if heads > 0 and kv_heads > 0 and heads % kv_heads:
            near = nearest_divisors(heads, kv_heads)
            yield Rule(
                keys,
                f"model.attention.num_heads={heads} is not divisible by num_kv_heads={kv_heads}; "
                f"nearest num_kv_heads: {', '.join(map(str, near))}",
            )
        if attention.d_head % 2:
            text = f"model.attention.d_head={attention.d_head} must be even, for RoPE"
            yield Rule(("model.attention.d_head",), f"{text}; nearest: {nearest_multiples(attention.d_head, 2)}")
    for name in ("attention", "feed_forward", "norm"):
        part = getattr(model, name)
        if isinstance(part, Custom) and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", part.build):
            key = f"model.{name}.build"
            yield Rule((key,), f"{key}={part.build!r} must be package.module:function")
    if 0 < model.init.truncate < _LEAST_TRUNCATION:
        key = "model.init.truncate"
        yield Rule((key,), f"{key}={model.init.truncate} redraws nearly everything; 0 for none, else at least 0.5")


def _attention_backend(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    key, backend = "model.attention_backend", model.attention_backend
    if isinstance(model.attention, Custom) and backend != "auto":
        yield Rule((key,), f"{key}={backend!r} has no effect on a custom attention; leave it 'auto'")
    elif backend == "flex" and parallel.device == "cpu":
        keys = (key, "parallel.device")
        yield Rule(keys, f"{key}='flex' needs a GPU, and parallel.device='cpu'; on CPU: 'eager', 'sdpa', 'auto'")
    elif backend == "flex" and parallel.precision == "fp64":
        keys = (key, "parallel.precision")
        yield Rule(keys, f"{key}='flex' has no fp64 kernel, and parallel.precision='fp64'; use 'eager' or 'sdpa'")


def _sources(data: DataConfig) -> Iterator[Rule]:
    if not data.sources:
        yield Rule(("data.sources",), "data.sources is empty: a run needs at least one source of documents")
    seen: dict[str, int] = {}
    for n, source in enumerate(data.sources):
        key = f"data.sources.{n}"
        if not NAME.fullmatch(source.name):
            text = f"{key}.name={source.name!r} must be letters, digits, '_' and '-': it is part of metric names"
            yield Rule((f"{key}.name",), text)
        if source.name in seen:
            text = f"{key}.name={source.name!r} is also the name of data.sources.{seen[source.name]}; names must differ"
            yield Rule((f"{key}.name",), text)
        seen.setdefault(source.name, n)
        twin = next((m for m in range(n) if data.sources[m].documents == source.documents), None)
        if twin is not None:
            text = f"{key}.documents are those of data.sources.{twin}; give that source the sum of both weights"
            yield Rule((f"{key}.documents", key), text)
        for name in ("glob", "path"):
            if getattr(source.documents, name, "given") == "":
                yield Rule((f"{key}.documents.{name}",), f"{key}.documents.{name} is empty")
    if not data.cache_dir:
        yield Rule(("data.cache_dir",), "data.cache_dir is empty: name a folder for the shards built from text")


def _stages(data: DataConfig) -> Iterator[Rule]:
    for n, stage in enumerate(data.mixture_stages):
        key = f"data.mixture_stages.{n}"
        if len(stage.weights) != len(data.sources):
            text = f"{key}.weights has {len(stage.weights)} weights for {len(data.sources)} sources"
            names = ", ".join(source.name for source in data.sources)
            yield Rule((f"{key}.weights",), f"{text}; one each, in the order {names}")
        if n and stage.start_row <= data.mixture_stages[n - 1].start_row:
            before = data.mixture_stages[n - 1].start_row
            text = f"{key}.start_row={stage.start_row} must be above the stage before, {before}"
            yield Rule((f"{key}.start_row",), text)
    for n, ramp in enumerate(data.batch_stages):
        key = f"data.batch_stages.{n}.start_batch"
        if n and ramp.start_batch <= data.batch_stages[n - 1].start_batch:
            before = data.batch_stages[n - 1].start_batch
            yield Rule((key,), f"{key}={ramp.start_batch} must be above the stage before, {before}")


def _exclusions(data: DataConfig) -> Iterator[Rule]:
    seen: dict[str, int] = {}
    for n, exclusion in enumerate(data.exclude):
        key = f"data.exclude.{n}.document"
        if not re.fullmatch(r"[0-9a-f]{16}", exclusion.document):
            text = (
                f"{key}={exclusion.document!r} must be 16 hex digits (0-9, a-f), as the ledger and `data inspect` show"
            )
            yield Rule((key,), text)
        if exclusion.document in seen:
            yield Rule(
                (key,), f"{key}={exclusion.document!r} is excluded twice, also as item {seen[exclusion.document]}"
            )
        seen.setdefault(exclusion.document, n)


def _vocabulary(model: ModelConfig, data: DataConfig) -> Iterator[Rule]:
    match data.tokenizer:
        case BpeTokenizer(vocab_size=size):
            keys: tuple[str, ...] = ("data.tokenizer.vocab_size", "model.vocab_size")
            what = f"data.tokenizer.vocab_size={size}"
        case BytesTokenizer():
            size, keys, what = (
                _BYTE_VOCABULARY,
                ("model.vocab_size",),
                f"the {_BYTE_VOCABULARY} ids of the byte tokenizer",
            )
        case _:
            return
    if size > model.vocab_size:
        rounded = -(-size // 64) * 64
        near = f"{size}, or {rounded} (a multiple of 64)" if rounded != size else f"{size}"
        yield Rule(keys, f"model.vocab_size={model.vocab_size} has no row for {what}; at least {near}")


def _optim(optim: OptimConfig) -> Iterator[Rule]:
    decay = optim.lr * optim.optimizer.weight_decay
    if decay >= 1:
        keys = ("optim.optimizer.weight_decay", "optim.lr")
        text = f"optim.lr={optim.lr} times weight_decay={optim.optimizer.weight_decay} is {decay:g}"
        yield Rule(keys, f"{text}: one step would turn the weights over; it must be below 1")


def _clipping(optim: OptimConfig, steps: int) -> Iterator[Rule]:
    if not isinstance(optim.clipping, GlobalNorm) and optim.clipping.warmup_steps >= steps:
        key = "optim.clipping.warmup_steps"
        text = f"{key}={optim.clipping.warmup_steps} leaves none of steps={steps} that is clipped by {optim.clipping.kind!r}"
        yield Rule((key, "steps"), f"{text}; it must be below {steps}")


def _repetition(data: DataConfig) -> Iterator[Rule]:
    if isinstance(data.repetition, RepetitionMask) and data.repetition.count > data.seq_len:
        key = "data.repetition.count"
        text = f"{key}={data.repetition.count} has no effect: a row of data.seq_len={data.seq_len} tokens cannot repeat one so often"
        yield Rule((key, "data.seq_len"), f"{text}; at most {data.seq_len}")


def _batch_sizes(data: DataConfig) -> list[tuple[str, int]]:
    sizes = [(f"data.batch_stages.{n}.batch_size", stage.batch_size) for n, stage in enumerate(data.batch_stages)]
    return [("data.batch_size", data.batch_size), *sizes]


def _micro_batches(data: DataConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    micro = parallel.micro_batch_size
    for key, size in _batch_sizes(data):
        if micro > 0 and size % micro:
            text = f"{key}={size} is not divisible by parallel.micro_batch_size={micro}"
            yield Rule((key, "parallel.micro_batch_size"), f"{text}; nearest: {nearest_multiples(size, micro)}")


def _ranks(data: DataConfig, parallel: ParallelConfig, world_size: int) -> Iterator[Rule]:
    unit = world_size * max(1, parallel.micro_batch_size)
    for key, size in _batch_sizes(data):
        if size % unit:
            micro = f" times parallel.micro_batch_size={parallel.micro_batch_size}" if parallel.micro_batch_size else ""
            text = f"{key}={size} is not divisible by {world_size} ranks{micro}"
            yield Rule((key, "parallel.micro_batch_size"), f"{text}; nearest: {nearest_multiples(size, unit)}")


def _checkpoint(checkpoint: CheckpointConfig) -> Iterator[Rule]:
    every, keep = checkpoint.every, checkpoint.keep_every
    keys = ("checkpoint.keep_every", "checkpoint.every")
    if keep > 0 and every == 0:
        yield Rule(
            keys, f"checkpoint.keep_every={keep} has no effect without checkpoints on the way; set checkpoint.every"
        )
    elif keep > 0 and keep % every:
        text = f"checkpoint.keep_every={keep} is not a multiple of checkpoint.every={every}: no checkpoint falls there"
        yield Rule(keys, f"{text}; nearest: {nearest_multiples(keep, every)}")


def _log(log: LogConfig) -> Iterator[Rule]:
    if len(set(log.trackers)) != len(log.trackers):
        yield Rule(("log.trackers",), f"log.trackers={list(log.trackers)} names a tracker twice")
