"""fp8 products on a GPU, by torchao's kernels: the same recipes that ``rounded`` computes anywhere."""

from collections.abc import Mapping

import torch
from torch import Tensor

from surefoot.config.errors import ConfigError
from surefoot.model.parts import Product
from surefoot.parallel.mesh import EnvironmentFault
from surefoot.parallel.rounded import TILE, Recipe

LEAST_CAPABILITY: dict[Recipe, tuple[int, int]] = {"tensorwise": (8, 9), "rowwise": (9, 0), "blockwise": (9, 0)}
"""Compute capability from which torch and torchao have kernels."""
MULTIPLE: dict[Recipe, int] = {"tensorwise": 16, "rowwise": 16, "blockwise": TILE}
"""What both sides of a weight must be a multiple of."""


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Raise EnvironmentFault where the GPU has no kernels for the recipe."""
    there, needed = torch.cuda.get_device_capability(device), LEAST_CAPABILITY[recipe]
    if there < needed:
        raise EnvironmentFault(
            f"parallel.precision=fp8 with parallel.fp8.recipe={recipe} needs a GPU of compute capability {needed[0]}.{needed[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {there[0]}.{there[1]}; take parallel.precision=bf16, or study the recipe on the CPU "
            "with parallel.device=cpu"
        )


def check_shapes(recipe: Recipe, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise ConfigError naming the first weight whose sides the kernels cannot take; ``shapes`` are (out, in) by name."""
    multiple = MULTIPLE[recipe]
    for name, shape in shapes.items():
        if any(side % multiple for side in shape):
            raise ConfigError(
                [
                    f"parallel.fp8.recipe={recipe} takes matrices whose sides are multiples of {multiple} on a GPU, and {name} is {shape[0]} x "
                    f"{shape[1]}; change the model's widths, or keep it high with parallel.fp8.high"
                ]
            )


def gpu_product(recipe: Recipe, *, emulate: bool = False) -> Product:
    """The product of torchao's recipe; ``emulate`` computes tensorwise and rowwise without fp8 units, for tests.

    ImportError names the extra where torchao is missing.
    """
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise ImportError(
            "parallel.precision=fp8 on a GPU needs torchao: pip install -e '.[fp8]' in Surefoot's checkout"
        ) from error
    if recipe == "blockwise":
        return _blockwise_product()
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", emulate)
    multiplying = Float8Linear(MULTIPLE[recipe], MULTIPLE[recipe], bias=False, config=config).linear_mm_config

    def product(input: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = matmul_with_hp_or_float8_args.apply(input, weight.to(input.dtype).t(), multiplying, config)
        return out

    return product


def _blockwise_product() -> Product:
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    def product(input: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = fp8_blockwise_mm.apply(input, weight.to(input.dtype), TILE, input.dtype, True)
        return out

    return product
