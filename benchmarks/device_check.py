"""What one GPU makes of a 1B dense model: speed, memory, idle gaps, and which choices keep their bits.

    python benchmarks/device_check.py [--out FILE] [--cells NAME ...] [--budget-s 270] [--dry-run]

Every cell is a config: bf16 with flash attention, with document masks (flex), under strict determinism, with either recomputation, and the
three fp8 recipes, all with compiled blocks. Of each: tokens per second, MFU of the bf16 peak, peak memory, the share of time in which
the device ran nothing and the longest such gaps. Then bits: strict twice, and gated against synchronous skipping with one refused step.
A cell that the machine has no kernels for, or that the budget leaves no time for, is named with the reason. ``--dry-run`` (without a
GPU always) runs the same cells on the CPU with a model of some thousand parameters: it shows that the script works and nothing else.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from surefoot.config.data import BytesTokenizer, DataConfig, SourceConfig, TextFiles
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import OptimConfig
from surefoot.config.parallel import Fp8Config, ParallelConfig
from surefoot.config.run import RunConfig
from surefoot.guard.limits import Limits
from surefoot.model.count import num_params
from surefoot.parallel.device import device_name, peak_flops
from surefoot.parallel.digest import combine, digest_tensors
from surefoot.parallel.mesh import World, join_world
from surefoot.train.dry_run import random_batch
from surefoot.train.setup import set_up
from surefoot.train.step import NO_LIMITS, train_step

WARM_STEPS, TIMED_STEPS, PROFILED_STEPS, BIT_STEPS = 4, 8, 2, 4
REFUSED_STEP = 2
GAPS = 5
GIB = 1 << 30


class Gap(NamedTuple):
    """A stretch in which the device ran nothing."""

    seconds: float
    after: str
    before: str


def one_billion() -> RunConfig:
    """The widths of Llama 3.2 1B with heads of 128 and 32,768 ids: 1.0e9 parameters; 8 rows of 4,096 tokens in two micro-batches."""
    return RunConfig(
        recipe="device-check",
        steps=1000,
        model=ModelConfig(
            vocab_size=32768,
            d_model=2048,
            num_layers=16,
            attention=GroupedQueryAttention(num_heads=16, num_kv_heads=4, d_head=128),
            feed_forward=SwiGLU(d_ff=8192),
        ),
        data=_data(4096, 8),
        optim=OptimConfig(lr=3e-4, warmup_steps=100),
        parallel=ParallelConfig(device="cuda", precision="bf16", compile="on", micro_batch_size=4),
    )


def shrunken() -> RunConfig:
    """The same, small enough for a CPU."""
    config = one_billion()
    heads = GroupedQueryAttention(num_heads=4, num_kv_heads=2, d_head=16)
    model = dataclasses.replace(
        config.model, vocab_size=256, d_model=64, num_layers=2, attention=heads, feed_forward=SwiGLU(d_ff=128)
    )
    parallel = dataclasses.replace(config.parallel, device="cpu", micro_batch_size=2, compile="off")
    return dataclasses.replace(config, model=model, data=_data(64, 4), parallel=parallel)


def _data(seq_len: int, batch_size: int) -> DataConfig:
    unread = SourceConfig(name="random", documents=TextFiles(glob="unread"), weight=1.0)
    return DataConfig(
        sources=(unread,), tokenizer=BytesTokenizer(), seq_len=seq_len, batch_size=batch_size, document_mask=False
    )


def cells(base: RunConfig) -> dict[str, RunConfig]:
    """Every config that is timed, by name."""

    def but(determinism: str = "fast", document_mask: bool = False, **parallel: Any) -> RunConfig:
        return dataclasses.replace(
            base,
            determinism=determinism,  # type: ignore[arg-type]
            data=dataclasses.replace(base.data, document_mask=document_mask),
            parallel=dataclasses.replace(base.parallel, **parallel),
        )

    found = {
        "bf16 flash": but(),
        "bf16 strict": but(determinism="strict"),
        "bf16 documents": but(document_mask=True),
        "bf16 selective": but(recompute="selective"),
        "bf16 full": but(recompute="full"),
    }
    for recipe in ("rowwise", "tensorwise", "blockwise"):
        found[f"fp8 {recipe}"] = but(precision="fp8", fp8=Fp8Config(recipe=recipe))  # type: ignore[arg-type]
    return found


def measure(config: RunConfig, world: World, peak: float) -> dict[str, Any]:
    """The figures of one cell."""
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    setup, state = set_up(config, world)
    batch = random_batch(setup)

    def steps(count: int) -> float:
        for _ in range(count):
            loss = train_step(state, batch, setup).signals.loss
        if on_gpu:
            torch.cuda.synchronize()
        return loss

    begun = time.perf_counter()
    steps(WARM_STEPS)
    warm_s = time.perf_counter() - begun
    begun = time.perf_counter()
    loss = steps(TIMED_STEPS)
    step_s = (time.perf_counter() - begun) / TIMED_STEPS
    rate = config.data.batch_size * config.data.seq_len / step_s
    kinds = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=kinds) as profiled:
        steps(PROFILED_STEPS)
    idle, gaps = idle_gaps(spans(profiled.events(), on_gpu=on_gpu))
    return {
        "step_s": step_s,
        "tokens_per_s": rate,
        "tflops": rate * setup.flops_per_token / 1e12,
        "mfu_of_bf16": rate * setup.flops_per_token / peak,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        "idle_share": idle,
        "gaps": [gap._asdict() for gap in gaps],
        "warm_up_s": warm_s,
        "loss": loss,
    }


def spans(events: Sequence[Any], *, on_gpu: bool) -> list[tuple[float, float, str]]:
    """Begin, end (seconds) and name of what ran on the device; on a CPU of the outermost operators."""
    if on_gpu:
        # annotations span kernels and what lies between them
        ran = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    else:
        ran = [event for event in events if event.cpu_parent is None]
    return [(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name) for event in ran]


def idle_gaps(ran: Sequence[tuple[float, float, str]]) -> tuple[float, list[Gap]]:
    """The share of the time from the first beginning to the last end in which nothing ran, and the longest gaps; streams may overlap."""
    found: list[Gap] = []
    ordered = sorted(ran)
    begun, until, last = ordered[0]
    for start, end, name in ordered:
        if start > until:
            found.append(Gap(start - until, last, name))
        if end >= until:
            until, last = end, name
    return sum(gap.seconds for gap in found) / (until - begun), sorted(found, reverse=True)[:GAPS]


def digest_after(config: RunConfig, world: World, *, refused: bool = False) -> str:
    """Of weights and moments after some steps from the seed; with ``refused`` the update of one of them is refused."""
    setup, state = set_up(config, world)
    batch = random_batch(setup)
    for index in range(BIT_STEPS):
        limits = Limits(gradient_norm=0.0) if refused and index == REFUSED_STEP else NO_LIMITS
        outcome = train_step(state, batch, setup, limits=limits)
        assert outcome.skipped == (limits is not NO_LIMITS)
    return combine(digest_tensors(state.tensors()))


def same_bits(base: RunConfig, world: World) -> dict[str, bool]:
    """What must not change a bit under strict determinism."""
    strict = cells(base)["bf16 strict"]
    once = digest_after(strict, world)
    gating = {
        gated: digest_after(
            dataclasses.replace(strict, optim=dataclasses.replace(strict.optim, gated=gated)), world, refused=True
        )
        for gated in (True, False)
    }
    return {
        "strict twice": digest_after(strict, world) == once,
        "gated and synchronous skipping": gating[True] == gating[False],
        "a refused step shows": gating[True] != once,
    }


def attempted(run: Callable[[], dict[str, Any]], left_s: float) -> dict[str, Any]:
    """The figures, or why there are none."""
    if left_s <= 0:
        return {"skipped": "no time left of --budget-s"}
    torch._dynamo.reset()
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - one cell that cannot run must not cost the others
        return {"skipped": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def table(facts: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{facts['device']}, torch {facts['torch']}, {facts['params'] / 1e9:.3g}e9 parameters", ""]
    lines.append(f"{'':<16} {'tokens/s':>10} {'TFLOP/s':>8} {'MFU':>6} {'GiB':>6} {'idle':>6}  longest gap")
    for name, row in facts["cells"].items():
        if "skipped" in row:
            lines.append(f"{name:<16} {row['skipped']}")
            continue
        gib = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        gap = max(row["gaps"], key=lambda gap: gap["seconds"], default=None)
        where = f"{gap['seconds'] * 1e6:.0f} us before {gap['before'][:40]}" if gap else "none"
        lines.append(
            f"{name:<16} {row['tokens_per_s']:>10,.0f} {row['tflops']:>8.3g} {row['mfu_of_bf16']:>6.1%} {gib:>6} {row['idle_share']:>6.1%}  {where}"
        )
    if facts["strict_over_fast"] is not None:
        lines.append(f"\nstrict over fast: {facts['strict_over_fast']:.3f}")
    lines += [f"{name}: {'yes' if yes else yes}" for name, yes in facts["same_bits"].items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("device-check.json"))
    parser.add_argument("--cells", nargs="*", default=None, help="those whose names hold one of these words")
    parser.add_argument("--budget-s", type=float, default=270.0, help="no cell begins later than this")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU with a small model")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    dry = options.dry_run or not torch.cuda.is_available()
    base = shrunken() if dry else one_billion()
    world = join_world(base.parallel)
    peak = peak_flops(world.device, "bf16")
    left = lambda: options.budget_s - (time.perf_counter() - begun)  # noqa: E731
    facts: dict[str, Any] = {
        "device": device_name(world.device),
        "dry_run": dry,
        "torch": torch.__version__,
        "params": num_params(base.model).total,
        "peak_tflops": peak / 1e12,
        "cells": {},
    }
    facts["same_bits"] = attempted(lambda: same_bits(base, world), left())
    for name, config in cells(base).items():
        if options.cells is None or any(word in name for word in options.cells):
            facts["cells"][name] = attempted(lambda config=config: measure(config, world, peak), left())  # type: ignore[misc]
            options.out.write_text(json.dumps(facts, indent=2) + "\n")
    timed = facts["cells"]
    steps = [timed.get(name, {}).get("step_s") for name in ("bf16 strict", "bf16 flash")]
    facts["strict_over_fast"] = steps[0] / steps[1] if all(steps) else None
    facts["wall_s"] = time.perf_counter() - begun
    options.out.write_text(json.dumps(facts, indent=2) + "\n")
    print(table(facts))
    return 0 if all(value is True for value in facts["same_bits"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
