"""What a step measures: reduced over ranks on the device for the decision, then read by the host at once for the signals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.data.facts import FactCounts, fact_counts
from surefoot.data.loader import Batch
from surefoot.guard.signals import MISSING, BatchFacts
from surefoot.model.loss import IGNORE, LossSums
from surefoot.optim.clip import nonfinite_counts, squared_norm_share
from surefoot.parallel.forward_backward import MicroBatch
from surefoot.parallel.mesh import World
from surefoot.parallel.reduce import gather_over_ranks, max_over_ranks, of_rows, sum_over_ranks
from surefoot.train.documents import domain_sums, largest, piece_losses, tail, tail_length
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState


@dataclass(frozen=True)
class Counts:
    """What is known of the whole batch before the model runs."""

    num_targets: int
    num_excluded: int
    num_masked: int
    """Tokens blanked because they repeat themselves."""
    stop_asked: bool
    """A rank was asked to stop."""
    facts: BatchFacts


@dataclass(frozen=True)
class Measured:
    """Numbers of one forward and backward over all ranks, fp64, on the device."""

    norm: Tensor
    """Global gradient norm; NaN where any gradient is broken."""
    sums: Tensor
    """Cross-entropy, squared log-normaliser, log-normaliser: sums over the targets of the global batch."""
    lse_max: Tensor
    document_max: Tensor
    """-inf where no piece is long enough."""
    document_p999: Tensor
    role_squares: Tensor
    """Squared gradient norm of every role."""
    domains: Tensor
    """``domain_sums``, flattened."""
    clip_squares: Tensor
    """What adaptive clipping needs to know of every parameter; empty where it needs nothing."""


@dataclass(frozen=True)
class Reading:
    """The same on the host, with what the update did."""

    norm: float
    ce_sum: float
    z_sum: float
    lse_sum: float
    lse_max: float
    document_max: float
    """Missing where no piece is long enough."""
    document_p999: float
    skipped: bool
    moved: float
    """Sum of squared changes over the sample of weights."""
    optimizer_steps: int
    role_squares: tuple[float, ...]
    domains: tuple[float, ...]


def count(batch: Batch, world: World, *, stop_asked: bool) -> Counts:
    """The first reduction of a step: what the batch holds, and what its tokens say by themselves."""
    mine = of_rows([batch.num_targets, batch.num_excluded, batch.num_masked, *fact_counts(batch)], world)
    asked, targets, excluded, masked, *facts = sum_over_ranks([float(stop_asked), *mine], world).tolist()
    total = FactCounts(*map(round, facts))
    return Counts(
        num_targets=round(targets),
        num_excluded=round(excluded),
        num_masked=round(masked),
        stop_asked=asked > 0,
        facts=BatchFacts(
            misaligned=total.misaligned / max(total.checked, 1),
            copied=total.copied / max(targets, 1.0),
            repeated=total.repeated / max(targets, 1.0),
            duplicated=batch.duplicated,
        ),
    )


def measure(
    state: TrainState, batch: Batch, setup: Setup, micro_batches: Sequence[MicroBatch], sums: Sequence[LossSums]
) -> Measured:
    """The second reduction of a step, and the largest numbers of every rank."""
    world = setup.world
    num_roles, num_domains = len(setup.role_names), len(setup.config.data.sources)
    share = squared_norm_share(
        state.parameters.values(),
        first_replica=setup.first_replica,
        groups=setup.role_numbers,
        num_groups=num_roles,
    )
    parts = [torch.stack([s.ce_sum, s.z_sum, s.lse_sum]).double() for s in sums]
    # back on the grid of the batch, whose rows may have been cut
    rows_and_tokens = batch.documents_BT.shape
    token_losses_BT = torch.cat([s.token_losses_BT for s in sums]).view(rows_and_tokens)
    predicts_BT = torch.cat([micro.targets_BT for micro in micro_batches]).view(rows_and_tokens) != IGNORE
    pieces = piece_losses(
        token_losses_BT, predicts_BT, torch.from_numpy(batch.documents_BT).to(world.device, non_blocking=True)
    )
    num = len(batch.samples_B3)
    mine_B3 = batch.samples_B3[
        world.data_rank * num // world.data_size : (world.data_rank + 1) * num // world.data_size
    ]
    domains_B = torch.from_numpy(mine_B3[:, 0].copy()).to(world.device, non_blocking=True)
    by_domain = domain_sums(pieces, domains_B, num_domains)
    sums_3, by_domain_3D = of_rows([torch.stack(parts).sum(0), by_domain], world)
    clip_shares = state.clipping.shares(first_replica=setup.first_replica)
    total = sum_over_ranks([share.total, sums_3, share.broken, share.by_group, by_domain_3D, clip_shares], world)
    lse_max = torch.stack([s.lse_max for s in sums]).max()
    top = largest(pieces, tail_length(token_losses_BT.numel() * world.data_size))
    # a piece is told once, though all peers that share its row know it
    tops = gather_over_ranks([lse_max, top if world.counts_rows else torch.full_like(top, -math.inf)], world)
    rest = 5 + num_roles + by_domain.numel()
    role_squares, by_domain, clip_squares = total[5 : 5 + num_roles], total[5 + num_roles : rest], total[rest:]
    document_max, document_p999 = tail(tops[:, 1:], by_domain[::3].sum())
    return Measured(
        norm=torch.where(total[4] > 0, math.nan, total[0].sqrt()),
        sums=total[1:4],
        lse_max=tops[:, 0].max(),
        document_max=document_max,
        document_p999=document_p999,
        role_squares=role_squares,
        domains=by_domain,
        clip_squares=clip_squares,
    )


def read(measured: Measured, skip: Tensor, change: Tensor, state: TrainState, setup: Setup) -> Reading:
    """The last reduction of a step, and the one time that the host waits for the device.

    ``change``: of the weights in the sample that this rank counts.
    """
    of_optimizer = state.optimizer.step_count()
    moved = sum_over_ranks([change.square().sum(), of_optimizer / setup.world.size], setup.world)
    m = measured
    numbers = [m.norm, *m.sums, m.lse_max, m.document_max, m.document_p999, skip.double(), *moved]
    values = torch.cat([torch.stack(numbers), m.role_squares, m.domains]).tolist()
    norm, ce_sum, z_sum, lse_sum, lse_max, document_max, document_p999, skipped, total, steps = values[:10]
    rest = values[10:]
    return Reading(
        norm=norm,
        ce_sum=ce_sum,
        z_sum=z_sum,
        lse_sum=lse_sum,
        lse_max=lse_max,
        document_max=document_max if document_max > -math.inf or math.isnan(document_max) else MISSING,
        document_p999=document_p999 if document_p999 > -math.inf or math.isnan(document_p999) else MISSING,
        skipped=bool(skipped),
        moved=total,
        optimizer_steps=round(steps),
        role_squares=tuple(rest[: len(setup.role_names)]),
        domains=tuple(rest[len(setup.role_names) :]),
    )


def count_nonfinite(state: TrainState, setup: Setup, norm: float) -> tuple[int, str]:
    """Elements of gradients that are not finite and the first parameter that has one; (0, "") without a look where the norm is finite.

    Collective where the norm is not. A finite gradient may have a norm beyond its dtype: then nothing is found.
    """
    if math.isfinite(norm):
        return 0, ""
    mine_2P = torch.stack(nonfinite_counts(state.parameters.values(), first_replica=setup.first_replica))
    counted, held = setup.over_the_model(mine_2P)
    whole = torch.maximum(sum_over_ranks([counted], setup.world), max_over_ranks([held], setup.world)).tolist()
    first = next((name for name, number in zip(setup.roles, whole, strict=True) if number > 0), "")
    return round(sum(whole)), first
