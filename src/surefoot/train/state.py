"""What rewinds: weights, moments, both counters and what the guard remembers."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from surefoot.guard.guard import GuardState
from surefoot.optim.adaptive_clip import Clipping
from surefoot.optim.loss_scale import LossScale
from surefoot.optim.noise_scale import NoiseState
from surefoot.optim.optimizer import Optimizer


@dataclass
class TrainState:
    """One run's state between two batches. Nothing else about a run changes and is needed to go on."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    """By name, as the optimiser knows them: under FSDP2 the shards, also while the model holds them gathered."""
    optimizer: Optimizer
    clipping: Clipping
    """With what it remembers of gradient norms."""
    step: int = 0
    """Applied updates."""
    batch_index: int = 0
    """Batches consumed."""
    smoothed_loss: float = 0.0
    """Bias-corrected running mean of the loss of applied steps, nats per token; 0 before the first."""
    guard: GuardState = GuardState()
    loss_scale: LossScale = field(default_factory=LossScale)
    noise: NoiseState = NoiseState()
    """The gradient noise scale, where it is measured."""

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by name (``weights/<name>``, ``exp_avg/<name>`` and the like), and what adaptive clipping remembers
        (``clip/...``): the live tensors, plain or DTensor."""
        weights = {f"weights/{name}": p.detach() for name, p in self.parameters.items()}
        return weights | self.optimizer.tensors() | self.clipping.tensors()

    def counters(self) -> dict[str, Any]:
        """Everything but the tensors, as plain JSON values."""
        return {
            "step": self.step,
            "batch_index": self.batch_index,
            "smoothed_loss": self.smoothed_loss,
            "guard": self.guard.to_dict(),
            "loss_scale": self.loss_scale.to_dict(),
            "noise": self.noise.to_dict(),
            "moments_since": dict(self.optimizer.moments_since),
        }

    def restore_counters(self, counters: dict[str, Any]) -> None:
        """Set everything but the tensors, and the optimiser's step counts with ``step``; gradients are dropped."""
        self.step = int(counters["step"])
        self.batch_index = int(counters["batch_index"])
        self.smoothed_loss = float(counters["smoothed_loss"])
        self.guard = GuardState.from_dict(counters["guard"])
        self.loss_scale.restore(counters.get("loss_scale", {}))
        # Checkpoints of before it was measured have none.
        self.noise = NoiseState.from_dict(counters.get("noise", {}))
        since = counters.get("moments_since", {})
        self.optimizer.moments_since = {kind: int(since.get(kind, 0)) for kind in self.optimizer.moments_since}
        self.optimizer.set_step_count(self.step)
        self.optimizer.zero_grad()
