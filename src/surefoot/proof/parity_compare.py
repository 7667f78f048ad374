"""Two runs held against each other: of everything that layout must not change, how far it is from the run of one process."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.parallel.digest import combine, digest_tensors
from surefoot.proof.parity_bounds import FLOOR, Bounds, Kind
from surefoot.proof.parity_trace import BatchTrace, Trace

MEMORY = 1.0
"""Scale of what the guard remembers: nats, logarithms and counts. Residuals about a trend are near zero, and their digits are those of what
they are residuals of."""
LOSSES = ("train/loss", "eval/", "signals/loss", "train/document_loss", "train/z_loss", "signals/document_loss")


@dataclass(frozen=True)
class Deviation:
    """How far one thing is from what it should be."""

    what: str
    """Tensor or metric, and when."""
    value: float
    """||a - b|| / ||b||; infinite where the two cannot be compared, or one is zero and the other is not."""
    kind: Kind

    def share(self, bounds: Bounds) -> float:
        """Of its bound; above 1 is too far."""
        bound = bounds.of(self.kind)
        if self.value == 0:
            return 0.0
        return self.value / bound if bound else math.inf


def compare(found: Trace, expected: Trace, *, exact: bool) -> list[Deviation]:
    """Every comparison of a run with the one-process run of the same config and precision.

    ``exact``: what the guard remembers is compared too. It holds decisions, such as the step with the highest entropy so far, which noise in
    the last digits of fp32 and bf16 may turn over.
    """
    deviations = [*_check_digests(found)]
    if len(found.batches) != len(expected.batches):
        deviations.append(Deviation(f"{len(found.batches)} batches for {len(expected.batches)}", math.inf, "sample"))
    for mine, other in zip(found.batches, expected.batches, strict=False):
        deviations += _compare_batch(mine, other)
    deviations += compare_tensors(found.gradient, expected.gradient, "gradient", "gradient of step 1")
    for step in sorted(found.states.keys() | expected.states.keys()):
        mine_state, other_state = found.states.get(step, {}), expected.states.get(step, {})
        deviations += compare_states(mine_state, other_state, f"after step {step}")
    memory = _figures(found.memory, expected.memory, floor=MEMORY) if exact else ()
    deviations += [Deviation(f"{name} at the end", value, "figure") for name, value in memory]
    return deviations


def worst_of(deviations: Sequence[Deviation], bounds: Bounds) -> Deviation:
    """The one that is furthest beyond its bound, or nearest to it; of equals the first, which the others follow from."""
    return max(deviations, key=lambda deviation: deviation.share(bounds))


def _check_digests(trace: Trace) -> Iterator[Deviation]:
    """The ranks' own digest of their state is that of the whole tensors."""
    told = {batch.step: batch.state_digest for batch in trace.batches}
    for step, tensors in trace.states.items():
        if step in told:
            right = combine(digest_tensors(tensors)) == told[step]
            yield Deviation(f"state digest after step {step}", 0.0 if right else math.inf, "sample")


def _compare_batch(mine: BatchTrace, other: BatchTrace) -> Iterator[Deviation]:
    at = f"of batch {other.batch_index}"
    facts = {
        "number": (mine.batch_index, other.batch_index),
        "step": (mine.step, other.step),
        **{name: (mine.words.get(name), other.words.get(name)) for name in {**mine.words, **other.words}},
        "tokens of the rows": (mine.rows, other.rows),
    }
    for name, (a, b) in facts.items():
        yield Deviation(f"{name} {at}", 0.0 if a == b else math.inf, "sample")
    yield Deviation(f"token losses {at}", distance(mine.token_losses_BT, other.token_losses_BT), "loss")
    for name, value in _figures(mine.figures, other.figures):
        yield Deviation(f"{name} {at}", value, "loss" if name.startswith(LOSSES) else "figure")


def _figures(mine: Mapping[str, float], other: Mapping[str, float], floor: float = 0.0) -> Iterator[tuple[str, float]]:
    for name in {**mine, **other}:
        if name in mine and name in other:
            yield name, relative(mine[name], other[name], floor)
        else:
            yield name, math.inf


def relative(a: float, b: float, floor: float = 0.0) -> float:
    """|a - b| / |b|, where |b| counts as no less than ``floor``; 0 where both are zero, missing or the same infinity."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)) or (floor == 0 and (a == 0 or b == 0)):
        return math.inf
    return abs(a - b) / max(abs(b), floor)


def compare_states(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], when: str) -> Iterator[Deviation]:
    """Weights, and everything else that a state holds, kind by kind: tensors of a kind are of one scale."""
    kinds = dict.fromkeys(name.partition("/")[0] for name in {**found, **expected})
    for kind in kinds:
        mine = {name: tensor for name, tensor in found.items() if name.startswith(f"{kind}/")}
        other = {name: tensor for name, tensor in expected.items() if name.startswith(f"{kind}/")}
        yield from compare_tensors(mine, other, "weight" if kind == "weights" else "moment", when)


def compare_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], kind: Kind, when: str
) -> Iterator[Deviation]:
    """Every tensor of one kind by name."""
    scale = _root_mean_square(expected.values())
    for name in {**found, **expected}:
        if name in found and name in expected:
            value = distance(found[name], expected[name], floor=FLOOR * scale)
        else:
            value = math.inf
        yield Deviation(f"{name} ({when})", value, kind)


def distance(a: Tensor, b: Tensor, *, floor: float = 0.0) -> float:
    """||a - b|| / ||b||, where ||b|| counts as no less than that of a tensor of its size whose elements are ``floor``."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    x, y = a.double(), b.double()
    if torch.equal(x, y):
        return 0.0
    gap, size = float(torch.linalg.norm(x - y)), float(torch.linalg.norm(y))
    if size == 0 or not bool(x.any()) or not math.isfinite(gap):
        return math.inf
    return gap / max(size, floor * math.sqrt(y.numel()))


def _root_mean_square(tensors: Iterable[Tensor]) -> float:
    squares, count = 0.0, 0
    for tensor in tensors:
        squares += float(tensor.double().square().sum())
        count += tensor.numel()
    return math.sqrt(squares / count) if count else 0.0
