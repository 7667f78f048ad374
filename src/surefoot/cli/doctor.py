"""``surefoot doctor``: measures what this machine can do."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

PACKAGES = ("surefoot", "torch", "numpy", "tokenizers", "safetensors", "rich", "plotly")


def main(argv: Sequence[str]) -> int:
    """Runs ``surefoot doctor``."""
    parser = argparse.ArgumentParser(
        prog="surefoot doctor",
        description="Measures what this machine can do: versions, cores, memory, disk, matrix products, cost of strict determinism.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder whose disk is measured (default: runs)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out the cost of strict determinism, which trains for seconds"
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    arguments = parser.parse_args(argv)
    facts = examine(arguments.runs, quick=arguments.quick)
    print(json.dumps(facts, indent=2) if arguments.json else describe(facts))
    return 0


def examine(runs: Path, *, quick: bool) -> dict[str, Any]:
    """Everything measured, as plain values; progress goes to standard error."""
    import torch

    from surefoot.parallel.device import choose_precision, device_name, measured_flops, published_flops
    from surefoot.parallel.machine import machine, measure_disk
    from surefoot.parallel.precision import Precision
    from surefoot.train.strict_cost import strict_cost

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "platform": platform.platform(),
        "machine": asdict(machine()),
        "device": {
            "type": device.type,
            "name": device_name(device),
            "count": max(1, torch.cuda.device_count()),
            "threads": torch.get_num_threads(),
        },
    }
    _say("disk")
    made = not runs.exists()
    facts["disk"] = asdict(measure_disk(runs))
    if made:
        runs.rmdir()
    _say("matrix products")
    # Those whose products differ on every device; bf16_pure multiplies as bf16 does, fp16 and fp8 on a CPU as fp32 and bf16.
    measured: tuple[Precision, ...] = ("fp32", "bf16", "fp64")
    facts["matmul_flops"] = {name: measured_flops(device, name) for name in measured}
    published = {name: published_flops(device_name(device), name) for name in get_args(Precision)}
    facts["published_flops"] = {name: rate for name, rate in published.items() if rate is not None}
    precision = choose_precision(device)
    facts["precision"] = precision
    if not quick:
        _say("steps of a small model, strict and fast")
        facts["strict"] = strict_cost(device, precision)
    return facts


def describe(facts: dict[str, Any]) -> str:
    """The facts as lines for a person."""
    machine, disk, device = facts["machine"], facts["disk"], facts["device"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in facts["matmul_flops"].items())
    lines = [
        ("versions", versions),
        ("platform", facts["platform"]),
        ("processor", f"{machine['cpu']}, {machine['cores']} cores, {device['threads']} threads"),
        ("memory", f"{machine['memory_gib']:.1f} GiB, {machine['free_memory_gib']:.1f} GiB free"),
        ("device", f"{device['count']} x {device['name']}"),
        ("compiler", machine["compiler"] or "none: --parallel.compile needs one on CPU (Debian: apt-get install g++)"),
        ("disk", f"{disk['folder']}: {disk['free_gib']:.1f} GiB free, writes {disk['write_mib_per_s']:.0f} MiB/s"),
        ("fsync", f"{disk['fsync_ms']:.2f} ms: what a ledger row costs"),
        ("matmul", f"measured peak in TFLOP/s: {rates}"),
    ]
    if facts["published_flops"]:
        sheet = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in facts["published_flops"].items())
        lines.append(("", f"by the data sheet: {sheet}"))
    lines.append(("precision", f"auto is {facts['precision']} here"))
    if "strict" in facts:
        strict, fast = (facts["strict"][f"{mode}_step_s"] * 1e3 for mode in ("strict", "fast"))
        cost = (
            f"{(strict / fast - 1) * 100:+.0f} % (the same steps repeat within {facts['strict']['noise'] * 100:.0f} %)"
        )
        lines.append(("strict", f"{strict:.1f} ms a step of the tiny model, {fast:.1f} ms in fast mode: {cost}"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _say(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)
