"""The first step of a run counted by hand: each document by itself, logits and a softmax, a gradient, one update as the paper has it.

What all layouts share, right or wrong, cannot show between them. So the run of one process is held against this: no packed rows, no masks,
no loader beyond the order of rows, no folded loss, no fused optimiser.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.config.model import GroupedQueryAttention
from surefoot.config.run import RunConfig
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.data.shards import Split
from surefoot.model.parametrization import fused_rows, roles
from surefoot.model.transformer import Transformer
from surefoot.parallel.precision import policy_of
from surefoot.proof.parity_bounds import Kind
from surefoot.proof.parity_compare import Deviation, compare_states, compare_tensors, distance, relative
from surefoot.proof.parity_trace import Trace
from surefoot.proof.parity_update import first_update

FAR = 8192
"""Tokens by which a document is shifted: rotary angles are relative, so its logits may not notice."""
HAND = "by hand"


@dataclass(frozen=True)
class Stretch:
    """A piece of a document that attends to itself alone."""

    tokens: list[int]
    targets: list[int]
    """One fewer than tokens where the document ends with it."""
    position: int
    """Of its first token."""


@dataclass
class Count:
    """Sums over a batch."""

    ce: float = 0.0
    squares: float = 0.0
    """Of the log-normaliser."""
    normaliser: float = 0.0
    largest: float = -math.inf
    targets: int = 0


def uncountable(config: RunConfig) -> str:
    """Why a config's first step is not counted by hand; empty where it is."""
    if config.data.repetition.kind == "mask":
        return "data.repetition: which stretches repeat themselves is not counted by hand"
    return ""


def compare_by_hand(config: RunConfig, alone: Trace) -> list[Deviation]:
    """Loss, metrics, gradient and update of the first step of the one-process run, and that its optimiser counts the steps it makes."""
    model = _model(config, alone.states[0])
    sums, gradient = _count(config, model)
    first = alone.batches[0]
    figures = _figures(config, sums, gradient, model)
    found = [
        Deviation(f"{name} of batch 0 ({HAND})", relative(first.figures[name], value), kind)
        for name, (value, kind) in figures.items()
    ]
    found += compare_tensors(alone.gradient, gradient, "gradient", f"gradient of step 1, {HAND}")
    settings = (
        config.optim,
        config.model,
        {name: role for name, role in roles(model).items() if name in gradient},
        fused_rows(model),
    )
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = first_update(
        weights, alone.gradient, first.figures["train/gradient_norm"], first.figures["train/lr"], *settings
    )
    state = {name: tensor for name, tensor in alone.states.get(1, {}).items() if name in expected}
    found += compare_states(state, expected, f"after step 1, {HAND}")
    for batch in alone.batches:
        steps = relative(batch.figures["signals/optimizer_steps"], float(batch.step))
        found.append(Deviation(f"the optimiser's own count of steps at step {batch.step}", steps, "figure"))
    if config.parallel.precision == "fp64" and isinstance(config.model.attention, GroupedQueryAttention):
        found.append(Deviation(f"logits of a document {FAR} positions further on", _shifted(config, model), "figure"))
    return found


def _model(config: RunConfig, state: Mapping[str, Tensor]) -> Transformer:
    policy = policy_of(config.parallel)
    model = Transformer(config.model, policy.compute, policy.weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[f"weights/{name}"])
    return model


def stretches(config: RunConfig) -> Iterator[Stretch]:
    """The first batch, document by document, straight from the shards."""
    loader = Loader(config.data, prepare(config.data, num_workers=1), config.seed)
    splits = [Split.open(source.train) for source in loader.prepared.sources]
    streams = [np.fromfile(split.folder / "tokens.bin", dtype=split.dtype).tolist() for split in splits]
    length = config.data.seq_len
    piece = next((stage.seq_len for stage in config.data.length_stages if stage.start_batch == 0), length)
    for source, _, row in loader.sample_ids(0).tolist():
        split, stream = splits[source], streams[source]
        spans = [split.document_span(number) for number in range(split.num_documents)]
        for cut in range(row * length, (row + 1) * length, piece):
            inside = [(max(begin, cut), min(end, cut + piece), end) for begin, end in spans]
            pieces = [part for part in inside if part[0] < part[1]]
            yield from _of_cut(stream, pieces, row * length, masked=config.data.document_mask)


def _of_cut(stream: list[int], pieces: list[tuple[int, int, int]], row: int, *, masked: bool) -> Iterator[Stretch]:
    """(first token, one behind the last, end of the document) of every document in a cut; in one stretch where they see each other."""
    parts = [
        (stream[begin:end], [stream[at + 1] if at + 1 < last else -1 for at in range(begin, end)], begin)
        for begin, end, last in pieces
    ]
    if masked:
        for tokens, targets, _ in parts:
            yield Stretch(tokens, targets, 0)
    elif parts:
        yield Stretch([t for part in parts for t in part[0]], [t for part in parts for t in part[1]], parts[0][2] - row)


def _count(config: RunConfig, model: Transformer) -> tuple[Count, dict[str, Tensor]]:
    """Sums over the first batch, and the gradient of its objective per target."""
    total = Count()
    batch = [stretch for stretch in stretches(config) if any(target >= 0 for target in stretch.targets)]
    total.targets = sum(target >= 0 for stretch in batch for target in stretch.targets)
    for stretch in batch:
        logits_TV = _logits(model, stretch.tokens, stretch.position)
        targets = torch.tensor(stretch.targets)
        predicts = targets >= 0
        ce = F.cross_entropy(logits_TV[predicts], targets[predicts], reduction="sum")
        normaliser = torch.logsumexp(logits_TV[predicts], dim=-1)
        squares = normaliser.square().sum()
        ((ce + config.model.loss.z_loss * squares) / total.targets).backward()  # type: ignore[no-untyped-call]
        total.ce += float(ce.detach())
        total.squares += float(squares.detach())
        total.normaliser += float(normaliser.detach().sum())
        total.largest = max(total.largest, float(normaliser.detach().max()))
    gradient = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return total, gradient


def _logits(model: Transformer, tokens: list[int], position: int) -> Tensor:
    """(T, V) of one sequence by itself."""
    positions = torch.arange(position, position + len(tokens), dtype=torch.int32)[None]
    logits = model(torch.tensor([tokens]), positions, None)
    assert isinstance(logits, Tensor)
    return logits[0]


def _figures(
    config: RunConfig, sums: Count, gradient: Mapping[str, Tensor], model: Transformer
) -> dict[str, tuple[float, Kind]]:
    """Metrics of the first step with what they are of."""
    squares = {name: float(grad.double().square().sum()) for name, grad in gradient.items()}
    by_role = roles(model)
    figures: dict[str, tuple[float, Kind]] = {
        "train/loss": (sums.ce / sums.targets, "loss"),
        "train/num_targets": (float(sums.targets), "loss"),
        "train/logsumexp_mean": (sums.normaliser / sums.targets, "loss"),
        "train/logsumexp_max": (sums.largest, "figure"),
        "train/gradient_norm": (math.sqrt(sum(squares.values())), "figure"),
    }
    for role in dict.fromkeys(by_role.values()):
        norm = math.sqrt(sum(square for name, square in squares.items() if by_role[name] == role))
        figures[f"train/gradient_norm/{role}"] = (norm, "figure")
    if config.model.loss.z_loss:
        figures["train/z_loss"] = (config.model.loss.z_loss * sums.squares / sums.targets, "loss")
    return figures


def _shifted(config: RunConfig, model: Transformer) -> float:
    """How far the logits of a document move with its positions."""
    longest = max(stretches(config), key=lambda stretch: len(stretch.tokens))
    with torch.no_grad():
        return distance(_logits(model, longest.tokens, FAR), _logits(model, longest.tokens, 0))
