"""What crosses between ranks: every collective that a stretch of code starts, by axis and kind, with its bytes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.parallel.mesh import World

_KINDS = {
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d.allgather_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_": ("reduce_scatter", 1),
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.alltoall_": ("all_to_all", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.send": ("send", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", -1),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
}
"""Kind of every operator, and which of its arguments is its payload; -1 is its result. A receive is its sender's to count."""
_SILENT = ("c10d.recv_", "c10d.recv_any_source_", "c10d.barrier", "_c10d_functional.wait_tensor")


@dataclass(frozen=True, order=True)
class Flow:
    """One kind of collective over one axis."""

    axis: str
    """``shard``, ``replicate``, ``cp``, ``tp``, ``pp``, or ``world`` for all ranks."""
    kind: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``send``."""


@dataclass(frozen=True)
class Amount:
    """How often, and how much on one rank."""

    calls: int = 0
    payload: int = 0
    """Bytes of the whole tensors: what a gathering gives, what a scattering or an exchange takes, what is summed or sent."""

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.calls + other.calls, self.payload + other.payload)


def sent(flow: Flow, payload: int, ranks: int) -> int:
    """Bytes that one rank sends for a payload where ranks pass it round a ring, the least that any algorithm needs
    (doi:10.1016/j.jpdc.2008.09.002 section 2): (n - 1) / n of it, twice that for a sum that all get."""
    if flow.kind in ("send", "broadcast"):
        return payload
    return (2 if flow.kind == "all_reduce" else 1) * payload * (ranks - 1) // ranks


@contextmanager
def recorded_traffic(world: World) -> Iterator[dict[Flow, Amount]]:
    """Collects what this rank's collectives carry meanwhile. Groups of one rank carry nothing."""
    found: dict[Flow, Amount] = {}
    with _Recorder(_axes(world), found):
        yield found


def _axes(world: World) -> Mapping[str, str]:
    """Axes by the name of their group."""
    names: dict[str, str] = {}
    for mesh, axes in ((world.mesh, ("replicate", "shard", "tp")), (world.tokens, ("pp", "cp", "tp"))):
        if mesh is not None:
            names |= {mesh.get_group(axis).group_name: axis for axis in axes}
    if world.mesh is not None:
        names[world.mesh.get_group("pp").group_name] = "pp"
    return names


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, axes: Mapping[str, str], found: dict[Flow, Amount]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes, self.found = axes, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        if func.namespace == "surefoot":
            # an operator of our own has collectives inside, which its fake form has not
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT:
            if name not in _KINDS:
                raise ValueError(f"{name} is a collective whose bytes nobody has said how to count")
            kind, at = _KINDS[name]
            group = _group_of(args)
            if group.size() > 1:
                flow = Flow(self.axes.get(group.group_name, "world"), kind)
                payload = _bytes(result if at < 0 else args[at])
                self.found[flow] = self.found.get(flow, Amount()) + Amount(1, payload)
        return result


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The one argument that is a group, or else a group's name, which comes last."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except (RuntimeError, TypeError):
                continue
    names = [arg for arg in args if isinstance(arg, str)]
    return torch._C._distributed_c10d._resolve_process_group(GroupName(names[-1]))


def _bytes(value: Any) -> int:
    """Of a tensor, or of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)
