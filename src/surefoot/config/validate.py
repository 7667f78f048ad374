"""Rules between settings, each with the numbers and the nearest legal values."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from surefoot.config.bounds import out_of_range
from surefoot.config.data import BpeTokenizer, BytesTokenizer, DataConfig, RepetitionMask
from surefoot.config.layout_rules import recompute_rules
from surefoot.config.layout_search import layout_problems
from surefoot.config.model import Custom, GroupedQueryAttention, ModelConfig, Standard
from surefoot.config.optim import GlobalNorm, OptimConfig
from surefoot.config.optim_rules import moments, optimizer_rules
from surefoot.config.parallel import ParallelConfig
from surefoot.config.precision_rules import fp8_blocks, precision_rules
from surefoot.config.rule import Rule, nearest_divisors, nearest_multiples
from surefoot.config.run import ByFlops, ByHours, ByMoney, BySteps, ByTokens, CheckpointConfig, LogConfig, RunConfig
from surefoot.config.schedule_rules import batch_sizes, length_rules, noise_rules, ramp_rules, schedule_rules

NAME = re.compile(r"[A-Za-z0-9_-]+")
_BYTE_VOCABULARY = 257  # every byte and the end of a document
_LEAST_TRUNCATION = 0.5  # below it nearly every draw is redrawn


def validate(cfg: RunConfig, world_size: int | None = None) -> list[str]:
    """Every broken rule of a config as a sentence; with ``world_size`` also whether so many ranks can share the work."""
    parts = {name: getattr(cfg, name) for name in RunConfig.__dataclass_fields__}
    return list(dict.fromkeys(rule.text for rule in broken_rules(parts, world_size)))


def broken_rules(parts: Mapping[str, Any], world_size: int | None = None) -> list[Rule]:
    """Broken rules among the fields of a RunConfig; a rule that needs a field which is not there is not asked."""
    found = [Rule((key,), text) for name, part in parts.items() for key, text in out_of_range(part, name)]
    checks = (
        (_recipe, ("recipe",)),
        (_model, ("model",)),
        (_parametrization, ("model",)),
        (_attention_backend, ("model", "parallel")),
        (precision_rules, ("parallel",)),
        (fp8_blocks, ("model", "parallel")),
        (_sources, ("data",)),
        (_stages, ("data",)),
        (_exclusions, ("data",)),
        (_vocabulary, ("model", "data")),
        (optimizer_rules, ("optim", "data")),
        (moments, ("optim", "parallel")),
        (_clipping, ("optim", "steps", "bound")),
        (schedule_rules, ("optim", "steps", "bound")),
        (ramp_rules, ("optim", "data")),
        (length_rules, ("data",)),
        (noise_rules, ("data", "log")),
        (_qk_clip, ("model", "optim")),
        (_repetition, ("data",)),
        (_micro_batches, ("data", "parallel")),
        (recompute_rules, ("model", "optim", "parallel")),
        (_checkpoint, ("checkpoint",)),
        (_log, ("log",)),
    )
    wrong = {key for rule in found for key in rule.keys}
    for check, needs in checks:
        if all(name in parts for name in needs):
            rules = check(*(parts[name] for name in needs))
            # A number out of its range makes every rule that it enters noise.
            found += [rule for rule in rules if not wrong.intersection(rule.keys)]
    if {"model", "data", "parallel"} <= parts.keys() and not wrong:
        found += layout_problems(parts["model"], parts["data"], parts["parallel"], parts.get("log"), world_size)
    return found


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


def _parametrization(model: ModelConfig) -> Iterator[Rule]:
    parametrization = model.parametrization
    base = 0 if isinstance(parametrization, Standard) else parametrization.base_d_head
    key = "model.parametrization.base_d_head"
    if base and isinstance(model.attention, Custom):
        text = f"{key}={base} has no effect on a custom attention, which scales its own logits"
        yield Rule((key, "model.attention"), f"{text}; leave it 0")
    elif base % 2:
        text = f"{key}={base} must be even, as heads are for RoPE, or 0 where heads keep their width"
        yield Rule((key,), f"{text}; nearest: {nearest_multiples(base, 2)}")


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


def _clipping(
    optim: OptimConfig, steps: int, bound: BySteps | ByTokens | ByFlops | ByHours | ByMoney
) -> Iterator[Rule]:
    if not isinstance(bound, BySteps) or isinstance(optim.clipping, GlobalNorm):
        return
    if optim.clipping.warmup_steps >= steps:
        key = "optim.clipping.warmup_steps"
        text = f"{key}={optim.clipping.warmup_steps} leaves none of steps={steps} that is clipped by {optim.clipping.kind!r}"
        yield Rule((key, "steps"), f"{text}; it must be below {steps}")


def _qk_clip(model: ModelConfig, optim: OptimConfig) -> Iterator[Rule]:
    key, attention = "optim.qk_clip", model.attention
    if optim.qk_clip > 0 and isinstance(attention, Custom):
        text = f"{key}={optim.qk_clip:g} cannot reach model.attention.build={attention.build!r}: a custom attention does not say which rows"
        yield Rule((key, "model.attention"), f"{text} of its weights make the logits of a head; set {key}=0")
    elif optim.qk_clip > 0 and isinstance(attention, GroupedQueryAttention) and attention.qk_norm:
        text = f"{key}={optim.qk_clip:g} has no effect under model.attention.qk_norm, which undoes any scale of queries and keys"
        yield Rule((key, "model.attention.qk_norm"), f"{text}; set {key}=0, or qk_norm=false")


def _repetition(data: DataConfig) -> Iterator[Rule]:
    if isinstance(data.repetition, RepetitionMask) and data.repetition.count > data.seq_len:
        key = "data.repetition.count"
        text = f"{key}={data.repetition.count} has no effect: a row of data.seq_len={data.seq_len} tokens cannot repeat one so often"
        yield Rule((key, "data.seq_len"), f"{text}; at most {data.seq_len}")


def _micro_batches(data: DataConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    micro = parallel.micro_batch_size
    for key, size in batch_sizes(data):
        if micro > 0 and size % micro:
            text = f"{key}={size} is not divisible by parallel.micro_batch_size={micro}"
            yield Rule((key, "parallel.micro_batch_size"), f"{text}; nearest: {nearest_multiples(size, micro)}")


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
