"""What modules compute with the part of a matrix that a rank holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.model.norm import RootMeanSquareNorm
from surefoot.model.parts import Embedding, Linear
from surefoot.parallel.tensor_tokens import (
    TensorRanks,
    gather_to_repeat,
    gather_to_share,
    keep_piece,
    local_view,
    sum_gradient,
    sum_to_pieces,
)


def give_all_tokens(part: nn.Module, ranks: TensorRanks) -> None:
    """Have a part whose products are cut take the residual stream of all tokens, gathered once for all of them."""

    def gathered(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTD, *rest = args
        return (gather_to_share(x_BTD, ranks), *rest)

    part.register_forward_pre_hook(gathered)


def cut_outputs(linear: Linear) -> None:
    """Have a product of all tokens give the outputs whose rows of the weight are here."""
    product = linear.product

    def some_outputs(input: Tensor, weight: Tensor) -> Tensor:
        return product(input, local_view(weight))

    linear.product = some_outputs


def cut_inputs(linear: Linear, ranks: TensorRanks) -> None:
    """Have a product of the inputs whose columns of the weight are here give this rank's tokens of the sum over ranks."""
    product = linear.product

    def summed(input: Tensor, weight: Tensor) -> Tensor:
        return sum_to_pieces(product(input, local_view(weight)), ranks)

    linear.product = summed


def cut_rows(embedding: Embedding, ranks: TensorRanks) -> None:
    """Have an embedding look all tokens up in the rows that are here, and give this rank's tokens of what all ranks found."""

    def found(tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
        rows_VD = local_view(weight_VD)
        at_BT = tokens_BT - ranks.rank * len(rows_VD)
        elsewhere_BT = (at_BT < 0) | (at_BT >= len(rows_VD))
        x_BTD = F.embedding(at_BT.masked_fill(elsewhere_BT, 0), rows_VD)
        # filled, not multiplied by zero: neither a NaN in a row nor one in a gradient may pass
        return sum_to_pieces(x_BTD.masked_fill(elsewhere_BT[..., None], 0), ranks)

    embedding.look_up = found


def read_whole(norm: RootMeanSquareNorm, ranks: TensorRanks) -> None:
    """Have a norm of some tokens or heads read a gain that is whole here, and gather its gradient from all of them."""

    def gain(weight: Tensor) -> Tensor:
        return sum_gradient(local_view(weight), ranks)

    norm.read = gain


def repeat_whole(part: nn.Module, ranks: TensorRanks) -> None:
    """Have every rank compute all of a part whose inside is unknown, from plain whole parameters, and keep its tokens of the result.

    Ranks compute the same from the same, so their gradients are the same, and none is summed. Compiled blocks go around it.
    """
    inner = part.forward

    def forward(x_BTD: Tensor, *rest: Any) -> Tensor:
        with _plain_parameters(part):
            out_BTD: Tensor = inner(gather_to_repeat(x_BTD, ranks), *rest)
        return keep_piece(out_BTD, ranks)

    part.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]


@contextmanager
def _plain_parameters(part: nn.Module) -> Iterator[None]:
    """Every parameter of the part is meanwhile the local view of what is there now: FSDP2 sets others from forward to forward."""
    placed = [(module, name, p) for module in part.modules() for name, p in module._parameters.items() if p is not None]
    # one view of one parameter, however many modules share it
    views = {id(parameter): local_view(parameter) for _, _, parameter in placed}
    try:
        for module, name, parameter in placed:
            module._parameters[name] = views[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in placed:
            module._parameters[name] = parameter
