"""What a device can do: the rate of its matrix products, published or measured, and the precision that follows from it."""

import time
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

from surefoot.parallel.precision import Precision, multiplying_dtype

TERA = 1e12
PUBLISHED_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    # (part of the name torch reports, dense TFLOP/s by precision); the first match counts, so longer names come first. fp16 is as fast as bf16.
    # NVIDIA data sheets: H100 (2023), H200 (2024), HGX B200 (2025), A100 (2021), L40S and L4 (2023), Ada architecture white paper (2022).
    # bf16 without sparsity and with fp32 accumulation; fp32 on CUDA cores, because products here do not use TF32.
    ("H200 NVL", {"bf16": 835.0, "fp8": 1671.0, "fp32": 60.0}),
    ("H200", {"bf16": 989.0, "fp8": 1979.0, "fp32": 67.0}),
    ("H100 PCIe", {"bf16": 756.0, "fp8": 1513.0, "fp32": 51.0}),
    ("H100 NVL", {"bf16": 835.0, "fp8": 1671.0, "fp32": 60.0}),
    ("H100", {"bf16": 989.0, "fp8": 1979.0, "fp32": 67.0}),
    ("B200", {"bf16": 2250.0, "fp8": 4500.0}),
    ("A100", {"bf16": 312.0, "fp32": 19.5}),
    ("L40S", {"bf16": 362.0, "fp8": 733.0, "fp32": 91.6}),
    ("NVIDIA L4", {"bf16": 121.0, "fp8": 242.0, "fp32": 30.3}),
    ("RTX 4090", {"bf16": 165.2, "fp8": 330.3, "fp32": 82.6}),
)

CPU_SIDES = (512, 1024, 2048)
GPU_SIDES = (2048, 4096, 8192)
_CHOICE_TOKENS, _CHOICE_WIDTH = 2048, 512  # a product of a small model: 1 GFLOP
_CHOICE_BUDGET_S = 0.3
_PEAK_BUDGET_S = 0.6
_WORTH_ROUNDING = 1.15  # bf16 must be this much faster than fp32 to be worth its 8 bits


def product_seconds(
    device: torch.device, dtypes: Sequence[torch.dtype], tokens: int, width: int, budget_s: float
) -> list[float]:
    """Shortest wall time of x @ w.T with x (tokens, width) and w (width, width), per dtype.

    The dtypes take turns, so that a busy moment of the machine hits all of them. One dtype never gets more than its share of the budget,
    except that every dtype gets one product after its warm-up.
    """
    pairs = [
        (torch.randn(tokens, width, device=device).to(dtype), torch.randn(width, width, device=device).to(dtype))
        for dtype in dtypes
    ]
    best, spent = [float("inf")] * len(pairs), [0.0] * len(pairs)
    with torch.no_grad():
        for x, weight in pairs:
            F.linear(x, weight)
        while any(used < budget_s / len(pairs) for used in spent):
            for n, (x, weight) in enumerate(pairs):
                if spent[n] >= budget_s / len(pairs):
                    continue
                _wait_for(device)
                start = time.perf_counter()
                F.linear(x, weight)
                _wait_for(device)
                seconds = time.perf_counter() - start
                best[n], spent[n] = min(best[n], seconds), spent[n] + seconds
    return best


def measured_flops(device: torch.device, precision: Precision, budget_s: float = _PEAK_BUDGET_S) -> float:
    """Best rate of one square product on the device, FLOP/s, over a few sizes."""
    sides = GPU_SIDES if device.type == "cuda" else CPU_SIDES
    dtype = multiplying_dtype(precision, device)
    best = 0.0
    for side in sides:
        seconds = product_seconds(device, [dtype], side, side, budget_s / len(sides))[0]
        best = max(best, 2 * side**3 / seconds)
        if seconds > budget_s / len(sides):
            break  # eight times as long a product would only spend more than was given
    return best


def published_flops(name: str, precision: str) -> float | None:
    """Dense peak of a device by its data sheet, FLOP/s; None where it is not in the table."""
    precision = {"bf16_pure": "bf16", "fp16": "bf16"}.get(precision, precision)
    for part, rates in PUBLISHED_TFLOPS:
        if part in name:
            return rates[precision] * TERA if precision in rates else None
    return None


@cache
def peak_flops(device: torch.device, precision: Precision) -> float:
    """What MFU is a share of, FLOP/s of one device: the data sheet's peak, or where there is none the measured one."""
    if device.type == "cuda":
        published = published_flops(torch.cuda.get_device_name(device), precision)
        if published is not None:
            return published
    return measured_flops(device, precision)


def choose_precision(device: torch.device) -> Literal["fp32", "bf16"]:
    """The precision that ``auto`` means on this device: bf16 where one product in it is clearly faster than in fp32.

    Collective over ranks, because ranks that time differently must not compute differently: rank 0 chooses.
    """
    choice: list[Literal["fp32", "bf16"]] = ["fp32"]
    if not dist.is_initialized() or dist.get_rank() == 0:
        dtypes = (torch.float32, torch.bfloat16)
        fp32, bf16 = product_seconds(device, dtypes, _CHOICE_TOKENS, _CHOICE_WIDTH, _CHOICE_BUDGET_S)
        choice = ["bf16" if fp32 > _WORTH_ROUNDING * bf16 else "fp32"]
    if dist.is_initialized():
        dist.broadcast_object_list(choice, src=0)
    return choice[0]


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
