"""Where parts plug in: what every part is given, the layers all parts share, and parts built by the user."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.config.model import Custom, ModelConfig
from surefoot.model.attention_backends import AttentionBackend
from surefoot.model.attention_maxima import AttentionMaxima
from surefoot.model.count import CustomCount
from surefoot.model.rope import Rotation


class PartError(Exception):
    """A part that cannot be built, or that does not say what its parameters are."""


Product = Callable[[Tensor, Tensor], Tensor]
"""Input (..., in) and weight (out, in) to input weight^T (..., out), in the dtype of the input."""
LookUp = Callable[[Tensor, Tensor], Tensor]
"""Token ids (B, T) and weight (V, D) to the rows of the weight (B, T, D), in the dtype of the weight."""


def plain_product(input: Tensor, weight: Tensor) -> Tensor:
    """The product in the dtype of its input."""
    return F.linear(input, weight.to(input.dtype))


class Linear(nn.Linear):
    """A product without bias, in the dtype of its input; the weight keeps its own dtype. Starts undrawn.

    ``product`` is what multiplies; a precision policy may set another (parallel/precision).
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.product: Product = plain_product

    def reset_parameters(self) -> None:
        """Nothing: parameters are drawn by name, see parametrization."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight)


class _GradientShare(torch.autograd.Function):
    """The input to the bit, and a share of its gradient. x * a + x.detach() * (1 - a) would round the values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.share, None


class Embedding(nn.Embedding):
    """One row per token id, looked up and then rounded to the compute dtype. Starts undrawn.

    The weight gets ``gradient_share`` of the gradient of what was looked up (GLM-130B, arXiv:2210.02414 section 3.1), taken before the
    gradient is summed over tokens and in the precision of the weight; whoever uses the weight itself is not concerned.
    """

    def __init__(self, vocab_size: int, d_model: int, compute_dtype: torch.dtype, gradient_share: float = 1.0) -> None:
        super().__init__(vocab_size, d_model)
        self.compute_dtype, self.gradient_share = compute_dtype, gradient_share
        self.look_up: LookUp = F.embedding

    def reset_parameters(self) -> None:
        """Nothing: parameters are drawn by name, see parametrization."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if weight.element_size() < 4 and weight.device.type == "cpu":
            weight = (
                weight.float()
            )  # the gradient of a frequent token is a long sum, which CPUs add up in the dtype of the weight
        x = self.look_up(input, weight)
        if self.gradient_share != 1.0:
            x = _GradientShare.apply(x, self.gradient_share)  # type: ignore[no-untyped-call]
        return x.to(self.compute_dtype)


@dataclass(frozen=True)
class AttendContext:
    """What one forward knows besides the residual stream; the same object for all layers.

    FSDP2 casts the floating tensors that it finds in a module's arguments, in dataclasses too: what must stay in fp32 is kept from it
    (``rope.Rotation``).
    """

    positions_BT: Tensor
    """Position of each token in its document."""
    documents_BT: Tensor | None
    """Number of each token's document, BLANK (-1) where blanked; None when every row is one document."""
    mask: Any
    """What the attention backend prepared from the documents; None is plain causal."""
    attend: AttentionBackend
    """The kernel."""
    rotation: Rotation | None
    """RoPE of the built-in attention; None when the attention is Custom."""
    maxima: AttentionMaxima | None = None
    """What looks at queries and keys of this forward, if anything does."""


def build_custom(part: Custom, cfg: ModelConfig, layer: int, *, place: str) -> nn.Module:
    """Calls the builder as ``build(model_cfg, layer, **kwargs)``.

    The result must be an nn.Module with ``roles() -> dict[str, Role]`` for all of its parameters, by name inside the part, and
    ``flops_per_token(seq_len) -> float``, forward plus backward; it may have ``writes_residual() -> tuple[str, ...]``, the matrices whose
    start is scaled with depth. Attention and feed-forward are called with ``(x_BTD, context: AttendContext)``, a norm with ``(x_BTD)``.
    Raises PartError.
    """
    module_name, colon, function_name = part.build.partition(":")
    if not (colon and module_name and function_name):
        raise PartError(f"{place}.build={part.build!r} is not of the form package.module:function")
    try:
        builder = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise PartError(
            f"{place}.build={part.build!r} cannot be imported ({error}); is its folder on PYTHONPATH?"
        ) from error
    try:
        module = builder(cfg, layer, **part.kwargs)
    except TypeError as error:
        raise PartError(
            f"{place}.build={part.build!r} could not be called as build(model_config, layer, **kwargs) with kwargs {part.kwargs}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise PartError(f"{place}.build={part.build!r} returned {type(module).__name__}; a part is a torch.nn.Module")
    for method, meaning in (("roles", "name the role of every parameter"), ("flops_per_token", "count operations")):
        if not callable(getattr(module, method, None)):
            raise PartError(
                f"{place}.build={part.build!r} returned {type(module).__name__} without {method}(), to {meaning}"
            )
    return module


def has_custom_parts(model: nn.Module) -> bool:
    """Whether a built model has parts of the user's."""
    return any(callable(getattr(type(module), "flops_per_token", None)) for module in model.modules())


def custom_count(model: nn.Module, seq_len: int) -> CustomCount:
    """Parameters and operations of the user's parts in a built model (meta device is enough), for ``surefoot.model.count``."""
    parts: list[Any] = [
        module for module in model.modules() if callable(getattr(type(module), "flops_per_token", None))
    ]
    return CustomCount(
        params=sum(parameter.numel() for part in parts for parameter in part.parameters()),
        flops_per_token=float(sum(part.flops_per_token(seq_len) for part in parts)),
    )
