"""Figures of the inside, on a cadence: weights and updates by role, attention and activations by layer. A probe leaves no trace."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.config.optim import Adam
from surefoot.guard.signals import MISSING, LayerProbe, ProbeSignals, RoleProbe
from surefoot.model.attention import GroupedAttention
from surefoot.model.attention_backends import AttentionBackend, visible
from surefoot.model.parts import AttendContext
from surefoot.model.role_scaling import Role
from surefoot.optim.build import optimizer_of
from surefoot.optim.clip import is_counted, local_part
from surefoot.optim.optimizer import Rule
from surefoot.parallel.apply import compiles
from surefoot.parallel.forward_backward import MicroBatch, reshard
from surefoot.parallel.reduce import from_rank_zero, gather_over_ranks, sum_over_ranks
from surefoot.train.evaluate import TrainingData
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState
from surefoot.train.step import on_device

CHUNK = 1 << 22
"""Elements whose updates are recomputed at once: what a probe needs in memory beside one tensor."""
MIN_KEYS = 16
"""Queries that see fewer keys are left out of the entropy: over few keys it says little."""
QUERIES = 128
"""Queries whose logits exist at once."""


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
        roles, finite = _probe_roles(state, setup, lr, applied=applied)
        layers = _probe_layers(state.model, setup, rows) if with_layers else ()
    return ProbeSignals(
        step=state.step,
        roles=roles,
        layers=layers,
        weights_finite=finite,
        beta2=min((rule.beta2 for rule in state.optimizer.rules if not math.isnan(rule.beta2)), default=math.nan),
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


def probe_metrics(probe: ProbeSignals) -> dict[str, float]:
    """The ``inside/*`` metrics of a probe; what was not measured is not written."""
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


def _probe_roles(state: TrainState, setup: Setup, lr: float, *, applied: bool) -> tuple[tuple[RoleProbe, ...], bool]:
    """Every role's figures, from sums per tensor over all ranks; and whether all weights are finite."""
    parameters = list(state.parameters.values())
    figures_4P = _tensor_figures(state, setup, lr)
    weights, updates, stale = sum_over_ranks([figures_4P[:3]], setup.world).view(3, -1).tolist()
    largest = gather_over_ranks([figures_4P[3]], setup.world).amax(0).tolist()
    probes = []
    for number, role in enumerate(setup.role_names):
        at = [i for i, of in enumerate(setup.role_numbers) if of == number]
        ratios = [largest[i] / math.sqrt(weights[i] / parameters[i].numel()) for i in at if weights[i] != 0]
        measured = applied and role != "embedding" and all(parameters[i].grad is not None for i in at)
        size = sum(parameters[i].numel() for i in at)
        rate, decay = _rate_and_decay(state, setup, role, lr)
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
    return tuple(probes), all(map(math.isfinite, largest))


def _rate_and_decay(state: TrainState, setup: Setup, role: Role, lr: float) -> tuple[float, float]:
    """What the schedule's rate is for a role, all of whose parameters have one setting, and what decay takes off a weight per step."""
    setting = next(s for s in state.optimizer.settings.values() if s.role == role)
    rate = lr * setting.lr
    penalty = isinstance(optimizer_of(role, setup.config.optim), Adam) and setting.weight_decay != 0
    return rate, MISSING if penalty else rate * setting.weight_decay


def _tensor_figures(state: TrainState, setup: Setup, lr: float) -> Tensor:
    """Of every tensor, as far as this rank counts it: sums of squares of weights, of their update and of g / sqrt(v_t), NaN where there is
    no v_t; and, of all that it holds, the largest magnitude of a weight. fp64 (4, tensors)."""
    names = list(state.parameters)
    held = [local_part(p) for p in state.parameters.values()]
    figures = torch.zeros(4, len(held), dtype=torch.float64, device=setup.world.device)
    for rule in state.optimizer.rules:
        mine = [at for at, name in enumerate(names) if name in rule.parameters]
        # by the size of whole tensors, so that every rank goes through the same chunks
        for chunk in _chunks([state.parameters[names[at]].numel() for at in mine]):
            at = [mine[i] for i in chunk]
            figures[:, at] = _chunk_figures(state, rule, [names[i] for i in at], lr)
    counted = torch.tensor(
        [is_counted(p, first_replica=setup.first_replica) for p in state.parameters.values()], device=figures.device
    )
    figures[:3] = torch.where(counted, figures[:3], 0.0)
    return figures


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


def _probe_layers(model: nn.Module, setup: Setup, rows: MicroBatch) -> tuple[LayerProbe, ...]:
    """A forward over the rows with every block watched; as rank 0 saw it."""
    watches = []
    with ExitStack() as stack:
        if compiles(setup.config.parallel):  # hooks would have every block compiled anew
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for block in model.get_submodule("blocks").children():
            watch = _LayerWatch(block)
            stack.callback(block.register_forward_pre_hook(watch.before).remove)
            stack.callback(block.register_forward_hook(watch.after).remove)
            watches.append(watch)
        model(*rows)
    reshard(model)
    figures_L4 = torch.stack([watch.figures() for watch in watches]).tolist()
    told = from_rank_zero(figures_L4, setup.world)
    return tuple(
        LayerProbe(
            layer=layer, attention_logit_max=top, attention_entropy=entropy, activation_rms=rms, activation_max=high
        )
        for layer, (top, entropy, rms, high) in enumerate(told)
    )


class _LayerWatch:
    """Looks on while one block runs: at the queries and keys its attention hands to the kernel, and at what comes out."""

    def __init__(self, block: nn.Module) -> None:
        self.has_logits = isinstance(getattr(block, "attention", None), GroupedAttention)
        self.attention = torch.full((2,), MISSING, dtype=torch.float64)
        self.activation = torch.full((2,), MISSING, dtype=torch.float64)
        self.documents_BT: Tensor | None = None

    def before(self, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pre-hook: the same inputs, the kernel watched."""
        x_BTD, context = inputs
        self.documents_BT = context.documents_BT
        if not self.has_logits:
            return inputs
        return x_BTD, dataclasses.replace(context, attend=_WatchedKernel(context, self))

    def after(self, block: nn.Module, inputs: tuple[Any, ...], out_BTD: Tensor) -> None:
        """Hook: the residual stream, blanked tokens left out."""
        kept = out_BTD if self.documents_BT is None else out_BTD[self.documents_BT >= 0]
        if kept.numel():
            self.activation = torch.stack([kept.double().square().mean().sqrt(), kept.abs().max().double()])

    def figures(self) -> Tensor:
        """Largest logit, entropy, RMS and maximum of the activations, fp64."""
        return torch.cat([self.attention.to(self.activation.device), self.activation])


class _WatchedKernel:
    """An attention kernel that gives the same result, and tells about its logits."""

    def __init__(self, context: AttendContext, watch: _LayerWatch) -> None:
        self.kernel: AttentionBackend = context.attend
        self.watch = watch

    def prepare(self, documents_BT: Tensor | None, like_BTD: Tensor) -> Any:
        """The kernel's own mask."""
        return self.kernel.prepare(documents_BT, like_BTD)

    def __call__(self, q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Any) -> Tensor:
        self.watch.attention = attention_figures(q_BTNH, k_BSKH, self.watch.documents_BT)
        return self.kernel(q_BTNH, k_BSKH, v_BSKH, mask)


def attention_figures(q_BTNH: Tensor, k_BSKH: Tensor, documents_BT: Tensor | None) -> Tensor:
    """Largest logit that a query may see, and mean entropy over that of the uniform distribution, of queries with at least MIN_KEYS keys.

    fp64 (2,); logits and weights in fp32 at least. Blanked queries are left out; NaN where no query is left.
    """
    wide = torch.promote_types(q_BTNH.dtype, torch.float32)
    q, k = (x.to(wide).transpose(1, 2) for x in (q_BTNH, k_BSKH))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1) * q.shape[-1] ** -0.5
    seen = visible(documents_BT, q_BTNH).expand(len(q), 1, -1, -1)
    if documents_BT is not None:
        seen = seen & (documents_BT >= 0)[:, None, :, None]
    keys = seen.sum(-1)
    top = q.new_full((), -math.inf)
    total, count = q.new_zeros((2,), dtype=torch.float64)
    for start in range(0, q.shape[2], QUERIES):
        block = slice(start, start + QUERIES)
        logits = (q[:, :, block] @ k.transpose(2, 3)).masked_fill(~seen[:, :, block], -math.inf)
        top = torch.maximum(top, logits.max())
        weights = torch.softmax(logits, dim=-1)
        expected = torch.where(seen[:, :, block], weights * logits, 0.0).sum(-1)
        share = (torch.logsumexp(logits, dim=-1) - expected).double() / keys[:, :, block].double().log()
        enough = (keys[:, :, block] >= MIN_KEYS).expand_as(share)
        total = total + torch.where(enough, share, 0.0).sum()
        count = count + enough.sum()
    return torch.stack([torch.where(top == -math.inf, MISSING, top.double()), total / count])
