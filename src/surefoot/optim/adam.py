"""Adam and AdamW by torch's fused kernel, which decides on the device and folds clipping in."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from surefoot.config.optim import Adam, AdamW
from surefoot.optim.clip import local_part
from surefoot.optim.optimizer import Setting, Update


class FusedAdam:
    """AdamW (arXiv:1711.05101 algorithm 2) or Adam (arXiv:1412.6980 algorithm 1), moments in the dtype of the parameters."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Setting], config: AdamW | Adam
    ) -> None:
        self.parameters, self.settings, self.config = dict(parameters), dict(settings), config
        self.kind: str = config.kind
        self.beta2 = config.beta2
        self.kernel = self._kernel()
        for parameter in self.parameters.values():
            self.kernel.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def _kernel(self) -> torch.optim.Optimizer:
        groups: dict[tuple[float, float, float], list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            setting = self.settings[name]
            groups.setdefault((setting.lr, setting.weight_decay, setting.eps), []).append(parameter)
        kind = torch.optim.AdamW if isinstance(self.config, AdamW) else torch.optim.Adam
        return kind(
            [
                {"params": members, "scale": lr, "weight_decay": decay, "eps": eps}
                for (lr, decay, eps), members in groups.items()
            ],
            betas=(self.config.beta1, self.config.beta2),
            fused=True,
        )

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{key}/{name}": self.kernel.state[parameter][key]
            for name, parameter in self.parameters.items()
            for key in ("exp_avg", "exp_avg_sq")
        }

    def step_count(self) -> Tensor:
        count: Tensor = next(iter(self.kernel.state.values()))["step"]
        return count

    def set_step_count(self, step: int) -> None:
        for state in self.kernel.state.values():
            state["step"].fill_(step)

    def apply(self, update: Update) -> None:
        """Gated, the kernel reads ``scale`` and ``skip`` on the device; otherwise the host reads ``skip``. Same bits either way."""
        kernel = self.kernel
        for group in kernel.param_groups:
            group["lr"] = update.lr * group["scale"]
        if not update.gated and bool(update.skip):
            return
        parameters = self.parameters.values()
        fp64 = next(iter(parameters)).dtype == torch.float64
        if fp64:  # the fused kernel takes its scale in fp32, which would cost fp64 its last digits
            grads = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_div_(grads, update.scale.to(torch.float64))
        else:
            kernel.grad_scale = update.scale.to(torch.float32)  # type: ignore[attr-defined]
        if update.gated:
            kernel.found_inf = update.skip.to(torch.float32)  # type: ignore[attr-defined]
        try:
            kernel.step()
        finally:
            kernel.__dict__.pop("grad_scale", None)
            kernel.__dict__.pop("found_inf", None)
        # One count for all: the kernel leaves that of a parameter without a gradient behind, and a resume could not tell.
        idle = [kernel.state[p]["step"] for p in parameters if p.grad is None]
        if idle:
            torch._foreach_add_(idle, 1.0 - update.skip.to(idle[0].dtype))

    def last_updates(self, names: Sequence[str], lr: float) -> list[Tensor]:
        """AdamW after step t moved w by -(lr mhat / (sqrt(vhat) + eps) + lr wd w_before), which in terms of the weights that are there now
        is -(lr mhat / (sqrt(vhat) + eps) + lr wd w) / (1 - lr wd); Adam's decay is in its moments."""
        settings = [self.settings[name] for name in names]
        roots = self.second_moments(names)
        torch._foreach_add_(roots, [s.eps for s in settings])
        updates = torch._foreach_div(self._moments("exp_avg", names), roots)
        correction = 1 - self.config.beta1 ** float(self.step_count()) or math.nan
        rates = [lr * s.lr for s in settings]
        torch._foreach_mul_(updates, [rate / correction for rate in rates])
        if isinstance(self.config, AdamW):
            decays = [rate * s.weight_decay for rate, s in zip(rates, settings, strict=True)]
            weights = [local_part(self.parameters[name]) for name in names]
            torch._foreach_add_(updates, torch._foreach_mul(weights, decays))
            torch._foreach_div_(updates, [1 - decay for decay in decays])
        torch._foreach_neg_(updates)
        return list(updates)

    def second_moments(self, names: Sequence[str]) -> list[Tensor]:
        correction = math.sqrt(1 - self.config.beta2 ** float(self.step_count())) or math.nan
        roots = torch._foreach_sqrt(self._moments("exp_avg_sq", names))
        return list(torch._foreach_div(roots, correction))

    def _moments(self, key: str, names: Sequence[str]) -> list[Tensor]:
        return [local_part(self.kernel.state[self.parameters[name]][key]) for name in names]
