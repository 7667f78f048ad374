"""What trials share, found out once before any of them starts: shards on disk, and what ``auto`` means on this machine."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from surefoot.config.codec import to_dict
from surefoot.config.data import DataConfig
from surefoot.config.run import CheckpointConfig, RunConfig
from surefoot.data.build import Progress, prepare
from surefoot.monitor.durable import read_json, write_atomic
from surefoot.parallel.mesh import join_world
from surefoot.scale.children import call_in_child
from surefoot.train.budget import OPEN_END, steps_of
from surefoot.train.interrupt import StopRequest
from surefoot.train.run import settle

_AUTOS: tuple[Literal["precision", "compile", "device"], ...] = ("precision", "compile", "device")
_CHECKPOINT_STEPS = 100
"""Steps between a trial's checkpoints at least; otherwise a quarter of the run, where its end is known."""


def prepare_all(
    configs: Sequence[RunConfig], progress: Progress | None, stop: StopRequest | None = None
) -> dict[str, str]:
    """Build all shards that any config reads, before any run looks for them; fingerprints of the data by ``data_key``. DataError."""
    data = {data_key(config): config.data for config in configs}
    prints: dict[str, str] = call_in_child(partial(_prepare, data, progress), stop)
    return prints


def data_key(config: RunConfig) -> str:
    """What tells one config's data from another's."""
    return json.dumps(to_dict(config.data), sort_keys=True)


def _prepare(data: Mapping[str, DataConfig], progress: Progress | None) -> dict[str, str]:
    return {key: prepare(config, num_workers=1, progress=progress).fingerprint for key, config in data.items()}


def decide_autos(
    configs: Sequence[RunConfig], folder: Path, stop: StopRequest | None = None
) -> dict[str, dict[str, str]]:
    """What every ``auto`` of the layout means here, by ``parallel.device``: measured once for the folder, undisturbed, and kept in it."""
    path = folder / "decided.json"
    known = read_json(path)
    asked = {c.parallel.device: c for c in configs if any(getattr(c.parallel, n) == "auto" for n in _AUTOS)}
    for device, config in asked.items():
        if device not in known:
            known[device] = call_in_child(partial(_decide, config), stop)
            write_atomic(path, json.dumps(known, indent=1) + "\n")
    return known


def _decide(config: RunConfig) -> dict[str, str]:
    asked = dataclasses.replace(config.parallel, precision="auto", compile="auto", threads=1)
    world = join_world(asked, strict=config.determinism == "strict")
    decided = settle(dataclasses.replace(config, parallel=asked), None, world).parallel
    return {name: getattr(decided, name) for name in _AUTOS}


def as_trial_runs(config: RunConfig, decided: Mapping[str, Mapping[str, str]]) -> RunConfig:
    """The config as a child runs it: nothing left to decide, one thread, checkpoints as sparse as a resume needs."""
    autos = {n: decided[config.parallel.device][n] for n in _AUTOS if getattr(config.parallel, n) == "auto"}
    parallel = dataclasses.replace(config.parallel, threads=1, **autos)  # type: ignore[arg-type]
    steps = steps_of(config)
    every = max(_CHECKPOINT_STEPS, steps // 4) if steps < OPEN_END else _CHECKPOINT_STEPS
    checkpoint = CheckpointConfig(every=every, keep_last=1, asynchronous=False)
    return dataclasses.replace(config, parallel=parallel, checkpoint=checkpoint)
