"""What a rank of a job that is not there would hold and send: nothing is computed, read or written."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from surefoot.config.layout import Layout, layout_of
from surefoot.config.layout_search import check_layout
from surefoot.config.model import GroupedQueryAttention, SwiGLU
from surefoot.config.run import RunConfig
from surefoot.model.count import CountError, RankTokens, num_params
from surefoot.parallel.fake_world import fake_world
from surefoot.parallel.precision import policy_of
from surefoot.parallel.traffic import sent
from surefoot.train.plan_memory import Memory, Share, memory_of, share_of, units_of_share
from surefoot.train.plan_rank import Held, hold, replicated
from surefoot.train.plan_traffic import Passes, Units, padded, place_of, traffic, units_of


@dataclass(frozen=True, kw_only=True)
class PlannedFlow:
    """One kind of collective over one axis in one step of rank 0."""

    axis: str
    kind: str
    calls: int
    """0: by torch's own buckets."""
    payload: int
    """Bytes of the whole tensors."""
    sent: int
    """Bytes that the rank sends where ranks pass the payload round a ring."""


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """One step of a layout, by rank."""

    ranks: int
    axes: dict[str, int]
    num_params: int
    device: str
    precision: str
    micro_batches: int
    """Of a step on each rank."""
    memory: Memory
    """Of rank 0: weights and moments counted, the rest by formula."""
    fullest: Memory
    """Of the pipeline rank that needs most, by formula."""
    fullest_pp: int
    flows: tuple[PlannedFlow, ...]


def plan_layout(config: RunConfig, ranks: int) -> LayoutPlan:
    """The plan of a config on so many ranks. An ``auto`` device is a GPU, an ``auto`` precision bf16.

    Raises ConfigError where the layout is illegal, CountError where a part of the user's own has no formula.
    """
    check_layout(config, ranks)
    config = _resolved(config)
    parallel, on_cpu = config.parallel, config.parallel.device == "cpu"
    layout = layout_of(parallel, ranks)
    rows = parallel.micro_batch_size or config.data.batch_size // layout.data
    micro_batches = config.data.batch_size // layout.data // rows
    with fake_world(parallel, ranks, torch.device("meta")) as world:
        held = hold(config, world)
    memories = _memories(config, layout, held, tokens_of(config, rows, on_cpu=on_cpu), micro_batches)
    first = share_of(config, 0)
    passes = Passes(
        layers=first.layers,
        micro_batches=micro_batches,
        rows=rows,
        tokens=config.data.seq_len // layout.cp,
        embeds=first.embeds,
        predicts=first.predicts,
        on_cpu=on_cpu,
    )
    fullest = max(range(layout.pp), key=lambda rank: memories[rank].total)
    counted = {} if parallel.offload else {"weights": held.weights, "moments": held.moments}
    return LayoutPlan(
        ranks=ranks,
        axes=_axes(layout) | {"data": layout.data},
        num_params=num_params(config.model).total,
        device=parallel.device,
        precision=parallel.precision,
        micro_batches=micro_batches,
        memory=replace(memories[0], **counted),
        fullest=memories[fullest],
        fullest_pp=fullest,
        flows=tuple(_flows(config, layout, passes, gathered_units(config, held, first, layout.tp))),
    )


def _resolved(config: RunConfig) -> RunConfig:
    """With every ``auto`` decided as a plan does."""
    if not (
        isinstance(config.model.attention, GroupedQueryAttention) and isinstance(config.model.feed_forward, SwiGLU)
    ):
        raise CountError("a layout is planned by formulas for the built-in parts, and this model has parts of its own")
    parallel = config.parallel
    device: Literal["cpu", "cuda"] = "cpu" if parallel.device == "cpu" else "cuda"
    precision = "bf16" if parallel.precision == "auto" else parallel.precision
    return replace(config, parallel=replace(parallel, device=device, precision=precision, compile="off"))


def _axes(layout: Layout) -> dict[str, int]:
    return {"pp": layout.pp, "replicate": layout.replicate, "shard": layout.shard, "cp": layout.cp, "tp": layout.tp}


def _memories(config: RunConfig, layout: Layout, held: Held, tokens: RankTokens, micro_batches: int) -> list[Memory]:
    """Of every pipeline rank, by formula."""
    local = sum(padded(unit, layout.shard) // layout.shard for unit in units_of(held.shapes))
    found = []
    for rank in range(layout.pp):
        share = share_of(config, rank)
        found.append(
            memory_of(
                config,
                policy_of(config.parallel),
                layout,
                share,
                units_of_share(config, share, own_units_block(held), layout.tp),
                rank=rank,
                micro_batches=micro_batches,
                tokens=tokens,
                moment_bytes=held.moments / local,
            )
        )
    return found


def _flows(config: RunConfig, layout: Layout, passes: Passes, units: Units) -> Iterator[PlannedFlow]:
    parallel, axes = config.parallel, _axes(layout)
    found = traffic(config.model, parallel, policy_of(parallel), layout, passes, units, place_of(parallel, 0))
    for flow, amount in sorted(found.items()):
        on_wire = sent(flow, amount.payload, axes.get(flow.axis, layout.size))
        yield PlannedFlow(axis=flow.axis, kind=flow.kind, calls=amount.calls, payload=amount.payload, sent=on_wire)


def tokens_of(config: RunConfig, rows: int, *, on_cpu: bool) -> RankTokens:
    """What a rank computes of a micro-batch, as the formulas take it."""
    parallel, policy = config.parallel, policy_of(config.parallel)
    backend = config.model.attention_backend
    eager = backend == "eager" or (backend == "auto" and (on_cpu or parallel.precision == "fp64"))
    ring = parallel.cp > 1 and parallel.cp_attention == "ring"
    return RankTokens(
        rows=rows,
        seq_len=config.data.seq_len,
        cp=parallel.cp,
        tp=parallel.tp,
        element_bytes=policy.compute.itemsize,
        kernel="ring" if ring else "eager" if eager else "fused",
        recompute=parallel.recompute,
        fused_norms=not on_cpu,
        document_mask=config.data.document_mask,
    )


def own_units_block(held: Held) -> list[tuple[int, ...]]:
    """Shapes of one block; all are alike."""
    blocks: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in held.shapes.items():
        if name.startswith("blocks."):
            blocks.setdefault(name.split(".")[1], []).append(shape)
    return next(iter(blocks.values()))


def gathered_units(config: RunConfig, held: Held, share: Share, tp: int) -> list[list[tuple[int, ...]]]:
    """What rank 0 gathers together: as it holds it, with a tied copy that is no parameter, and each end of a pipeline by itself."""
    if config.parallel.pp == 1 or replicated(config):
        return units_of(held.shapes)
    found = [own_units_block(held)] * share.layers
    table, gain = (config.model.vocab_size // tp, config.model.d_model), (config.model.d_model,)
    found += [[table]] if share.embeds else []
    found += [[gain, table]] if share.predicts else []
    return found
