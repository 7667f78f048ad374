"""What strict determinism costs on this device: steps of a small model, the modes taking turns."""

import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.model.parametrization import initialise, roles
from surefoot.model.transformer import Transformer
from surefoot.optim.build import build_optimizer
from surefoot.optim.optimizer import Update
from surefoot.parallel.precision import Precision, compute_dtype
from surefoot.recipes.tiny import tiny
from surefoot.train.setup import set_determinism

_ROWS = 4
_WARM_STEPS, _TIMED_STEPS = 1, 6


def strict_cost(device: torch.device, precision: Precision) -> dict[str, float]:
    """Shortest time of one step of the tiny model in strict and in fast mode, seconds, and how far the same step repeats (``noise``).

    The modes alternate step by step, so that a busy moment of the machine hits both. What is read once per process (the workspace of cuBLAS)
    is as in strict mode for both; collectives are not measured.
    """
    config = tiny()
    modes = {mode: dataclasses.replace(config, determinism=mode) for mode in ("strict", "fast")}
    set_determinism(modes["strict"])
    step = _training_step(device, precision)
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for turn in range(_WARM_STEPS + _TIMED_STEPS):
        for mode, mode_config in modes.items():
            set_determinism(mode_config)
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= _WARM_STEPS:
                times[mode].append(time.perf_counter() - start)
    best = {mode: min(found) for mode, found in times.items()}
    # Every other step against the rest: what two measurements of one thing differ by at this moment.
    noise = max(abs(min(found[::2]) / min(found[1::2]) - 1) for found in times.values())
    return {"strict_step_s": best["strict"], "fast_step_s": best["fast"], "noise": noise}


def _training_step(device: torch.device, precision: Precision) -> Callable[[], Tensor]:
    """Forward, backward and update of the tiny model on random tokens, two documents a row; returns the mean loss."""
    config = tiny()
    model = Transformer(config.model, compute_dtype(precision))
    initialise(model, config.model, config.seed)
    model.to(device)
    optimizer = build_optimizer(dict(model.named_parameters()), roles(model), config.optim, config.model)
    width = config.data.seq_len
    generator = torch.Generator().manual_seed(config.seed)
    tokens_BT = torch.randint(config.model.vocab_size, (_ROWS, width), generator=generator).to(device)
    positions_BT = torch.arange(width, device=device).expand(_ROWS, width).contiguous()
    documents_BT = (positions_BT >= width // 2).int()
    update = Update(lr=config.optim.lr, scale=torch.ones((), device=device), skip=torch.tensor(False, device=device))

    def step() -> Tensor:
        loss: Tensor = model(tokens_BT, positions_BT, documents_BT, tokens_BT).objective / tokens_BT.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.apply(update)
        optimizer.zero_grad()
        return loss.detach()

    return step
