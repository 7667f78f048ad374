"""One run opened: devices joined, folder locked, data at hand, state where the surviving run stands."""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from surefoot.config.codec import from_toml, to_toml
from surefoot.config.errors import ConfigError
from surefoot.config.fingerprint import changed_computation, fingerprint, refuse_changes
from surefoot.config.run import RunConfig
from surefoot.config.validate import validate
from surefoot.data.build import Progress, prepare
from surefoot.data.prepared import PreparedData
from surefoot.guard.ledger import Checkpoint
from surefoot.monitor.durable import read_json
from surefoot.monitor.run import Run
from surefoot.monitor.store import RunStore
from surefoot.parallel.apply import compiles
from surefoot.parallel.device import choose_precision, peak_flops
from surefoot.parallel.mesh import World, wait_for_leader
from surefoot.parallel.precision import Precision
from surefoot.train.checkpoint import own_group
from surefoot.train.evaluate import TrainingData
from surefoot.train.keeping import Keeping, Notify
from surefoot.train.opening import begin_fork, begin_or_resume, environment, environment_changes
from surefoot.train.setup import Setup, set_up
from surefoot.train.snapshot import check_budget
from surefoot.train.state import TrainState
from surefoot.train.stock import ResumeRefused

EMPTY_RUN = {"lock", "ledger.jsonl", "attempts", "checkpoints"}
"""What a run folder holds before anything has happened."""


@dataclass(frozen=True)
class OpenRun:
    """Everything the loop needs, and what a first line says."""

    config: RunConfig
    fingerprint: str
    """Of the config as it was asked for."""
    setup: Setup
    state: TrainState
    data: TrainingData
    keeping: Keeping
    opening: str
    """A sentence: starting, continuing from where, or forked from where."""
    snapshot_gib: float
    """Memory that in-memory snapshots will take on this rank."""


@dataclass(frozen=True)
class ForkOf:
    """Where a fork begins."""

    parent: Run
    checkpoint: Checkpoint
    changes: Sequence[tuple[str, str, str]]
    """Dotted key, value in the parent, value in the fork."""


@contextmanager
def open_run(
    config: RunConfig,
    folder: Path,
    world: World,
    *,
    notify: Notify,
    progress: Progress | None = None,
    allow_change: Sequence[str] = (),
    fork: ForkOf | None = None,
    peak: float | None = None,
) -> Iterator[OpenRun]:
    """Open or continue the run in ``folder``; on leaving, wait for what is being written and let the folder go.

    ``peak`` (FLOP/s) is what MFU is a share of: None measures it, 0 leaves MFU out. Collective over ranks. Raises ConfigError when the
    folder's run was started with another config or the config does not fit the ranks, DataError for data that cannot be trained on,
    StoreError for a folder that cannot be written, ResumeRefused, EnvironmentFault, CheckpointError.
    """
    asked = fingerprint(config)
    if problems := validate(config, world.size):
        raise ConfigError(problems)
    say = partial(_warn, notify)
    store = RunStore(folder, say) if world.leads else None
    try:
        before = stored_config(folder)
        config, changed = agree(config, before, folder, world, allow_change)
        prepared = prepare_together(config, world, progress)
        data = TrainingData.open(config, prepared)
        setup, state = set_up(config, world, peak_flops=find_peak(config, world) if peak is None else peak)
        snapshot_gib = check_budget(state.tensors(), config.guard.snapshots, config.guard.snapshot_budget_gib, world)
        provenance = {"data_fingerprint": prepared.fingerprint, "tokenizer_fingerprint": prepared.tokenizer_fingerprint}
        keeping = Keeping(config, world, folder, store, notify, provenance, own_group())
        if store:
            data_may_change = any(key.split(".")[0] == "data" for key in allow_change)
            surroundings = look_around(
                store, config, prepared, world, say, resumed=before is not None, data_may_change=data_may_change
            )
        if fork is not None:
            opening = begin_fork(state, keeping, fork.parent, fork.checkpoint, fork.changes, data.loader.holds)
        else:
            opening = begin_or_resume(state, keeping, changed=changed)
        if store:
            write_down(store, config, prepared, surroundings)
        try:
            yield OpenRun(config, asked, setup, state, data, keeping, opening, snapshot_gib)
        finally:
            # With peers that may be gone, the save in flight is left to its thread; one rank alone can always end it.
            if world.size == 1 or sys.exc_info()[0] is None:
                keeping.wait()
    finally:
        if store:
            store.close()
            forget_if_empty(store)


def forget_if_empty(store: RunStore) -> None:
    """Remove the folder of a run that never began, if it holds nothing else."""
    if not store.ledger.rows and {path.name for path in store.folder.iterdir()} <= EMPTY_RUN:
        shutil.rmtree(store.folder, ignore_errors=True)


def find_peak(config: RunConfig, world: World) -> float:
    """FLOP/s of the device's matrix products at best, by its data sheet or measured."""
    return peak_flops(world.device, cast(Precision, config.parallel.precision))


def stored_config(folder: Path) -> RunConfig | None:
    """The config a folder's run was started with; None where there is no run yet."""
    path = folder / "config.toml"
    return from_toml(RunConfig, path) if path.exists() else None


def agree(
    config: RunConfig, before: RunConfig | None, folder: Path, world: World, allow_change: Sequence[str]
) -> tuple[RunConfig, list[str]]:
    """The config settled, and the keys in which it differs from the folder's run; ConfigError where they may not."""
    config = settle(config, before, world)
    if before is None:
        return config, []
    refuse_changes(before, config, str(folder), allow_change)
    return config, changed_computation(before, config)


def settle(config: RunConfig, before: RunConfig | None, world: World) -> RunConfig:
    """The config with every ``auto`` decided: as the run decided before, or by looking at this machine."""
    parallel = config.parallel
    if parallel.precision == "auto":
        precision = before.parallel.precision if before else choose_precision(world.device)
        parallel = dataclasses.replace(parallel, precision=precision)
    if parallel.compile == "auto":
        answer = before.parallel.compile if before else ("on" if compiles(parallel) else "off")
        parallel = dataclasses.replace(parallel, compile=answer)
    if parallel.device == "auto":
        parallel = dataclasses.replace(parallel, device="cuda" if world.device.type == "cuda" else "cpu")
    return dataclasses.replace(config, parallel=parallel)


def prepare_together(config: RunConfig, world: World, progress: Progress | None) -> PreparedData:
    """Rank 0 builds what is missing, for as long as it takes; the others then find it."""
    if world.leads:
        prepared = prepare(config.data, progress=progress)
    wait_for_leader(world, "data")
    return prepared if world.leads else prepare(config.data)


def look_around(
    store: RunStore,
    config: RunConfig,
    prepared: PreparedData,
    world: World,
    say: Callable[[str], None],
    *,
    resumed: bool,
    data_may_change: bool,
) -> dict[str, Any]:
    """What env.json will hold; what changed in it since the last start is said, other data than before refused (ResumeRefused)."""
    prints = {"data_fingerprint": prepared.fingerprint, "tokenizer_fingerprint": prepared.tokenizer_fingerprint}
    now: dict[str, Any] = environment(config, prints) | {"world_size": world.size}
    if resumed:
        before = read_json(store.folder / "env.json")
        changed = before.get("data_fingerprint", prepared.fingerprint) != prepared.fingerprint
        if changed and not data_may_change:
            raise ResumeRefused(
                f"{store.folder}: the data is not what the run started with (fingerprint {before['data_fingerprint']}, now "
                f"{prepared.fingerprint}): a resumed run would read other batches. Restore the data, or `surefoot fork {store.folder} --at STEP`"
            )
        for change in environment_changes(before, now):
            say(f"since the last start, {change}: the same bits are promised only where nothing changes")
    return now


def write_down(store: RunStore, config: RunConfig, prepared: PreparedData, surroundings: dict[str, Any]) -> None:
    """config.toml, env.json and a copy of the tokenizer: only once the run has begun, so that what was refused left no trace."""
    store.write_config(to_toml(config))
    store.write_environment(surroundings)
    if prepared.tokenizer_path is not None:
        shutil.copyfile(prepared.tokenizer_path, store.folder / "tokenizer.json")


def _warn(notify: Notify, text: str) -> None:
    notify("warning", {"text": text})
