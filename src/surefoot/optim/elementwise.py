"""What rules that move each weight by itself share: moments by name, read in full width and written back in their own, and a step that the host decides on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surefoot.optim.clip import local_part
from surefoot.optim.optimizer import Setting, Update
from surefoot.optim.rounding import round_stochastically
from surefoot.parallel.boxes import box_of

_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Elements read at once: what a step needs in memory beside the state, at about 30 bytes each."""


@dataclass(frozen=True)
class Piece:
    """A stretch of one parameter as this rank holds it, flat, in fp32 at least. Rules change ``weights`` and ``moments`` in place."""

    name: str
    setting: Setting
    start: int
    """First element, counted from the first that this rank holds."""
    weights: Tensor
    gradient: Tensor
    """Clipped already."""
    moments: tuple[Tensor, ...]
    """In the order of ``Elementwise.keys``."""


class Elementwise:
    """Parameters with their moments and the count of updates.

    What is stored in bf16 is read as fp32, and written back by stochastic rounding with draws of (seed, batch_index, ``weights`` or the
    moment's key, name, element): the same under any sharding. What is stored wider is changed where it lies.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Mapping[str, Setting],
        keys: tuple[str, ...],
        *,
        narrow_moments: bool,
    ) -> None:
        self.parameters, self.settings, self.keys = dict(parameters), dict(settings), keys
        self.steps = 0
        """Applied updates."""
        self.moments: dict[str, dict[str, Tensor]] = {key: {} for key in keys}
        for name, parameter in self.parameters.items():
            if narrow_moments and parameter.dtype == torch.float64:
                raise ValueError(f"{name} is fp64, and its moments should be bf16: fp64 would be lost in them")
            dtype = torch.bfloat16 if narrow_moments else torch.promote_types(parameter.dtype, torch.float32)
            for key in keys:
                self.moments[key][name] = torch.zeros_like(
                    parameter, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format
                )

    def tensors(self) -> dict[str, Tensor]:
        """Moments, ``<key>/<parameter>``: the live tensors."""
        return {f"{key}/{name}": self.moments[key][name] for name in self.parameters for key in self.keys}

    def step_count(self) -> Tensor:
        """Applied updates, a scalar on the device."""
        device = local_part(next(iter(self.parameters.values()))).device
        return torch.tensor(float(self.steps), dtype=torch.float32, device=device)

    def begin(self, update: Update) -> list[str]:
        """Count the update, divide gradients by its scale in place, in their own dtype; names that have one. Nothing is done, and none
        is named, when it is refused."""
        skip, scale = torch.stack([update.skip.double(), update.scale.double()]).tolist()
        if skip:
            return []
        self.steps += 1
        held = {name: local_part(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        if scale != 1.0 and held:
            torch._foreach_div_(list(held.values()), scale)
        return list(held)

    def pieces(self, names: Sequence[str]) -> Iterator[Piece]:
        """All that this rank holds of these parameters, which have gradients, a stretch at a time: changes to narrow ones are lost."""
        for name in names:
            parameter = self.parameters[name]
            assert parameter.grad is not None
            stored = self._stored(name)
            gradient = local_part(parameter.grad).view(-1)
            length = _CHUNK.get(gradient.device.type, _CHUNK["cpu"])
            for start in range(0, gradient.numel(), length):
                weights, *moments = (wide(tensor[start : start + length]) for tensor in stored)
                mine = gradient[start : start + length].to(weights.dtype)
                yield Piece(name, self.settings[name], start, weights, mine, tuple(moments))

    def change(self, names: Sequence[str], rule: Callable[[Piece], None], update: Update) -> None:
        """Let the rule change every piece of these parameters, and write back what it changed."""
        purposes = ("weights", *self.keys)
        boxes = {name: box_of(self.parameters[name]) for name in names}
        for piece in self.pieces(names):
            rule(piece)
            changed = (piece.weights, *piece.moments)
            for purpose, stored, values in zip(purposes, self._stored(piece.name), changed, strict=True):
                if stored.dtype != torch.bfloat16:
                    continue
                round_stochastically(
                    values,
                    stored[piece.start : piece.start + values.numel()],
                    seed=update.seed,
                    batch_index=update.batch_index,
                    purpose=purpose,
                    name=piece.name,
                    box=boxes[piece.name],
                    start=piece.start,
                )

    def _stored(self, name: str) -> list[Tensor]:
        """Weights and moments of one parameter as they lie in memory, flat."""
        tensors = [self.parameters[name], *(self.moments[key][name] for key in self.keys)]
        return [local_part(tensor).view(-1) for tensor in tensors]

    def read(self, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """Weights and moments of these parameters, whole local parts in full width: copies, or the tensors themselves."""
        return [
            tuple(wide(local_part(t)) for t in (self.parameters[name], *(self.moments[key][name] for key in self.keys)))
            for name in names
        ]


def wide(tensor: Tensor) -> Tensor:
    """The numbers in fp32 at least; the tensor itself where they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def before_decay(change: Tensor, weights: Tensor, decay: float) -> Tensor:
    """What a step added in all, decay included, from its change but for the decay and the weights that it left.

    w_after = (1 - decay) w + change, so w_after - w = (change - decay w_after) / (1 - decay).
    """
    return (change - decay * weights) / (1.0 - decay)
