"""Rules for layouts: what cannot be cut is refused before anything starts."""

import math
from collections.abc import Iterator

from surefoot.config.data import DataConfig
from surefoot.config.model import Custom, GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import OptimConfig
from surefoot.config.parallel import NcclAxis, ParallelConfig, PipelineConfig
from surefoot.config.rule import Rule, nearest_divisors, nearest_multiples
from surefoot.config.run import LogConfig
from surefoot.config.schedule_rules import batch_sizes

NUM_STAGES = {"gpipe": (1, 1), "1f1b": (1, 1), "zbv": (2, 2), "dualpipev": (2, 2)}
"""Fewest and most stages that a schedule runs on one rank; any number from 2 on where nothing is said."""
_MOST = 1 << 20


def stages_per_rank(pipeline: PipelineConfig) -> int:
    """Stages on each rank."""
    return pipeline.stages_per_rank or NUM_STAGES.get(pipeline.schedule, (2, _MOST))[0]


SPLIT_BACKWARD = ("zero_bubble", "zbv", "dualpipev")
"""Schedules that run the backward of inputs and that of weights apart."""


def layout_rules(model: ModelConfig, data: DataConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    """What can be said of a layout before it is known how many ranks there are."""
    yield from _matrices(model, parallel)
    yield from _tokens(data, parallel)
    yield from _context(model, parallel)
    yield from _stages(model, parallel)
    yield from _idle(parallel)
    if parallel.precision == "fp8" and parallel.tp > 1:
        text = f"parallel.precision='fp8' with parallel.tp={parallel.tp} would take its scales from a part of every matrix, which depends on the layout"
        yield Rule(("parallel.tp", "parallel.precision"), f"{text}; use parallel.tp=1, or parallel.precision='bf16'")


def recompute_rules(model: ModelConfig, optim: OptimConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    """What recomputation does not go with: torch compiles nothing of a block that is computed again when a part of it leaves the compiled
    graph, and what selective recomputation keeps serves one backward only."""
    schedule = parallel.pipeline.schedule
    if parallel.recompute == "selective" and parallel.pp > 1 and schedule in SPLIT_BACKWARD:
        text = f"parallel.recompute='selective' keeps results for one backward, and parallel.pipeline.schedule={schedule!r} runs two (inputs, then weights)"
        keys = ("parallel.recompute", "parallel.pipeline.schedule", "parallel.pp")
        yield Rule(keys, f"{text}; use parallel.recompute='full', or schedule '1f1b' or 'interleaved'")
    leaving = []
    if optim.qk_clip > 0:
        leaving.append(("optim.qk_clip", f"optim.qk_clip={optim.qk_clip:g}"))
    if parallel.cp > 1:
        leaving.append(("parallel.cp", f"parallel.cp={parallel.cp}"))
    if parallel.tp > 1 and any(isinstance(part, Custom) for part in (model.attention, model.feed_forward)):
        leaving.append(("parallel.tp", f"a custom part under parallel.tp={parallel.tp}"))
    if leaving and parallel.recompute != "none" and parallel.compile != "off":
        key, what = leaving[0]
        text = f"parallel.compile={parallel.compile!r} would compile nothing with parallel.recompute={parallel.recompute!r} and {what}"
        keys = ("parallel.compile", "parallel.recompute", key)
        yield Rule(keys, f"{text}, which leaves the compiled graph of a block; give up one of the three")


def _matrices(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    tp = parallel.tp
    if tp == 1:
        return
    counts = {"model.vocab_size": model.vocab_size}
    if isinstance(model.attention, GroupedQueryAttention):
        counts["model.attention.num_heads"] = model.attention.num_heads
        counts["model.attention.num_kv_heads"] = model.attention.num_kv_heads
    if isinstance(model.feed_forward, SwiGLU):
        counts["model.feed_forward.d_ff"] = model.feed_forward.d_ff
    for key, count in counts.items():
        if count % tp:
            near = nearest_divisors(math.gcd(*counts.values()), tp)
            text = f"parallel.tp={tp} does not divide {key}={count}, which its ranks share out"
            yield Rule(("parallel.tp", key), f"{text}; nearest: {', '.join(map(str, near))}")


def tokens_unit(parallel: ParallelConfig) -> int:
    """Row lengths are multiples of this: as many tokens on every context rank, twice as many where the ring balances them, and of those
    as many on every tensor parallel rank."""
    halves = 2 if parallel.cp > 1 and parallel.cp_attention == "ring" else 1
    return parallel.cp * math.lcm(halves, parallel.tp)


def _tokens(data: DataConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    unit = tokens_unit(parallel)
    lengths = [("data.seq_len", data.seq_len)]
    lengths += [(f"data.length_stages.{n}.seq_len", stage.seq_len) for n, stage in enumerate(data.length_stages)]
    for key, length in lengths:
        if length % unit:
            cut = f"parallel.cp={parallel.cp}" + (f" x parallel.tp={parallel.tp}" if parallel.tp > 1 else "")
            how = " in two pieces for each rank of the ring" if unit == 2 * parallel.cp else ""
            text = f"{key}={length} tokens are not divided evenly by {cut}{how}: rows are multiples of {unit}"
            yield Rule((key, "parallel.cp", "parallel.tp"), f"{text}; nearest: {nearest_multiples(length, unit)}")


def _context(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    cp, attention = parallel.cp, model.attention
    if cp == 1:
        return
    if isinstance(model.feed_forward, Custom):
        text = f"parallel.cp={cp} cannot run model.feed_forward.build={model.feed_forward.build!r}: it would be given a part of the row's tokens, and does not say that it needs no others"
        yield Rule(("parallel.cp", "model.feed_forward"), f"{text}; use parallel.cp=1")
    if isinstance(attention, Custom):
        text = f"parallel.cp={cp} cannot run model.attention.build={attention.build!r}: a custom attention does not say how its tokens meet those of other ranks"
        yield Rule(("parallel.cp", "model.attention"), f"{text}; use parallel.cp=1")
    elif parallel.cp_attention == "ring" and model.attention_backend not in ("auto", "eager"):
        key = "model.attention_backend"
        text = f"{key}={model.attention_backend!r} has no effect with parallel.cp_attention='ring', which multiplies by itself"
        yield Rule((key, "parallel.cp_attention"), f"{text}; leave it 'auto', or use 'all_to_all'")
    elif isinstance(attention, GroupedQueryAttention) and parallel.cp_attention == "all_to_all":
        common = math.gcd(attention.num_heads, attention.num_kv_heads) // parallel.tp
        for name in ("num_heads", "num_kv_heads"):
            heads = getattr(attention, name)
            if heads % parallel.tp == 0 and heads // parallel.tp % cp:
                here = f" ({heads // parallel.tp} on each of parallel.tp={parallel.tp})" if parallel.tp > 1 else ""
                text = f"parallel.cp={cp} does not divide model.attention.{name}={heads}{here}, which parallel.cp_attention='all_to_all' deals out"
                near = ", ".join(map(str, nearest_divisors(max(1, common), cp)))
                keys = ("parallel.cp", f"model.attention.{name}", "parallel.cp_attention")
                yield Rule(keys, f"{text}; nearest: {near}, or parallel.cp_attention='ring'")


def _stages(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Rule]:
    pipeline, pp = parallel.pipeline, parallel.pp
    if pp == 1:
        return
    fewest, most = NUM_STAGES.get(pipeline.schedule, (2, _MOST))
    each = stages_per_rank(pipeline)
    key = "parallel.pipeline.stages_per_rank"
    if not fewest <= each <= most:
        legal = f"at least {fewest}" if most == _MOST else f"{fewest}"
        text = f"{key}={each} does not go with parallel.pipeline.schedule={pipeline.schedule!r}"
        yield Rule((key, "parallel.pipeline.schedule"), f"{text}, which runs {legal} on a rank; set {legal}, or 0")
        return
    stages = pp * each
    what = f"parallel.pp={pp}" + (f" x {each} stages per rank" if each > 1 else "")
    if stages > model.num_layers:
        text = f"model.num_layers={model.num_layers} are fewer than the {stages} stages of {what}"
        most_ranks = model.num_layers // each
        way = f"at most parallel.pp={most_ranks}" if most_ranks > 1 else "use parallel.pp=1"
        yield Rule(("parallel.pp", "model.num_layers", key), f"{text}; {way}")
    layers, key = pipeline.layers, "parallel.pipeline.layers"
    if layers and len(layers) != stages:
        text = f"{key} gives {len(layers)} numbers for the {stages} stages of {what}"
        yield Rule((key, "parallel.pp"), f"{text}; give {stages}, or [] to share layers out evenly")
    elif layers and sum(layers) != model.num_layers:
        text = f"{key}={list(layers)} are {sum(layers)} layers of model.num_layers={model.num_layers}"
        yield Rule((key, "model.num_layers"), f"{text}; together {model.num_layers}, or [] to share them out evenly")


def _idle(parallel: ParallelConfig) -> Iterator[Rule]:
    """Settings that have no effect."""
    for key, value, default in _changed(parallel.pipeline, PipelineConfig(), "parallel.pipeline"):
        if parallel.pp == 1:
            yield Rule((key, "parallel.pp"), f"{key}={value!r} has no effect with parallel.pp=1; leave it {default!r}")
    if parallel.cp == 1 and parallel.cp_attention != "ring":
        key = "parallel.cp_attention"
        text = f"{key}={parallel.cp_attention!r} has no effect with parallel.cp=1"
        yield Rule((key, "parallel.cp"), f"{text}; leave it 'ring'")
    if parallel.data_parallel == "ddp":
        if parallel.shard_size:
            text = f"parallel.shard_size={parallel.shard_size} has no effect with parallel.data_parallel='ddp', which shards nothing"
            yield Rule(
                ("parallel.shard_size", "parallel.data_parallel"), f"{text}; leave it 0, or use zero1, zero2 or fsdp"
            )
        if parallel.offload:
            text = "parallel.offload=true needs sharded moments, and parallel.data_parallel='ddp' has none"
            yield Rule(("parallel.offload", "parallel.data_parallel"), f"{text}; use zero1, zero2 or fsdp")
    for axis, ranks in (("data", None), ("cp", parallel.cp), ("tp", parallel.tp), ("pp", parallel.pp)):
        for key, value, default in _changed(getattr(parallel.nccl, axis), NcclAxis(), f"parallel.nccl.{axis}"):
            why = "on a CPU, where there is no NCCL" if parallel.device == "cpu" else ""
            why = why or (f"with parallel.{axis}=1" if ranks == 1 else "")
            if why:
                keys = (key, "parallel.device" if parallel.device == "cpu" else f"parallel.{axis}")
                yield Rule(keys, f"{key}={value!r} has no effect {why}; leave it {default!r}")


def _changed(
    value: PipelineConfig | NcclAxis, plain: PipelineConfig | NcclAxis, prefix: str
) -> Iterator[tuple[str, object, object]]:
    for name in plain.__dataclass_fields__:
        if getattr(value, name) != getattr(plain, name):
            yield f"{prefix}.{name}", getattr(value, name), getattr(plain, name)


def rank_rules(data: DataConfig, parallel: ParallelConfig, world_size: int) -> Iterator[Rule]:
    """Whether so many ranks fill the axes, and every batch the ranks."""
    axes = {f"parallel.{name}": getattr(parallel, name) for name in ("pp", "cp", "tp")}
    used = math.prod(axes.values())
    if world_size % used:
        product = " x ".join(f"{key}={size}" for key, size in axes.items() if size > 1)
        keys = tuple(key for key, size in axes.items() if size > 1)
        if world_size == 1:
            yield Rule(keys, f"{product} needs {used} ranks, and there is one: torchrun --nproc-per-node {used}")
        else:
            text = f"{world_size} ranks do not divide over {product}"
            yield Rule(keys, f"{text}; nearest numbers of ranks: {nearest_multiples(world_size, used)}")
        return
    if parallel.offload and world_size == 1:
        text = "parallel.offload=true has no effect on one rank, which shards nothing"
        yield Rule(("parallel.offload",), f"{text}; leave it false, or start more ranks")
    ranks = world_size // used
    shard = parallel.shard_size
    if shard and ranks % shard:
        near = ", ".join(map(str, nearest_divisors(ranks, shard)))
        text = f"parallel.shard_size={shard} does not divide {ranks} data-parallel ranks; nearest: {near}"
        yield Rule(("parallel.shard_size", "parallel.data_parallel"), text)
    yield from _rows(data, parallel, world_size, ranks)


def _rows(data: DataConfig, parallel: ParallelConfig, world_size: int, ranks: int) -> Iterator[Rule]:
    micro = parallel.micro_batch_size
    unit = ranks * max(1, micro)
    whose = f"{ranks} ranks" if ranks == world_size else f"{ranks} data-parallel ranks (of {world_size})"
    for key, size in batch_sizes(data):
        if size % unit:
            times = f" times parallel.micro_batch_size={micro}" if micro else ""
            text = f"{key}={size} is not divisible by {whose}{times}"
            yield Rule((key, "parallel.micro_batch_size"), f"{text}; nearest: {nearest_multiples(size, unit)}")
            continue
        rows = size // ranks
        number = rows // (micro or rows)
        if parallel.pp > 1 and not fills_pipeline(parallel, number):
            legal = [m for m in range(1, rows + 1) if rows % m == 0 and fills_pipeline(parallel, rows // m)]
            near = ", ".join(str(m) for m in sorted(sorted(legal, key=lambda m: abs(m - (micro or rows)))[:2]))
            way = f"nearest parallel.micro_batch_size: {near}" if near else "use fewer stages, or larger batches"
            text = f"parallel.pipeline.schedule={parallel.pipeline.schedule!r} takes {_asks(parallel)}, and {key}={size} on {whose} makes {number} of {micro or rows} rows"
            keys = ("parallel.micro_batch_size", "parallel.pp", key, "parallel.pipeline.schedule")
            yield Rule(keys, f"{text}; {way}")


def fills_pipeline(parallel: ParallelConfig, num_micro_batches: int) -> bool:
    """Whether the schedule runs with so many micro-batches (the checks of torch.distributed.pipelining.schedules)."""
    match parallel.pipeline.schedule:
        case "1f1b" | "dualpipev":
            return num_micro_batches >= parallel.pp * stages_per_rank(parallel.pipeline)
        case "interleaved" | "zero_bubble":
            return num_micro_batches % max(1, num_micro_batches // parallel.pp) == 0
        case "gpipe" | "zbv":
            return True


def _asks(parallel: ParallelConfig) -> str:
    if parallel.pipeline.schedule in ("interleaved", "zero_bubble"):
        return f"rounds of at least parallel.pp={parallel.pp} micro-batches, all of the same number"
    return f"at least {parallel.pp * stages_per_rank(parallel.pipeline)} micro-batches, one for each stage"


def piece_rules(data: DataConfig, parallel: ParallelConfig, log: LogConfig, ranks: int) -> Iterator[Rule]:
    """Every piece of a batch whose noise is measured fills the pipeline too, with whole micro-batches."""
    pieces, micro = log.noise_pieces, parallel.micro_batch_size
    if not log.noise_every or parallel.pp == 1:
        return
    for key, size in batch_sizes(data):
        rows, left = divmod(size, ranks * pieces)
        if left:
            continue
        here = micro or rows
        if rows % here or not fills_pipeline(parallel, rows // here):
            text = f"log.noise_pieces={pieces} leaves {rows} rows of {key}={size} to a piece on each of {ranks} data-parallel ranks, which micro-batches of {here} do not fill the pipeline with"
            legal = [m for m in range(1, rows + 1) if rows % m == 0 and fills_pipeline(parallel, rows // m)]
            way = (
                f"parallel.micro_batch_size: at most {legal[-1]}" if legal else "use fewer pieces, or log.noise_every=0"
            )
            yield Rule(("log.noise_pieces", "parallel.micro_batch_size", key), f"{text}; {way}")
