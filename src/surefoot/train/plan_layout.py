"""What a rank of a job that is not there would hold and send: nothing is computed, read or written."""

from dataclasses import dataclass, replace

import torch

from surefoot.config.layout import layout_of
from surefoot.config.layout_search import check_layout
from surefoot.config.model import GroupedQueryAttention, SwiGLU
from surefoot.config.run import RunConfig
from surefoot.model.count import CountError, RankTokens, num_params
from surefoot.parallel.fake_world import fake_world
from surefoot.parallel.precision import policy_of
from surefoot.parallel.traffic import sent
from surefoot.train.plan_memory import Memory, Share, memory_of, share_of, units_of_share
from surefoot.train.plan_rank import Held, hold, replicated
from surefoot.train.plan_traffic import Passes, padded, place_of, traffic, units_of


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
    if not (isinstance(config.model.attention, GroupedQueryAttention) and isinstance(config.model.feed_forward, SwiGLU)):
        raise CountError("a layout is planned by formulas for the built-in parts, and this model has parts of its own")
    parallel = config.parallel
    if parallel.precision == "auto":
        parallel = replace(parallel, precision="bf16")
    on_cpu = parallel.device == "cpu"
    config = replace(config, parallel=replace(parallel, device="cpu" if on_cpu else "cuda", compile="off"))
    layout, policy = layout_of(config.parallel, ranks), policy_of(config.parallel)
    rows = parallel.micro_batch_size or config.data.batch_size // layout.data
    micro_batches = config.data.batch_size // layout.data // rows
    with fake_world(config.parallel, ranks, torch.device("meta")) as world:
        held = hold(config, world)
    tokens = tokens_of(config, rows, on_cpu=on_cpu)
    own_units = units_of(held.shapes)
    local = sum(padded(unit, layout.shard) // layout.shard for unit in own_units)
    memories = []
    for rank in range(layout.pp):
        share = share_of(config, rank)
        units = tuple(units_of_share(config, share, own_units_block(held), layout.tp))
        assert len(units) == 3
        memories.append(
            memory_of(
                config, policy, layout, share, units, rank=rank, micro_batches=micro_batches, tokens=tokens,
                moment_bytes=held.moments / local,
            )  # fmt: skip
        )
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
    flows = traffic(config.model, config.parallel, policy, layout, passes, gathered_units(config, held, first, layout.tp),
                    place_of(config.parallel, 0))  # fmt: skip
    sizes = {"pp": layout.pp, "replicate": layout.replicate, "shard": layout.shard, "cp": layout.cp, "tp": layout.tp}
    fullest = max(range(layout.pp), key=lambda rank: memories[rank].total)
    counted = {} if parallel.offload else {"weights": held.weights, "moments": held.moments}
    return LayoutPlan(
        ranks=ranks,
        axes=sizes | {"data": layout.data},
        num_params=num_params(config.model).total,
        device=config.parallel.device,
        precision=config.parallel.precision,
        micro_batches=micro_batches,
        memory=replace(memories[0], **counted),
        fullest=memories[fullest],
        fullest_pp=fullest,
        flows=tuple(
            PlannedFlow(
                axis=flow.axis, kind=flow.kind, calls=amount.calls, payload=amount.payload,
                sent=sent(flow, amount.payload, sizes.get(flow.axis, ranks)),
            )  # fmt: skip
            for flow, amount in sorted(flows.items())
        ),
    )


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
