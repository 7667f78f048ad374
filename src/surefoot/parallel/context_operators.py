"""Functions that torch sees as one operator: whatever they do inside, collectives included, is neither traced nor differentiated."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("surefoot", "DEF")  # type: ignore[no-untyped-call]


def define_operator(
    name: str,
    compute: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    gradient: tuple[Callable[..., Any], Callable[..., None]] | None = None,
) -> None:
    """Make ``compute`` known as ``torch.ops.surefoot.<name>``. Its results are new, contiguous tensors.

    ``shapes`` gives empty tensors like the results, from the same arguments; ``gradient`` is the backward and what keeps for it, as
    ``torch.library.register_autograd`` has them. Not ``torch.library.custom_op``: its first call imports the compiler, seconds in every
    process.
    """
    _LIBRARY.define(name + torch.library.infer_schema(compute, mutates_args=()))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"surefoot::{name}", shapes, lib=_LIBRARY)
    if gradient is not None:
        backward, keep = gradient
        torch.library.register_autograd(f"surefoot::{name}", backward, setup_context=keep, lib=_LIBRARY)
