"""Finding out why, at the weights as they are: a few more passes over the batch, the documents in it."""

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surefoot.config.run import RunConfig
from surefoot.data.loader import Batch
from surefoot.data.tokenizer import load_tokenizer
from surefoot.guard.detectors import expected_document_loss
from surefoot.guard.diagnosis import accused, next_pass
from surefoot.guard.evidence import Evidence, PassKind, PassResult
from surefoot.guard.signals import MISSING, ProbeSignals, RoleProbe
from surefoot.guard.suspects import rank
from surefoot.model.transformer import Transformer
from surefoot.monitor.rows import number
from surefoot.monitor.run import Run
from surefoot.parallel.mesh import World
from surefoot.parallel.precision import unrounded
from surefoot.parallel.reduce import of_rows, sum_over_ranks
from surefoot.train.acting import Judged
from surefoot.train.candidates import candidates, half, without_documents
from surefoot.train.evaluate import TrainingData
from surefoot.train.keeping import Keeping
from surefoot.train.measure import measure
from surefoot.train.probes import probe_rows, take_probe
from surefoot.train.setup import Setup
from surefoot.train.state import TrainState
from surefoot.train.step import StepOutcome, split

INSIDE, NORM = "inside/", "/weight_norm"


@dataclass(frozen=True)
class Applied:
    """The last batch whose update was applied."""

    batch_index: int
    loss: float
    """Nats per token, before its update."""
    gradient_norm: float


@dataclass
class Recent:
    """What happened lately in the history of the state at hand. Memory of the loop; after a resume or rollback the rows are asked."""

    applied: Applied | None = None
    probe: dict[str, float] | None = None
    """The row of the last cadence probe: rows hold it to the bit, so that a resumed run sees what the uninterrupted one does."""
    known: bool = False
    """What is None was not there, rather than not looked up."""

    def note(self, outcome: StepOutcome, probe: dict[str, float]) -> None:
        """After a batch."""
        if not outcome.skipped:
            signals = outcome.signals
            self.applied = Applied(signals.batch_index, signals.loss, signals.gradient_norm)
        self.probe = probe or self.probe

    def forget(self) -> None:
        """Another state was restored."""
        self.applied, self.probe, self.known = None, None, False

    def look_up(self, keeping: Keeping, before: int) -> None:
        """Fill in what is missing from the rows of the batches below ``before``. Collective."""
        if self.known:
            return
        told: list[Any] = [[], {}]
        if keeping.store:
            keeping.store.flush()
            rows = [row for row in reversed(Run(keeping.folder).joined_rows) if row["batch_index"] < before]
            last = next((row for row in rows if not row.get("skipped")), None)
            probed: dict[str, Any] = next((row for row in rows if any(name.startswith(INSIDE) for name in row)), {})
            if last is not None:
                told[0] = [last["batch_index"], number(last["train/loss"]), number(last["train/gradient_norm"])]
            told[1] = {name: number(value) for name, value in probed.items() if name.startswith(INSIDE)}
        applied, probe = keeping.from_leader(told)
        self.applied = self.applied or (Applied(*applied) if applied else None)
        self.probe, self.known = self.probe or probe or None, True

    def probes(self) -> tuple[ProbeSignals, ...]:
        """The last cadence probe, of roles alone, as evidence takes it."""
        roles = [
            RoleProbe(
                role=role,
                weight_norm=norm,
                update_norm=norm * self.probe.get(f"{INSIDE}{role}/update_ratio", MISSING),
                largest_weight=self.probe.get(f"{INSIDE}{role}/largest_weight", MISSING),
                rms_t=self.probe.get(f"{INSIDE}{role}/rms_t", MISSING),
            )
            for name, norm in (self.probe or {}).items()
            if self.probe is not None and name.endswith(NORM) and (role := name.removeprefix(INSIDE).removesuffix(NORM))
        ]
        return (ProbeSignals(step=0, roles=tuple(roles)),) if roles else ()


def investigate(
    judged: Judged, budget: int, recent: Recent, state: TrainState, setup: Setup, data: TrainingData, keeping: Keeping
) -> Evidence:
    """What is to be known about a batch before deciding: suspects, and at most ``budget`` forward and backward passes. Collective.

    Leaves no trace but dropped gradients: weights, moments, counters, random numbers and the guard's state keep their bits.
    """
    config, batch, verdict = setup.config, judged.batch, judged.first
    expected = partial(expected_document_loss, verdict.state.detectors)
    recent.look_up(keeping, batch.batch_index)
    applied = not judged.outcome.skipped
    probe = take_probe(state, setup, probe_rows(data, setup), judged.outcome.signals.lr, applied=applied)
    losses_BT = token_losses(batch, setup)
    tokenizer = load_tokenizer(config.data.tokenizer, data.prepared.tokenizer_path)
    at_hand = candidates(batch, losses_BT, data.loader, tokenizer, expected, setup.world)
    evidence = Evidence(
        signals=judged.outcome.signals,
        findings=verdict.findings,
        expected_loss=verdict.scores.expected_loss,
        skips=verdict.state.consecutive_skips,
        noise=noise_floor(state, batch, setup) if budget and config.determinism == "fast" else 0.0,
        low_precision=can_widen(config, setup.world),
        suspects=rank(at_hand, expected),
        probe=probe,
        probes_before=recent.probes(),
    )
    while (kind := next_pass(evidence, budget)) is not None:
        result = take(kind, evidence, state, batch, recent, setup, data, keeping)
        evidence = replace(evidence, results=(*evidence.results, result))
    state.optimizer.zero_grad()
    return evidence


def take(
    kind: PassKind,
    evidence: Evidence,
    state: TrainState,
    batch: Batch,
    recent: Recent,
    setup: Setup,
    data: TrainingData,
    keeping: Keeping,
) -> PassResult:
    """One extra pass and what it says."""
    world, signals, normal = setup.world, evidence.signals, evidence.expected_loss
    eos_id = data.prepared.eos_id
    if kind == "same_batch":
        loss, norm = one_pass(state, batch, setup)
        same = _bits(loss, norm) == _bits(signals.loss, signals.gradient_norm)
        return PassResult(kind=kind, loss=loss, gradient_norm=norm, same_bits=same, excess=_above(loss, normal))
    if kind == "healthy_batch":
        # Before any update was applied, the batch that comes next is as good as any.
        known = recent.applied or Applied(batch.batch_index + 1, normal, MISSING)
        again = data.loader.batch(known.batch_index, keeping.ledger.exclusions, world.data_rank, world.data_size)
        loss, norm = one_pass(state, again, setup)
        excess = _above(loss, known.loss)
        return PassResult(kind=kind, loss=loss, gradient_norm=norm, excess=excess, gradient_before=known.gradient_norm)
    if kind == "full_precision":
        with widened(state):
            loss, norm = one_pass(state, batch, setup)
    elif kind == "without_suspects":
        names = tuple(suspect.document for suspect in accused(evidence))
        loss, norm = one_pass(state, without_documents(batch, names, data.loader, world), setup)
    else:
        loss, norm = one_pass(state, half(batch, int(kind == "second_half"), eos_id, world.data_rank), setup)
    return PassResult(kind=kind, loss=loss, gradient_norm=norm, excess=_above(loss, normal))


def one_pass(state: TrainState, batch: Batch, setup: Setup) -> tuple[float, float]:
    """Loss and gradient norm as ``train_step`` computes them, to the bit; (NaN, 0) when the batch predicts nothing. Collective."""
    num_targets = round(sum_over_ranks(of_rows([batch.num_targets], setup.world), setup.world).item())
    if num_targets == 0:
        return math.nan, 0.0
    state.optimizer.zero_grad()
    micro_batches = split(batch, setup)
    measured = measure(state, batch, setup, micro_batches, setup.forward_backward(micro_batches, num_targets))
    return float(measured.sums[0]) / num_targets, float(measured.norm)


def token_losses(batch: Batch, setup: Setup) -> Tensor:
    """The loss of every token of this rank's rows, (B, T), by a forward without gradients. Collective."""
    sums = setup.forward_backward.forward_only(split(batch, setup))
    return torch.cat([s.token_losses_BT for s in sums]).view(batch.documents_BT.shape)


def noise_floor(state: TrainState, batch: Batch, setup: Setup) -> float:
    """Relative difference of two passes of one batch: where determinism is not strict, bits differ without a fault."""
    (loss, norm), (other_loss, other_norm) = (one_pass(state, batch, setup) for _ in range(2))
    pairs = [(loss, other_loss), (norm, other_norm)]
    spread = [abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and a != b]
    return max(spread, default=0.0)


def can_widen(config: RunConfig, world: World) -> bool:
    """Whether a batch can be computed in fp32 where the run computes in less: not where FSDP2 gathers its weights already rounded."""
    parallel = config.parallel
    sharded = world.size > 1 and (parallel.data_parallel != "ddp" or parallel.tp > 1 or parallel.pp > 1)
    return config.parallel.precision not in ("fp32", "fp64") and not sharded


@contextmanager
def widened(state: TrainState) -> Iterator[None]:
    """Compute in fp32 meanwhile, operands as they are; weights kept in less (bf16_pure) only miss digits that the run does not have."""
    model = state.model
    assert isinstance(model, Transformer)
    assert model.embedding is not None
    narrow = model.compute_dtype
    model.compute_dtype = model.embedding.compute_dtype = torch.float32
    try:
        with unrounded(model):
            yield
    finally:
        model.compute_dtype = model.embedding.compute_dtype = narrow


def _above(loss: float, normal: float) -> float:
    return loss - normal if math.isfinite(loss) and math.isfinite(normal) else 0.0


def _bits(*values: float) -> bytes:
    return struct.pack(f"{len(values)}d", *values)
