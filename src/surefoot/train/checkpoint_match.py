"""What a fork takes from a checkpoint whose model or optimiser is not quite its own; and a record without its tensors."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from surefoot.config.codec import from_dict
from surefoot.config.optim import Adam, AdamW, OptimConfig
from surefoot.guard.updates import Updates
from surefoot.monitor.wording import several
from surefoot.optim.adam import FusedAdam
from surefoot.optim.build import optimizer_of
from surefoot.optim.narrow_adam import NarrowAdam
from surefoot.optim.optimizer import Rule
from surefoot.train import manifest as manifests
from surefoot.train.checkpoint import over_ranks, verify
from surefoot.train.checkpoint_io import VerifiedReader
from surefoot.train.checkpoint_planning import TensorPlanner
from surefoot.train.manifest import METADATA, RECORD, CheckpointError
from surefoot.train.state import TrainState
from surefoot.train.unpickle import read_metadata


def read_record(folder: Path) -> dict[str, Any]:
    """What a checkpoint recorded besides its tensors. Raises CheckpointError when it is not whole."""
    manifest = manifests.read_manifest(folder)
    if problems := manifests.check_files(folder, manifest, [RECORD]):
        raise CheckpointError(problems[0])
    record: dict[str, Any] = json.loads((folder / RECORD).read_bytes())
    return record


@dataclass(frozen=True)
class Taken:
    """What a fork could not take from its parent's checkpoint as it was."""

    drawn: tuple[str, ...] = ()
    """Parameters that it does not have: they keep their initial draw."""
    restarted: tuple[tuple[int, str], ...] = ()
    """How many parameters have moments that start at zero, and why."""
    adapted: tuple[str, ...] = ()
    """Of what was taken, what is not the same number any more: rounded to another dtype, or fitted to other betas."""

    def sentence(self) -> str:
        """To be said of the fork after where it began; empty where it took everything."""
        new = f"; drawn anew: {', '.join(self.drawn)}" if self.drawn else ""
        zero = "".join(f"; moments start at zero for {several(n, 'parameter')}: {why}" for n, why in self.restarted)
        return new + zero + "".join(f"; {text}" for text in self.adapted)


@dataclass(frozen=True)
class Source:
    """A checkpoint that has been verified, open for the tensors that one asks for."""

    folder: Path
    metadata: Metadata
    group: Any

    def lacks(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Names of those that it does not have in that shape."""
        entries = {name: self.metadata.state_dict_metadata.get(name) for name in tensors}
        return {
            name
            for name, entry in entries.items()
            if not isinstance(entry, TensorStorageMetadata) or entry.size != tensors[name].shape
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor that was saved, by name."""
        entries = self.metadata.state_dict_metadata.items()
        return {name: tuple(entry.size) for name, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def dtype(self, name: str) -> torch.dtype:
        """In which a tensor was saved."""
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Load these in place, rounded to the nearest where they are of another dtype. All ranks call it."""
        _load_state_dict(
            state_dict=dict(sorted(tensors.items())),
            storage_reader=VerifiedReader(self.folder, self.metadata, rounds=True),
            process_group=self.group,
            no_dist=not dist.is_initialized(),
            planner=TensorPlanner(),
        )


def open_source(folder: Path, group: Any = None, *, verified: bool = False) -> Source:
    """Verify a checkpoint, unless the caller has, and read its table of contents. All ranks call it. Raises CheckpointError."""
    if not verified and (problems := verify(folder, group=group)):
        raise CheckpointError("\n".join(problems))
    manifest = manifests.read_manifest(folder)
    return Source(folder, read_metadata(folder / METADATA, manifest.files.keys() - {RECORD, METADATA}), group)


def load_matching(folder: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill, in place, the tensors that a checkpoint has by the same name and shape; returns the names it has not.

    Verified like any load. Raises CheckpointError.
    """
    source = open_source(folder)
    missing = source.lacks(tensors)
    source.fill({name: tensor for name, tensor in tensors.items() if name not in missing})
    return sorted(missing)


def take_over(folder: Path, state: TrainState, *, group: Any = None) -> Taken:
    """Bring a fork's state to its parent's checkpoint as far as the two share it, in place; says what they do not share.

    Weights are taken by name and shape. Moments are, where they are moments of the same kind of rule: others start at zero. Where a rule
    corrects a bias, one count serves all its parameters, so that one of them without moments starts all of them at zero, counted from here.
    What clipping remembers is taken as a whole or not at all. All ranks call it. Raises CheckpointError.
    """
    source = open_source(folder, group)
    record = read_record(folder)
    tensors = state.tensors()
    missing = source.lacks(tensors)
    drawn = sorted(_union([name for name in state.parameters if f"weights/{name}" in missing], group))
    before = from_dict(OptimConfig, record["config"]["optim"])
    counters = dict(record["counters"])
    since = {rule.kind: int(counters.get("moments_since", {}).get(rule.kind, 0)) for rule in state.optimizer.rules}
    zero: set[str] = set()
    restarted: list[tuple[int, str]] = []
    # a stage of a pipeline has some of a rule's parameters, or none; what becomes of the rule is the same on all
    found = {rule.kind: _reasons(rule, state, before, missing, drawn) for rule in state.optimizer.rules}
    why = _union([(kind, name, text) for kind, texts in found.items() for name, text in sorted(texts.items())], group)
    moved = _union([(rule.kind, name) for rule in state.optimizer.rules for name in rule.parameters], group)
    for rule in state.optimizer.rules:
        reasons = {name: text for kind, name, text in why if kind == rule.kind}
        if not reasons:
            continue
        has_second_moment = not math.isnan(rule.beta2)
        names = {name for kind, name in moved if kind == rule.kind} if has_second_moment else set(reasons)
        if has_second_moment:
            since[rule.kind] = int(counters["step"])
        together = ", and its rule counts updates for all it moves" if len(reasons) < len(names) else ""
        restarted.append((len(names), ", ".join(dict.fromkeys(reasons.values())) + together))
        zero |= {key for key in rule.tensors() if key.partition("/")[2] in names}
    remembered = state.clipping.tensors()
    if remembered.keys() & missing:
        zero |= remembered.keys()
    taken = {name: tensor for name, tensor in tensors.items() if name not in missing | zero}
    source.fill(taken)
    for name in zero:
        tensors[name].zero_()
    state.restore_counters(counters | {"moments_since": since})
    if restarted:
        forget_update_sizes(state)
    adapted = _rounded(source, taken) + _fitted(state, before)
    return Taken(tuple(drawn), tuple(restarted), tuple(adapted))


def _union(mine: list[Any], group: Any) -> list[Any]:
    """What any rank has, each once."""
    return list(dict.fromkeys(item for share in over_ranks(mine, group) for item in share))


def _reasons(rule: Rule, state: TrainState, before: OptimConfig, missing: set[str], drawn: list[str]) -> dict[str, str]:
    """The parameters of a rule for which the checkpoint has no moments of its kind, each with the reason."""
    lacking = {key.partition("/")[2] for key in rule.tensors().keys() & missing}
    reasons = {}
    for name in rule.parameters:
        was = optimizer_of(state.optimizer.settings[name].role, before).kind
        if name in drawn:
            reasons[name] = "some are drawn anew"
        elif was != rule.kind:
            reasons[name] = f"the optimiser changed from {was} to {rule.kind}"
        elif name in lacking:
            reasons[name] = "the parent has none of this shape"
    return reasons


def _rounded(source: Source, taken: Mapping[str, Tensor]) -> list[str]:
    """Sentences about what was saved in another dtype."""
    said: dict[str, None] = {}
    for name, tensor in taken.items():
        saved, here = source.dtype(name), tensor.dtype
        if saved != here:
            what = "weights" if name.startswith("weights/") else "moments"
            nearest = "" if torch.promote_types(saved, here) == here else ", to the nearest"
            said[f"{what} taken from {str(saved)[6:]} to {str(here)[6:]}{nearest}"] = None
    return list(said)


def forget_update_sizes(state: TrainState) -> None:
    """The guard learns anew how large updates usually are: the first from empty moments are of another size."""
    detectors = replace(state.guard.detectors, updates=Updates())
    state.guard = replace(state.guard, detectors=detectors)


def _fitted(state: TrainState, before: OptimConfig) -> list[str]:
    """Adam's moments as they would lie under the fork's betas, their means the same once corrected for bias; a sentence where that changed any."""
    said: dict[str, None] = {}
    for rule in state.optimizer.rules:
        if not isinstance(rule, FusedAdam | NarrowAdam):
            continue
        was = optimizer_of(state.optimizer.settings[next(iter(rule.parameters))].role, before)
        tensors = rule.tensors()
        updates = state.step - state.optimizer.moments_since[rule.kind]
        if updates == 0 or not isinstance(was, Adam | AdamW):
            continue
        for moment, old, new in (
            ("exp_avg", was.beta1, rule.config.beta1),
            ("exp_avg_sq", was.beta2, rule.config.beta2),
        ):
            factor = (1.0 - new**updates) / (1.0 - old**updates)
            if factor != 1.0:
                for name in rule.parameters:
                    tensors[f"{moment}/{name}"].mul_(factor)
                said[f"moments scaled to the betas of {rule.kind} here, their means kept"] = None
    return list(said)
