"""Precision policies: which numbers a model keeps and multiplies, by name, and how a model is made to follow one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import nn

from surefoot.config.errors import ConfigError
from surefoot.config.parallel import Fp8Config, ParallelConfig
from surefoot.model.parts import Linear, Product, plain_product
from surefoot.parallel.fp8 import check_device, check_shapes, gpu_product
from surefoot.parallel.rounded import fp8_product, fp16_product

Precision = Literal["fp32", "bf16", "bf16_pure", "fp16", "fp8", "fp64"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a precision means. Softmax, norms, RoPE angles, loss and gradient norm are in fp32 (fp64) under all of them."""

    compute: torch.dtype
    """Of the residual stream and of products."""
    weights: torch.dtype
    """As kept, updated and saved; gradients are left in it."""
    reduce: torch.dtype
    """In which gradients are added up over micro-batches and ranks."""
    operands: Literal["compute", "fp8"] = "compute"
    """What the operands of a block's products are rounded to."""
    loss_scaled: bool = False
    """Small gradients need a larger loss."""


POLICIES: dict[Precision, Policy] = {
    "fp32": Policy(compute=torch.float32, weights=torch.float32, reduce=torch.float32),
    "bf16": Policy(compute=torch.bfloat16, weights=torch.float32, reduce=torch.float32),
    "bf16_pure": Policy(compute=torch.bfloat16, weights=torch.bfloat16, reduce=torch.float32),
    "fp16": Policy(compute=torch.float16, weights=torch.float32, reduce=torch.float32, loss_scaled=True),
    "fp8": Policy(compute=torch.bfloat16, weights=torch.float32, reduce=torch.float32, operands="fp8"),
    "fp64": Policy(compute=torch.float64, weights=torch.float64, reduce=torch.float64),
}


def policy_of(config: ParallelConfig) -> Policy:
    """The policy of a config whose precision is resolved; ValueError where it is not."""
    if config.precision not in POLICIES:
        raise ValueError(f"parallel.precision={config.precision} must be resolved: one of {', '.join(POLICIES)}")
    return POLICIES[config.precision]


def compute_dtype(precision: Precision) -> torch.dtype:
    """The dtype of products and of the residual stream."""
    return POLICIES[precision].compute


def multiplying_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype that the device multiplies in: on a CPU fp16 operands meet in fp32, and fp8 ones in bf16."""
    compute = compute_dtype(precision)
    return torch.float32 if compute == torch.float16 and device.type == "cpu" else compute


def apply_precision(model: nn.Module, config: ParallelConfig, device: torch.device) -> None:
    """Give every ``Linear`` inside the blocks the product of the policy, in place.

    The output projection is no product of a module: it stays in the residual stream's dtype (fp16 on a CPU: fp32), as do the attention's
    two products. Raises ConfigError where ``parallel.fp8`` names no product or leaves none, or the device cannot multiply such a matrix;
    EnvironmentFault and ImportError where it lacks the kernels.
    """
    precision = cast(Precision, config.precision)
    policy = policy_of(config)
    products = _products(model)
    if policy.operands == "fp8":
        low = low_products(list(products), config.fp8)
        if device.type == "cuda":
            check_device(config.fp8.recipe, device)
            check_shapes(
                config.fp8.recipe, {name: (products[name].out_features, products[name].in_features) for name in low}
            )
        product: Product = gpu_product(config.fp8.recipe) if device.type == "cuda" else fp8_product(config.fp8.recipe)
        for name in low:
            products[name].product = product
    elif multiplying_dtype(precision, device) != policy.compute:
        for linear in products.values():
            linear.product = fp16_product
        model.output_dtype = multiplying_dtype(precision, device)  # type: ignore[assignment]


def low_products(names: list[str], config: Fp8Config) -> list[str]:
    """Those of the products, by dotted name, that ``parallel.fp8`` leaves in fp8."""
    kept = set()
    for piece in config.high:
        found = [name for name in names if f".{piece}." in f".{name}."]
        if not found:
            kinds = ", ".join(dict.fromkeys(re.sub(r"^blocks\.\d+\.", "", name) for name in names))
            raise ConfigError([f"parallel.fp8.high has {piece!r}, which is in no product's name; there are: {kinds}"])
        kept.update(found)
    numbers = {name: int(match[1]) for name in names if (match := re.match(r"blocks\.(\d+)\.", name))}
    first, last = config.high_first_blocks, max(numbers.values(), default=-1) - config.high_last_blocks
    low = [name for name in names if name not in kept and first <= numbers.get(name, first) <= last]
    if not low:
        raise ConfigError(
            [
                f"parallel.fp8 keeps all {len(names)} products high (high={list(config.high)}, high_first_blocks={first}, "
                f"high_last_blocks={config.high_last_blocks}): leave some low, or take parallel.precision=bf16"
            ]
        )
    return low


@contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """Multiply meanwhile what products are given, as it is given: no rounding of operands."""
    products = _products(model)
    before = {name: linear.product for name, linear in products.items()}
    for linear in products.values():
        linear.product = plain_product
    try:
        yield
    finally:
        for name, linear in products.items():
            linear.product = before[name]


def _products(model: nn.Module) -> dict[str, Linear]:
    """The products inside blocks, by dotted name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear) and name.startswith("blocks.")}
