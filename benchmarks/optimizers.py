"""Time and memory of one update against torch.optim, at about 30M parameters.

    python benchmarks/optimizers.py [--only muon adamw ...] [--rounds 7] [--threads 2] [--device cpu] [--json FILE]

Every optimiser of the config moves the same model's parameters with the same gradients, built as a run builds it (roles, fused projections, clipping
folded in); so does torch's own, fused where it has a fused kernel, where there is one. Muon's peer is torch.optim.Muon on the hidden
matrices with fused AdamW on the rest. All take turns, one update each, and the figure of each is the median of its turns; ratios are to the
named peer (a rule without one: to torch's AdamW), the median of the ratio of neighbouring turns. State is what is remembered between steps,
in bytes per parameter; peak is what an update allocates on top of weights, gradients and state, on a GPU by torch's own count, on a CPU
by the profiler's (the largest sum of what is allocated and not yet freed).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from surefoot.config.model import ModelConfig
from surefoot.config.optim import Adam, AdamW, Lion, Muon, OptimConfig, StableAdamW
from surefoot.model.count import num_params
from surefoot.model.parametrization import fused_rows, initialise, roles
from surefoot.model.role_scaling import Role
from surefoot.model.transformer import Transformer
from surefoot.optim.build import build_optimizer
from surefoot.optim.optimizer import Update
from train_step import SIZES, model_config

LR = 1e-3


@dataclass(frozen=True)
class Contestant:
    """One optimiser over its own copy of the model."""

    update: Callable[[], None]
    state: Callable[[], int]
    """Bytes remembered between steps."""
    peer: str
    """Whose time the ratio is to."""


def ours(config: OptimConfig) -> Callable[[nn.Module, ModelConfig], tuple[Callable[[], None], Callable[[], int]]]:
    def build(model: nn.Module, sizes: ModelConfig) -> tuple[Callable[[], None], Callable[[], int]]:
        parameters = dict(model.named_parameters())
        optimizer = build_optimizer(parameters, roles(model), config, sizes, fused_rows(model))
        device = next(iter(parameters.values())).device
        # On a GPU gated, as a run is; 1.0 is what clipping gives most of the time.
        scale, skip = torch.ones((), dtype=torch.float64, device=device), torch.tensor(False, device=device)

        def update() -> None:
            optimizer.apply(Update(lr=LR, scale=scale, skip=skip, gated=config.gated))

        return update, lambda: sum(t.numel() * t.element_size() for t in optimizer.tensors().values())

    return build


def torchs(kind: str) -> Callable[[nn.Module, ModelConfig], tuple[Callable[[], None], Callable[[], int]]]:
    def build(model: nn.Module, sizes: ModelConfig) -> tuple[Callable[[], None], Callable[[], int]]:
        by_role: Mapping[str, Role] = roles(model)
        named = dict(model.named_parameters())
        hidden = [p for name, p in named.items() if by_role[name] == "hidden"]
        rest = [p for name, p in named.items() if by_role[name] != "hidden"]
        made: list[torch.optim.Optimizer] = []
        if kind == "muon":
            made.append(torch.optim.Muon(hidden, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
            made.append(torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), fused=True))
        else:
            make = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
            made.append(make([*hidden, *rest], lr=LR, betas=(0.9, 0.95), fused=True))

        def update() -> None:
            for optimizer in made:
                optimizer.step()

        def state() -> int:
            tensors = [t for o in made for s in o.state.values() for t in s.values() if torch.is_tensor(t)]
            return sum(t.numel() * t.element_size() for t in tensors)

        return update, state

    return build


FIELD: dict[str, tuple[Callable[..., Any], str]] = {
    "torch adamw": (torchs("adamw"), "torch adamw"),
    "adamw": (ours(OptimConfig(optimizer=AdamW())), "torch adamw"),
    "adamw bf16 moments": (ours(OptimConfig(optimizer=AdamW(), moments="bf16")), "torch adamw"),
    "torch adam": (torchs("adam"), "torch adam"),
    "adam": (ours(OptimConfig(optimizer=Adam())), "torch adam"),
    "adam bf16 moments": (ours(OptimConfig(optimizer=Adam(), moments="bf16")), "torch adam"),
    "lion": (ours(OptimConfig(optimizer=Lion())), "torch adamw"),
    "lion bf16 moments": (ours(OptimConfig(optimizer=Lion(), moments="bf16")), "torch adamw"),
    "stable_adamw": (ours(OptimConfig(optimizer=StableAdamW())), "torch adamw"),
    "stable_adamw bf16 moments": (ours(OptimConfig(optimizer=StableAdamW(), moments="bf16")), "torch adamw"),
    "torch muon": (torchs("muon"), "torch muon"),
    "muon": (ours(OptimConfig(optimizer=Muon())), "torch muon"),
    "muon fp32 newton-schulz": (ours(OptimConfig(optimizer=Muon(newton_schulz="fp32"))), "torch muon"),
    "muon bf16 moments": (ours(OptimConfig(optimizer=Muon(), moments="bf16")), "torch muon"),
}


def drawn(sizes: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """Gradients that all share: an update that clips nothing leaves them as they are."""
    draw = torch.Generator().manual_seed(1)
    shapes = {name: parameter.shape for name, parameter in Transformer(sizes, torch.float32).named_parameters()}
    return {name: (1e-3 * torch.randn(shape, generator=draw)).to(device) for name, shape in shapes.items()}


def enter(name: str, sizes: ModelConfig, gradients: Mapping[str, Tensor], device: torch.device) -> Contestant:
    build, peer = FIELD[name]
    model = Transformer(sizes, torch.float32)
    initialise(model, sizes, 0)
    model.to(device)
    for key, parameter in model.named_parameters():
        parameter.grad = gradients[key]
    update, state = build(model, sizes)
    return Contestant(update, state, peer)


def peak_bytes(update: Callable[[], None], device: torch.device) -> int:
    """The most that an update has allocated at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        update()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        update()
    changes = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = top = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        held += event.nbytes()
        top = max(top, held)
    return int(top)


def race(field: Mapping[str, Contestant], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every update of each, turn by turn."""
    turns: dict[str, list[float]] = {name: [] for name in field}
    for number in range(rounds + 1):
        for name, contestant in field.items():
            begun = time.perf_counter()
            contestant.update()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:  # the first warms up
                turns[name].append(time.perf_counter() - begun)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(FIELD), choices=list(FIELD), help="with their peers")
    parser.add_argument("--size", default="30m", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, sizes = torch.device(args.device), model_config(SIZES[args.size])
    total = num_params(sizes).total
    wanted = {*args.only, *(FIELD[name][1] for name in args.only)}
    gradients = drawn(sizes, device)
    field = {name: enter(name, sizes, gradients, device) for name in FIELD if name in wanted}
    print(f"{total / 1e6:.1f}M parameters in fp32 on {device}, {args.threads} threads, {args.rounds} rounds")
    print(f"{'optimiser':28} ms/update  of peer                state B/param  peak MiB")
    results = []
    turns = race(field, args.rounds, device)
    for name, contestant in field.items():
        ratio = statistics.median(a / b for a, b in zip(turns[name], turns[contestant.peer], strict=True))
        seconds, state = statistics.median(turns[name]), contestant.state()
        peak = peak_bytes(contestant.update, device)
        print(
            f"{name:28} {seconds * 1e3:9.1f} {ratio:8.2f} {contestant.peer:14} {state / total:14.2f} {peak / 2**20:10.1f}",
            flush=True,
        )
        results.append(
            {
                "optimizer": name, "seconds": seconds, "ratio": ratio, "peer": contestant.peer, "state": state, "peak": peak,
                "turns": turns[name],
            }
        )  # fmt: skip
    if args.json:
        args.json.write_text(
            json.dumps({"params": total, "device": str(device), "threads": args.threads, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
