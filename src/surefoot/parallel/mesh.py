"""Which ranks there are, and where this one runs."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from surefoot.config.errors import ConfigError
from surefoot.config.layout import Layout, Place, layout_of
from surefoot.config.parallel import NcclAxis, ParallelConfig
from surefoot.parallel.machine import num_cores


class EnvironmentFault(Exception):
    """The machine cannot do what was asked of it; the text says what is missing and the way out (exit code 4)."""


@dataclass(frozen=True)
class World:
    """This rank's place among ``size`` ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None
    """Weights over ranks: axes ``pp``, ``replicate``, ``shard``, ``tp`` over all ranks; None when there is one rank."""
    tokens: DeviceMesh | None = None
    """Tokens over the same ranks, in the same order: axes ``pp``, ``data``, ``cp``, ``tp``."""
    layout: Layout = Layout()

    @property
    def leads(self) -> bool:
        """Rank 0 writes the run folder."""
        return self.rank == 0

    @property
    def place(self) -> Place:
        """This rank's coordinates."""
        return self.layout.place(self.rank)

    @property
    def data_rank(self) -> int:
        """Which of ``data_size`` parts of a batch's rows is this rank's."""
        return self.place.data

    @property
    def data_size(self) -> int:
        """Parts that a batch's rows are cut into."""
        return self.layout.data

    @property
    def counts_rows(self) -> bool:
        """Of the ranks that know the same of the same rows (pp, cp and tp peers), the one whose numbers enter a sum over all ranks."""
        pp, _, cp, tp = self.place
        return pp == cp == tp == 0

    @property
    def counts_plain(self) -> bool:
        """Of the ranks that hold the same plain tensor, the one that counts it."""
        return self.rank == 0


def join_world(config: ParallelConfig, *, strict: bool = True) -> World:
    """Enter the process group that torchrun's environment describes (or that is already there), or stand alone.

    ``strict`` fixes, before anything touches a device, what cuBLAS and NCCL read once and then keep. Raises EnvironmentFault
    when cuda is asked for and there is none, ConfigError where ranks differ in their layout or do not fill it.
    """
    if strict:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
    device = _choose_device(config)
    _set_threads(config)
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
            return World(rank=0, size=1, device=device, mesh=None)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s))
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return World(rank=0, size=1, device=device, mesh=None)
    agree_on_layout(config, rank, size)
    try:
        layout = layout_of(config, size)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    weights = {"pp": layout.pp, "replicate": layout.replicate, "shard": layout.shard, "tp": layout.tp}
    tokens = {"pp": layout.pp, "data": layout.data, "cp": layout.cp, "tp": layout.tp}
    return World(
        rank=rank,
        size=size,
        device=device,
        mesh=_mesh(weights, config, device),
        tokens=_mesh(tokens, config, device),
        layout=layout,
    )


def agree_on_layout(config: ParallelConfig, rank: int, size: int) -> None:
    """Raise ConfigError, on every rank, where one was started with another layout than rank 0: each would wait for other peers.

    Through the store, before any communicator is there. Threads may differ. Collective.
    """
    if dist.get_backend() == "fake":
        return
    mine = {key: repr(getattr(config, key)) for key in config.__dataclass_fields__ if key != "threads"}
    store = dist.distributed_c10d._get_default_store()
    wait = timedelta(seconds=config.timeout_s)
    place = f"surefoot/layout/{store.add(f'surefoot/joined/{rank}', 1)}"
    if rank == 0:
        store.set(f"{place}/first", json.dumps(mine))
    else:
        store.wait([f"{place}/first"], wait)
        first = json.loads(store.get(f"{place}/first"))
        differ = [f"parallel.{key}={mine[key]} (rank 0: {first[key]})" for key in mine if mine[key] != first[key]]
        if differ:
            text = f"rank {rank} was started with {', '.join(differ)}: all ranks need the same settings"
            store.set(f"{place}/verdict", text)
        elif store.add(f"{place}/same", 1) == size - 1:
            store.set(f"{place}/verdict", "same")
    store.wait([f"{place}/verdict"], wait)
    if (verdict := store.get(f"{place}/verdict").decode()) != "same":
        raise ConfigError([verdict])


def axis_options(axes: Sequence[str], config: ParallelConfig, backend: str) -> dict[int | str, Any]:
    """Of every axis its backend and options: how long a collective waits, which torch gives to the default group only, and what NCCL may
    take of the GPU. Nothing for backends that have no options."""
    if backend not in ("gloo", "nccl"):
        return {}
    wait = timedelta(seconds=config.timeout_s)
    found: dict[int | str, Any] = {}
    for axis in axes:
        if backend == "gloo":
            found[axis] = backend, Backend.Options(backend, wait)
            continue
        asked: NcclAxis = getattr(config.nccl, {"replicate": "data", "shard": "data"}.get(axis, axis))
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=asked.high_priority)
        options._timeout = wait
        if asked.max_ctas:
            options.config.max_ctas = asked.max_ctas
        found[axis] = backend, options
    return found


def _mesh(axes: dict[str, int], config: ParallelConfig, device: torch.device) -> DeviceMesh:
    options = axis_options(tuple(axes), config, dist.get_backend())
    return init_device_mesh(
        device.type, tuple(axes.values()), mesh_dim_names=tuple(axes), backend_override=options or None
    )


def wait_for_leader(world: World, what: str) -> None:
    """Wait until rank 0 comes here too, up to a day: preparing data may outlast any collective's timeout."""
    if world.size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    if world.leads:
        store.set(f"surefoot/{what}", "done")
    else:
        store.wait([f"surefoot/{what}"], timedelta(days=1))


def leave_world() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _choose_device(config: ParallelConfig) -> torch.device:
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentFault(
                "parallel.device=cuda, but torch sees no GPU; use --parallel.device cpu, or install a CUDA build of torch"
            )
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _set_threads(config: ParallelConfig) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if config.threads:
        threads = config.threads
    elif "OMP_NUM_THREADS" in os.environ and local_ranks == 1:
        threads = int(os.environ["OMP_NUM_THREADS"])
    else:
        threads = max(1, num_cores() // local_ranks)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
