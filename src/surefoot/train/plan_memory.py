"""Bytes of one rank at its fullest: what it keeps between steps, and what a step adds."""

from dataclasses import dataclass, replace

from surefoot.config.layout import Layout
from surefoot.config.layout_rules import stages_per_rank
from surefoot.config.model import RMSNorm
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.model.count import RankTokens, block_bytes, ends_bytes, logits_bytes
from surefoot.parallel.pipeline_stages import layers_of_stages, stages_of_rank
from surefoot.parallel.precision import Policy
from surefoot.train.plan_traffic import Units, padded


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    weights: int
    """Masters, as they are kept and updated."""
    moments: int
    gradients: int
    gathered: int
    """Weights in the compute dtype as products read them, whole: two blocks and what is outside of blocks under fsdp, else all."""
    activations: int
    """Kept from forward to backward, all micro-batches that are on their way."""
    passing: int
    """The larger of a chunk of logits and of one block that is computed again."""

    @property
    def total(self) -> int:
        """All of it at once, which no moment of a step exceeds by much: what single products and collectives need is not counted."""
        return self.weights + self.moments + self.gradients + self.gathered + self.activations + self.passing


@dataclass(frozen=True, kw_only=True)
class Share:
    """A pipeline rank's part of the model."""

    stages: tuple[int, ...]
    """Layers of each of its stages."""
    embeds: bool
    predicts: bool

    @property
    def layers(self) -> int:
        """Of all its stages."""
        return sum(self.stages)


def share_of(config: RunConfig, rank: int) -> Share:
    """What pipeline rank ``rank`` has of the model; all of it where there is no pipeline."""
    parallel = config.parallel
    if parallel.pp == 1:
        return Share(stages=(config.model.num_layers,), embeds=True, predicts=True)
    num = parallel.pp * stages_per_rank(parallel.pipeline)
    layers = layers_of_stages(config.model.num_layers, num, parallel.pipeline.layers)
    mine = stages_of_rank(rank, parallel)
    return Share(stages=tuple(len(layers[n]) for n in mine), embeds=0 in mine, predicts=num - 1 in mine)


def in_flight(parallel: ParallelConfig, rank: int, micro_batches: int) -> float:
    """Micro-batches whose activations a pipeline rank keeps at once, for all its stages.

    GPipe keeps all (arXiv:1811.06965 section 2.3), 1F1B as many as there are ranks from this one to the last, interleaved 1F1B and zero
    bubble 2 (pp - rank - 1) + (v - 1) pp + 1 stretches of v a rank (arXiv:2104.04473 section 2.2), ZBV 2 pp halves on every rank
    (arXiv:2405.15362 section 3), DualPipeV 2 pp + 1 (arXiv:2412.19437 table 2).
    """
    pp, each = parallel.pp, stages_per_rank(parallel.pipeline)
    if pp == 1:
        return 1.0
    match parallel.pipeline.schedule:
        case "gpipe":
            return float(micro_batches)
        case "1f1b":
            return float(min(micro_batches, pp - rank))
        case "interleaved" | "zero_bubble":
            return min(micro_batches * each, 2 * (pp - rank - 1) + (each - 1) * pp + 1) / each
        case "zbv":
            return min(micro_batches * each, 2 * pp) / each
        case "dualpipev":
            return min(micro_batches * each, 2 * pp + 1) / each


def units_of_share(
    config: RunConfig, share: Share, block: list[tuple[int, ...]], tp: int
) -> tuple[Units, Units, Units]:
    """Shapes of what a pipeline rank has, as it is gathered: of every block, then of the rest of each end; the last one may be a copy that
    no optimiser knows."""
    model = config.model
    table, gain = (model.vocab_size // tp, model.d_model), (model.d_model,)
    rest: list[tuple[int, ...]] = [table] if share.embeds else []
    if share.predicts:
        rest += [gain] if isinstance(model.norm, RMSNorm) else []
        rest += [] if model.tie_embeddings else [table]
    copied = share.predicts and not share.embeds and model.tie_embeddings
    return [block] * share.layers, [rest] if rest else [], [[table]] if copied else []


def memory_of(
    config: RunConfig, policy: Policy, layout: Layout, share: Share, units: tuple[Units, Units, Units], *, rank: int,
    micro_batches: int, tokens: RankTokens, moment_bytes: float,
) -> Memory:  # fmt: skip
    """One rank's memory (arXiv:1910.02054 sections 3.1 and 5 for what is sharded; arXiv:2205.05198 for activations).

    ``moment_bytes``: of one weight, as counted on the rank that was built. Gradients lie as weights do, and under ddp, zero1, in a pipeline
    and where they are summed wider than they are kept also whole, from micro-batch to micro-batch.
    """
    parallel, shard = config.parallel, layout.shard
    blocks, rest, copy = units
    own = sum(padded(unit, shard) // shard for unit in (*blocks, *rest))
    local = own + sum(padded(unit, shard) // shard for unit in copy)
    whole = sum(padded(unit, 1) for unit in (*blocks, *rest, *copy))
    outside = sum(padded(unit, 1) for unit in (*rest, *copy))
    largest = max((padded(unit, 1) for unit in blocks), default=0)
    replicated = parallel.data_parallel == "ddp" and parallel.tp == parallel.pp == 1
    narrow = policy.weights != policy.reduce
    if replicated:
        gathered = whole * policy.compute.itemsize if policy.compute != policy.weights else 0
        accumulated = whole * policy.reduce.itemsize if narrow else 0
    else:
        by_block = parallel.data_parallel == "fsdp" and parallel.pp == 1
        gathered = (min(2 * largest, whole) + outside if by_block else whole) * policy.compute.itemsize
        keeps_whole = parallel.data_parallel in ("ddp", "zero1") or parallel.pp > 1 or narrow
        passing_grads = whole if keeps_whole and micro_batches > 1 else largest + outside
        accumulated = passing_grads * policy.reduce.itemsize
    on_device = 0 if parallel.offload and layout.size > 1 else 1
    kept = in_flight(parallel, rank, micro_batches)
    activations = kept * share.layers * block_bytes(config.model, tokens)
    activations += kept * ends_bytes(config.model, tokens, embeds=share.embeds, predicts=False)
    if share.predicts:
        activations += ends_bytes(config.model, tokens, embeds=False) - ends_bytes(
            config.model, tokens, embeds=False, predicts=False
        )
    again = block_bytes(config.model, replace(tokens, recompute="none")) if tokens.recompute != "none" else 0
    logits = logits_bytes(config.model, tokens) if share.predicts else 0
    return Memory(
        weights=on_device * local * policy.weights.itemsize,
        moments=round(on_device * own * moment_bytes),
        gradients=on_device * local * policy.weights.itemsize + accumulated,
        gathered=gathered,
        activations=round(activations),
        passing=max(again, logits),
    )
