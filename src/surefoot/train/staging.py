"""Host copies of a state, taken in one go so that training may go on while they are written."""

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.parallel.boxes import box_of
from surefoot.train.manifest import CheckpointError


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that this rank writes: a box at ``offsets`` in a whole of ``shape``."""

    content: Tensor
    """On the CPU, contiguous, a storage of its own."""
    shape: torch.Size
    offsets: torch.Size

    @property
    def box(self) -> tuple[object, ...]:
        """Where it lies, of what: the whole's shape, its own place and shape, dtype."""
        return tuple(self.shape), tuple(self.offsets), tuple(self.content.shape), self.content.dtype

    def sha256(self) -> str:
        """Of its bytes."""
        return hashlib.sha256(self.content.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


class Staging:
    """Memory for one copy of this rank's state, reused from save to save; one save uses it at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._user: threading.Thread | None = None

    def busy_until(self, user: threading.Thread) -> None:
        """Say that ``user`` reads the copies until it ends."""
        self._user = user

    def wait(self) -> None:
        """Return when nobody reads the copies any more."""
        if self._user is not None:
            self._user.join()
            self._user = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """This rank's pieces, copied; they stay as they are until the next call."""
        pieces: dict[str, Piece] = {}
        on_device = False
        for name, tensor in tensors.items():
            located = _locate(name, tensor.detach())
            if located is None:
                continue
            local, shape, offsets = located
            buffer = self._buffer(name, local)
            buffer.copy_(local, non_blocking=local.is_cuda)
            on_device |= local.is_cuda
            pieces[name] = Piece(buffer, shape, offsets)
        self._buffers = {name: piece.content for name, piece in pieces.items()}
        if on_device:
            torch.cuda.synchronize()
        return pieces

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        old = self._buffers.get(name)
        if old is not None and old.shape == like.shape and old.dtype == like.dtype:
            return old
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _locate(name: str, tensor: Tensor) -> tuple[Tensor, torch.Size, torch.Size] | None:
    """What this rank holds of a tensor, the whole's shape, and where in it; None when its mesh leaves this rank out, or leaves it nothing."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{name} is {tensor.layout} on {tensor.device}: a checkpoint takes dense tensors in memory"
        )
    if not isinstance(tensor, DTensor):
        return tensor, tensor.shape, torch.Size([0] * tensor.dim())
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name} has placements {tensor.placements}: reduce a partial sum before it is saved")
    if tensor.device_mesh.get_coordinate() is None:
        return None
    box = box_of(tensor)
    if box.numel == 0 and tensor.numel() > 0:
        return None
    return tensor.to_local(), tensor.shape, torch.Size(box.offsets)
