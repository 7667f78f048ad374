"""Figures of the inside, on a cadence: weights and updates by role, attention and activations by layer. A probe leaves no trace."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from surefoot.config.optim import Adam
from surefoot.guard.signals import MISSING, ProbeSignals, RoleProbe
from surefoot.model.role_scaling import Role
from surefoot.optim.build import optimizer_of, setting_of
from surefoot.optim.clip import is_counted, local_part
from surefoot.optim.optimizer import Rule
from surefoot.parallel.forward_backward import MicroBatch
from surefoot.parallel.reduce import gather_over_ranks, sum_over_ranks
from surefoot.train.evaluate import TrainingData
from surefoot.train.layer_probes import probe_layers
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState
from surefoot.train.step import on_device

CHUNK = 1 << 22
"""Elements whose updates are recomputed at once: what a probe needs in memory beside one tensor."""


def take_probe(
    state: TrainState,
    setup: Setup,
    rows: MicroBatch,
    lr: float,
    *,
    with_layers: bool = True,
    applied: bool = True,
) -> ProbeSignals:
    """Measure the state after a step with rate ``lr``. Collective; every rank passes the same ``rows``, so no layout changes a figure.

    ``applied``: the moments have seen the gradients that are there; without it, or without gradients, RMS_t is missing. The
    update is the optimiser's, recomputed from the moments: what QK-clip scaled back after it is no part of it. Weights, moments, gradients
    and random numbers keep their bits.
    """
    with torch.no_grad():
        roles, finite, beta2 = _probe_roles(state, setup, lr, applied=applied)
        layers = probe_layers(setup, rows) if with_layers else ()
    return ProbeSignals(
        step=state.step,
        roles=roles,
        layers=layers,
        weights_finite=finite,
        beta2=beta2,
    )


def probe_rows(data: TrainingData, setup: Setup) -> MicroBatch:
    """``guard.probe_rows`` held-out rows on the device, dealt out over the domains, always the same; the same on every rank."""
    wanted, domains = setup.config.guard.probe_rows, data.held_out
    taken: list[MicroBatch] = []
    for place, held_out in enumerate(domains):
        share = wanted // len(domains) + (place < wanted % len(domains))
        if share > 0:
            # of one row more the last is left out: only the last row of a split is padded
            numbers = held_out.spread(share + 1)
            taken.append(on_device(held_out.take(numbers[: max(1, min(share, len(numbers) - 1))]).batch, setup))
    documents = [micro.documents_BT for micro in taken if micro.documents_BT is not None]
    return MicroBatch(
        torch.cat([micro.tokens_BT for micro in taken]),
        torch.cat([micro.positions_BT for micro in taken]),
        torch.cat(documents) if documents else None,
        torch.cat([micro.targets_BT for micro in taken]),
    )


def probe_metrics(probe: ProbeSignals | None) -> dict[str, float]:
    """The ``inside/*`` metrics of a probe, if there was one; what was not measured is not written."""
    if probe is None:
        return {}
    metrics: dict[str, float] = {}
    for role in probe.roles:
        metrics[f"inside/{role.role}/lr"] = role.lr
        metrics[f"inside/{role.role}/weight_decay"] = role.weight_decay
        metrics[f"inside/{role.role}/update_ratio"] = role.update_ratio
        metrics[f"inside/{role.role}/rms_t"] = role.rms_t
        metrics[f"inside/{role.role}/weight_norm"] = role.weight_norm
        metrics[f"inside/{role.role}/largest_weight"] = role.largest_weight
    for layer in probe.layers:
        metrics[f"inside/layer_{layer.layer}/attention_logit_max"] = layer.attention_logit_max
        metrics[f"inside/layer_{layer.layer}/attention_entropy"] = layer.attention_entropy
        metrics[f"inside/layer_{layer.layer}/activation_rms"] = layer.activation_rms
        metrics[f"inside/layer_{layer.layer}/activation_max"] = layer.activation_max
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _probe_roles(
    state: TrainState, setup: Setup, lr: float, *, applied: bool
) -> tuple[tuple[RoleProbe, ...], bool, float]:
    """Every role's figures, from sums per tensor over all ranks; whether all weights are finite; the shortest memory of second moments."""
    figures_5P = _tensor_figures(state, setup, lr)
    weights, updates, stale, graded = sum_over_ranks([figures_5P[:4]], setup.world).view(4, -1).tolist()
    mine = min((rule.beta2 for rule in state.optimizer.rules if not math.isnan(rule.beta2)), default=math.inf)
    *largest, shortest = gather_over_ranks([figures_5P[4], -mine], setup.world).amax(0).tolist()
    probes = []
    for role in setup.role_names:
        at = [i for i, of in enumerate(setup.roles.values()) if of == role]
        ratios = [largest[i] / math.sqrt(weights[i] / setup.sizes[i]) for i in at if weights[i] != 0]
        measured = applied and role != "embedding" and all(graded[i] > 0 for i in at)
        size = sum(setup.sizes[i] for i in at)
        rate, decay = _rate_and_decay(setup, role, lr)
        probes.append(
            RoleProbe(
                role=role,
                weight_norm=math.sqrt(sum(weights[i] for i in at)),
                update_norm=math.sqrt(sum(updates[i] for i in at)),
                largest_weight=MISSING if any(map(math.isnan, ratios)) else max(ratios, default=MISSING),
                lr=rate,
                weight_decay=decay,
                rms_t=math.sqrt(sum(stale[i] for i in at) / size) if measured else MISSING,
            )
        )
    return tuple(probes), all(map(math.isfinite, largest)), -shortest if math.isfinite(shortest) else math.nan


def _rate_and_decay(setup: Setup, role: Role, lr: float) -> tuple[float, float]:
    """What the schedule's rate is for a role, all of whose parameters have one setting, and what decay takes off a weight per step."""
    config = setup.config
    name = next(name for name, of in setup.roles.items() if of == role)
    setting = setting_of(name, role, config.optim, config.model)
    rate = lr * setting.lr
    penalty = isinstance(optimizer_of(role, config.optim), Adam) and setting.weight_decay != 0
    return rate, MISSING if penalty else rate * setting.weight_decay


def _tensor_figures(state: TrainState, setup: Setup, lr: float) -> Tensor:
    """Of every tensor of the whole model, as far as this rank counts it: sums of squares of weights, of their update and of g / sqrt(v_t),
    NaN where there is no v_t; whether there is a gradient; and, of all that it holds, the largest magnitude of a weight. fp64 (5, tensors)."""
    names = list(state.parameters)
    held = [local_part(p) for p in state.parameters.values()]
    figures = torch.zeros(5, len(held), dtype=torch.float64, device=held[0].device)
    for rule in state.optimizer.rules:
        mine = [at for at, name in enumerate(names) if name in rule.parameters]
        # by the size of whole tensors, so that every rank goes through the same chunks
        for chunk in _chunks([state.parameters[names[at]].numel() for at in mine]):
            at = [mine[i] for i in chunk]
            figures[[[0], [1], [2], [4]], at] = _chunk_figures(state, rule, [names[i] for i in at], lr)
    figures[3] = torch.tensor([float(p.grad is not None) for p in state.parameters.values()])
    counted = torch.tensor(
        [is_counted(p, first_replica=setup.first_replica) for p in state.parameters.values()], device=figures.device
    )
    figures[:4] = torch.where(counted, figures[:4], 0.0)
    return setup.over_the_model(figures)


def _chunks(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Places of the tensors, a chunk of about CHUNK elements at a time."""
    chunk: list[int] = []
    for place, size in enumerate(sizes):
        if chunk and sum(sizes[i] for i in chunk) + size > CHUNK:
            yield chunk
            chunk = []
        chunk.append(place)
    if chunk:
        yield chunk


def _chunk_figures(state: TrainState, rule: Rule, names: list[str], lr: float) -> Tensor:
    """The four figures of some tensors of one rule."""
    parameters = [state.parameters[name] for name in names]
    weights = [local_part(p) for p in parameters]
    updates, roots = rule.last_updates(names, lr), rule.second_moments(names)
    stale = torch.full((len(names),), math.nan, dtype=torch.float64, device=weights[0].device)
    if roots is not None:
        gradients = [
            torch.zeros_like(w) if p.grad is None else local_part(p.grad)
            for w, p in zip(weights, parameters, strict=True)
        ]
        eps = [state.optimizer.settings[name].eps for name in names]
        floors = [root.clamp_min(least) for root, least in zip(roots, eps, strict=True)]
        stale = _squares(torch._foreach_div(gradients, floors))
    largest = torch.stack([w.abs().amax() if w.numel() else w.new_zeros(()) for w in weights]).double()
    return torch.stack([_squares(weights), _squares(updates), stale, largest])


def _squares(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Sum of squares of each, fp64: one flipped exponent does not overflow it."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square()
