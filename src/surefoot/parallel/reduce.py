"""Numbers over ranks, summed, the largest, or all of them: one packed collective for many."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from surefoot.parallel.boxes import dim_cut_by
from surefoot.parallel.mesh import World


def sum_over_ranks(values: Sequence[Tensor | float], world: World) -> Tensor:
    """The values, each summed over all ranks, as one fp64 vector on the device: the same bits on every rank. Tensors are flattened in order."""
    total = packed(values, world)
    if world.size > 1:
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def of_rows(values: Sequence[Tensor | float], world: World) -> list[Tensor | float]:
    """What this rank puts into a sum over all ranks of numbers about rows: nothing, where a peer that shares its rows already does."""
    if world.counts_rows:
        return list(values)
    return [torch.zeros_like(value) if isinstance(value, Tensor) else 0.0 for value in values]


def max_over_ranks(values: Sequence[Tensor | float], world: World) -> Tensor:
    """The values, each the largest over all ranks, as one fp64 vector on the device. NaN does not survive a maximum: sum or gather what may be NaN."""
    top = packed(values, world)
    if world.size > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
    return top


def gather_over_ranks(values: Sequence[Tensor | float], world: World) -> Tensor:
    """The values of every rank, as many on each, fp64 (ranks, values) on the device: NaN survives, and no order is lost."""
    mine = packed(values, world)
    if world.size == 1:
        return mine[None]
    everyone = mine.new_empty((world.size, len(mine)))
    dist.all_gather(list(everyone.unbind()), mine)
    return everyone


def sum_over_shards(shares: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Of every tensor the sum of its ranks' shares, (tensors,): one number per tensor, which each rank has found from the part it holds.

    A plain tensor is whole on every rank, and so is its share. Collective over the axes that cut any of the tensors, which come in the
    same order on every rank; the same bits on all of them.
    """
    total = shares.clone()
    cuts: dict[tuple[DeviceMesh, int], list[int]] = {}
    for at, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            for axis, placement in enumerate(tensor.placements):
                if dim_cut_by(placement) is not None:
                    cuts.setdefault((tensor.device_mesh, axis), []).append(at)
    for (mesh, axis), places in cuts.items():
        # weights may lie in the host's memory, where an accelerator's ranks do not meet
        part = total[places].to(mesh.device_type)
        dist.all_reduce(part, op=dist.ReduceOp.SUM, group=mesh.get_group(axis))
        total[places] = part.to(total.device)
    return total


def packed(values: Sequence[Tensor | float], world: World) -> Tensor:
    """Numbers and flattened tensors in one new fp64 vector on the device; neighbouring plain numbers cross to it together."""
    pieces: list[Tensor] = []
    for plain, group in groupby(values, key=lambda value: not isinstance(value, Tensor)):
        if plain:
            pieces.append(torch.tensor(list(group), dtype=torch.float64, device=world.device))
        else:
            pieces += [torch.as_tensor(v, dtype=torch.float64, device=world.device).reshape(-1) for v in group]
    return torch.cat(pieces)


def from_rank_zero(value: Any, world: World) -> Any:
    """Rank 0's JSON value, on every rank; what the others pass is ignored."""
    if world.size == 1:
        return value
    payload = json.dumps(value).encode() if world.leads else b""
    length = torch.tensor([len(payload)], dtype=torch.int64, device=world.device)
    dist.broadcast(length, src=0)
    size = int(length.item())
    buffer = torch.zeros(size, dtype=torch.uint8, device=world.device)
    if world.leads:
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return json.loads(bytes(buffer.cpu().tolist()))


def from_every_rank(value: Any, world: World) -> list[Any]:
    """Each rank's value, by rank, on every rank. For rare, small things: it travels pickled, through the host."""
    if world.size == 1:
        return [value]
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, value)
    return gathered
