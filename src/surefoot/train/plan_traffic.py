"""Bytes that one rank's collectives carry in one step, from theory. The optimiser's are not among them, nor the few numbers of a report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from surefoot.config.layout import Layout
from surefoot.config.layout_rules import stages_per_rank
from surefoot.config.model import GroupedQueryAttention, ModelConfig, RMSNorm
from surefoot.config.parallel import ParallelConfig
from surefoot.parallel.pipeline_stages import stages_of_rank
from surefoot.parallel.precision import Policy
from surefoot.parallel.traffic import Amount, Flow

Units = Sequence[Sequence[tuple[int, ...]]]
"""Shapes of the parameters that are gathered together, as they are on one tensor parallel rank: of every block, then of the rest."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What one rank computes in one step."""

    layers: int
    """Blocks on this rank."""
    micro_batches: int
    rows: int
    """Of a micro-batch."""
    tokens: int
    """Of a row, on one context rank: what attention's queries are."""
    embeds: bool = True
    """The embedding is on this rank."""
    predicts: bool = True
    """The loss is on this rank."""
    on_cpu: bool = True

    @property
    def positions(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.tokens


@dataclass(frozen=True)
class PipelinePlace:
    """Neighbours of a rank's stages that lie on other ranks."""

    forward_sends: int = 0
    """Stages whose next one does."""
    backward_sends: int = 0
    """Stages whose previous one does."""


def place_of(parallel: ParallelConfig, rank: int) -> PipelinePlace:
    """Of a pipeline rank."""
    mine, last = stages_of_rank(rank, parallel), parallel.pp * stages_per_rank(parallel.pipeline) - 1
    return PipelinePlace(
        sum(stage < last and stage + 1 not in mine for stage in mine),
        sum(stage > 0 and stage - 1 not in mine for stage in mine),
    )


def traffic(
    model: ModelConfig,
    parallel: ParallelConfig,
    policy: Policy,
    layout: Layout,
    passes: Passes,
    units: Units,
    place: PipelinePlace = PipelinePlace(),
) -> dict[Flow, Amount]:
    """Everything of one step by axis and kind."""
    total: dict[Flow, Amount] = {}
    parts = (
        of_weights(parallel, policy, layout, passes.micro_batches, units),
        of_matrices(model, parallel, policy, layout, passes),
        of_context(model, parallel, policy, layout, passes),
        of_pipeline(model, parallel, policy, layout, passes, place),
    )
    for part in parts:
        for flow, amount in part:
            if amount.payload:
                total[flow] = total.get(flow, Amount()) + amount
    return total


def of_weights(
    parallel: ParallelConfig, policy: Policy, layout: Layout, micro_batches: int, units: Units
) -> Iterator[tuple[Flow, Amount]]:
    """Weights gathered and gradients reduced (arXiv:1910.02054 sections 5 and 7.2).

    A unit of P elements, every parameter's first dim padded to a multiple of the shards: P gathered in the compute dtype, P scattered in
    the dtype of sums, P / shards summed over replicas. ``fsdp`` gathers for forward and for backward of each micro-batch, ``zero2`` once
    for both, ``zero1`` once a step and scatters once a step, and so does a stage of a pipeline under all of them. ``ddp`` sums the whole gradient over all ranks.
    """
    if parallel.data_parallel == "ddp" and parallel.tp == parallel.pp == 1:
        yield from _of_replicas(policy, layout, units)
        return
    gathers, scatters = 1, 1
    if parallel.data_parallel in ("fsdp", "zero2") and parallel.pp == 1:
        gathers = micro_batches * (2 if parallel.data_parallel == "fsdp" else 1)
        scatters = micro_batches if policy.weights == policy.reduce else 1
    for unit in units:
        size = padded(unit, layout.shard)
        if layout.shard > 1:
            yield Flow("shard", "all_gather"), Amount(gathers, gathers * size * policy.compute.itemsize)
            yield Flow("shard", "reduce_scatter"), Amount(scatters, scatters * size * policy.reduce.itemsize)
        if layout.replicate > 1:
            yield Flow("replicate", "all_reduce"), Amount(1, size // layout.shard * policy.reduce.itemsize)


def _of_replicas(policy: Policy, layout: Layout, units: Units) -> Iterator[tuple[Flow, Amount]]:
    """Of torch's DDP by buckets, whose number is its own affair: calls are not counted. (Under strict determinism it also sums 4 bytes for
    every parameter, to learn which were used.)"""
    if layout.size > 1:
        size = sum(padded(unit, 1) for unit in units)
        yield Flow("world", "all_reduce"), Amount(0, size * policy.reduce.itemsize)


def padded(shapes: Sequence[tuple[int, ...]], shards: int) -> int:
    """Elements of parameters whose first dim is cut into equal chunks, the last ones filled up."""
    total = 0
    for rows, *rest in shapes:
        size = -(-rows // shards) * shards
        for width in rest:
            size *= width
        total += size
    return total


def of_matrices(
    model: ModelConfig, parallel: ParallelConfig, policy: Policy, layout: Layout, passes: Passes
) -> Iterator[tuple[Flow, Amount]]:
    """Residual stream gathered and summed around attention, feed-forward, embedding and loss (arXiv:2205.05198 section 4.2.2).

    X = rows x tokens x d_model elements. A block gathers 2 X and scatters 2 X in its forward, as much in its backward; computed again, all
    but the last scattering, which keeps nothing. The embedding scatters X and the loss gathers X, and the reverse in the backward. Gains
    of norms sum their gradients in fp32, the loss three numbers a token, in two sums for a chunk.
    """
    if layout.tp == 1:
        return
    gather, scatter, add = (Flow("tp", kind) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    compute, num = policy.compute.itemsize, passes.micro_batches
    wide = max(4, compute)
    stream = passes.positions * model.d_model
    again = 0 if parallel.recompute == "none" else 1
    blocks = num * passes.layers
    yield gather, Amount(blocks * (4 + 2 * again), blocks * (4 + 2 * again) * stream * compute)
    yield scatter, Amount(blocks * (4 + again), blocks * (4 + again) * stream * compute)
    gains = _gains(model, passes)
    yield add, Amount(num * len(gains), num * sum(gains) * wide)
    if passes.embeds:
        # on a CPU narrow rows are looked up in fp32, for the sum of their gradients
        found = stream * (wide if passes.on_cpu else compute)
        yield scatter, Amount(num, num * found)
        yield gather, Amount(num, num * found)
    if passes.predicts:
        chunks = -(-passes.positions // model.loss.chunk_tokens)
        yield gather, Amount(num, num * stream * compute)
        yield scatter, Amount(num, num * stream * compute)
        yield add, Amount(2 * chunks * num, 3 * passes.positions * wide * num)


def _gains(model: ModelConfig, passes: Passes) -> list[int]:
    """Widths of the norms whose gains are summed over tensor parallel ranks."""
    attention = model.attention
    of_block = [model.d_model] * 2 if isinstance(model.norm, RMSNorm) else []
    if isinstance(attention, GroupedQueryAttention) and attention.qk_norm:
        of_block += [attention.d_head] * 2
    last = [model.d_model] if passes.predicts and isinstance(model.norm, RMSNorm) else []
    return of_block * passes.layers + last


def of_context(
    model: ModelConfig, parallel: ParallelConfig, policy: Policy, layout: Layout, passes: Passes
) -> Iterator[tuple[Flow, Amount]]:
    """Keys and values round the ring (arXiv:2310.01889 section 3), or heads exchanged for tokens (arXiv:2309.14509 section 3.2).

    With Q and K elements of queries and keys on a rank: the ring sends 2 K cp - 1 times in the forward and again in the backward, with
    their gradients in fp32 cp times; the exchange sends Q + 2 K one way and Q back, and the reverse. What is computed again sends its
    forward again; selective recomputation keeps what the ring gave. Sums and token losses are gathered once a step.
    """
    attention, cp, num = model.attention, layout.cp, passes.micro_batches
    if cp == 1 or not isinstance(attention, GroupedQueryAttention):
        return
    compute = policy.compute.itemsize
    wide = max(4, compute)
    # fp16 is multiplied in fp32 on a CPU, and goes round so
    moving = wide if policy.loss_scaled and passes.on_cpu else compute
    head = passes.positions * attention.d_head // layout.tp
    queries, keys = head * attention.num_heads, head * attention.num_kv_heads
    ring = parallel.cp_attention == "ring"
    again = parallel.recompute == "full" or (parallel.recompute == "selective" and not ring)
    forwards, blocks = (2 if again else 1), num * passes.layers
    if ring:
        sends = (forwards + 1) * (cp - 1)
        payload = 2 * keys * (sends * moving + cp * wide)
        yield Flow("cp", "send"), Amount(blocks * (sends + cp), blocks * payload)
    else:
        exchanges = forwards + 1
        yield (
            Flow("cp", "all_to_all"),
            Amount(2 * exchanges * blocks, exchanges * blocks * 2 * (queries + keys) * compute),
        )
    if passes.predicts:
        yield Flow("cp", "all_gather"), Amount(1, cp * num * (5 + passes.positions) * wide)


def of_pipeline(
    model: ModelConfig, parallel: ParallelConfig, policy: Policy, layout: Layout, passes: Passes, place: PipelinePlace
) -> Iterator[tuple[Flow, Amount]]:
    """The residual stream from stage to stage and its gradient back (arXiv:2104.04473 section 3.2): a piece of rows x tokens / tp x d_model
    elements each way for every micro-batch. The last stage tells its losses to the others, once a step. A tied embedding's shard goes to
    the last stage's copy before the pass, and the copy's gradient back after it."""
    if layout.pp == 1:
        return
    num, wide = passes.micro_batches, max(4, policy.compute.itemsize)
    piece = passes.positions // layout.tp * model.d_model * policy.compute.itemsize
    sends = place.forward_sends + place.backward_sends
    yield Flow("pp", "send"), Amount(num * sends, num * sends * piece)
    yield Flow("pp", "broadcast"), Amount(1, num * (5 + passes.positions * layout.cp) * wide)
    if model.tie_embeddings and passes.embeds != passes.predicts:
        table = padded([(model.vocab_size // layout.tp, model.d_model)], layout.shard) // layout.shard
        yield Flow("pp", "send"), Amount(1, table * policy.weights.itemsize)


def units_of(shapes: Mapping[str, tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Parameters by name as they are gathered together: each block by itself, the rest at once."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks.") else "", []).append(shape)
    return list(found.values())
