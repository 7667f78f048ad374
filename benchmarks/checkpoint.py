"""What a checkpoint costs training: wall time added over the 10 steps after an asynchronous save, in steps.

    python benchmarks/checkpoint.py --folder DISK/scratch [--params 30e6] [--rounds 5] [--json]

The state is weights and two moments in fp32. A step is forward, backward and fused AdamW of square layers in bf16 with as
many parameters as asked for. Rounds with and without a save alternate; the figure is the median over rounds of
(time of 10 steps with a save - the mean of the rounds without one before and after it) / time of a step without one.
The state digest and the copy of the state, which come before save() returns, are in it.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.parallel.digest import combine, digest_tensors
from surefoot.train.checkpoint import PendingSave, load, save
from surefoot.train.staging import Staging

STEPS = 10
WIDTH = 1024


@dataclass(frozen=True)
class Result:
    """Figures of one run."""

    num_params: int
    threads: int
    step_s: float
    """Median of a step without a save."""
    added_steps: float
    """Median over rounds; the target is under 1."""
    added_steps_worst: float
    copy_s: float
    """What save() takes before it returns, median."""
    background_bytes_per_s: float
    """While training goes on: sha256, write and fsync, median."""
    alone_bytes_per_s: float
    """A synchronous save with nothing else running, best; the copy is in it."""
    load_bytes_per_s: float
    """Verify and read, best."""
    digest_ns_per_element: float
    """State digest, wall time, best."""


class Layers(nn.Module):
    """Square matrices with a residual, their products in bf16."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        num_layers = max(1, round(num_params / WIDTH**2))
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 32) for _ in range(num_layers)])

    def forward(self, x_TD: Tensor) -> Tensor:
        for matrix in self.matrices:
            x_TD = x_TD + F.silu(F.linear(F.rms_norm(x_TD, (WIDTH,)), matrix.to(x_TD.dtype)))
        return x_TD.float().square().mean()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"weights/{name}"] = parameter
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment]
    return tensors


def measure(root: Path, num_params: int, tokens: int, rounds: int) -> Result:
    model = Layers(num_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch_TD = torch.randn(tokens, WIDTH, dtype=torch.bfloat16)

    def step() -> None:
        model(batch_TD).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed_steps(folder: Path | None) -> tuple[float, float, PendingSave | None]:
        start = time.perf_counter()
        pending = None
        if folder is not None:  # as a run saves: the digest first, on the same thread as the step
            state = state_of(model, optimizer)
            pending = save(folder, state, {"digest": combine(digest_tensors(state))}, staging=staging)
        copied = time.perf_counter() - start
        for _ in range(STEPS):
            step()
        return time.perf_counter() - start, copied, pending

    staging = Staging()
    for number in range(2):
        step()
        save(root / f"warm-{number}", state_of(model, optimizer), {}, staging=staging).wait()
    without, with_save, copies, background = [timed_steps(None)[0]], [], [], []
    for number in range(rounds):
        seconds, copied, pending = timed_steps(root / f"round-{number}")
        assert pending is not None
        num_bytes = pending.wait().num_bytes
        with_save.append(seconds)
        copies.append(copied)
        background.append(num_bytes / pending.seconds)
        shutil.rmtree(root / f"round-{number}")
        without.append(timed_steps(None)[0])
    step_s = statistics.median(without) / STEPS
    added = [(seconds - (without[i] + without[i + 1]) / 2) / step_s for i, seconds in enumerate(with_save)]
    alone, loading, digesting = quiet_times(root, state_of(model, optimizer), staging)
    return Result(
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        threads=torch.get_num_threads(),
        step_s=step_s,
        added_steps=statistics.median(added),
        added_steps_worst=max(added),
        copy_s=statistics.median(copies),
        background_bytes_per_s=statistics.median(background),
        alone_bytes_per_s=num_bytes / alone,
        load_bytes_per_s=num_bytes / loading,
        digest_ns_per_element=digesting / sum(tensor.numel() for tensor in state_of(model, optimizer).values()) * 1e9,
    )


def quiet_times(root: Path, state: dict[str, Tensor], staging: Staging) -> tuple[float, float, float]:
    """Best of three seconds of a synchronous save, a load and a digest; the load is checked by the digest."""
    saving, loading, digesting = [], [], []
    for number in range(3):
        folder = root / f"alone-{number}"
        start = time.perf_counter()
        save(folder, state, {}, asynchronous=False, staging=staging)
        saving.append(time.perf_counter() - start)
        found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        start = time.perf_counter()
        load(folder, found)
        loading.append(time.perf_counter() - start)
        start = time.perf_counter()
        digest = combine(digest_tensors(state))
        digesting.append(time.perf_counter() - start)
        assert combine(digest_tensors(found)) == digest
        shutil.rmtree(folder)
    return min(saving), min(loading), min(digesting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where to write; a folder in it is made and removed"
    )
    parser.add_argument("--params", type=float, default=30e6, help="parameters of the model")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a batch")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with a save")
    parser.add_argument("--threads", type=int, default=0, help="threads of training; 0 is all cores")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="benchmark-checkpoint-") as root:
        result = measure(Path(root), int(options.params), options.tokens, options.rounds)
    if options.json:
        print(json.dumps(asdict(result)))
        return
    for name, value in asdict(result).items():
        print(f"{name:26} {value:,.4g}" if value < 1e6 else f"{name:26} {value:,.0f}")


if __name__ == "__main__":
    main()
