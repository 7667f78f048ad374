"""Numbers summed over ranks: one packed reduction for many scalars."""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.parallel.mesh import World


def sum_over_ranks(values: Sequence[Tensor | float], world: World) -> Tensor:
    """The values, each summed over all ranks, as one fp64 vector on the device: the same bits on every rank."""
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in values])
    if world.size > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.SUM)
    return packed


def max_over_ranks(values: Sequence[Tensor | float], world: World) -> Tensor:
    """The values, each the largest over all ranks, as one fp64 vector on the device. NaN does not survive a maximum: sum what may be NaN."""
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in values])
    if world.size > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return packed


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
