"""How far a layout may be from one process, and why so far.

In fp64 a layout may change nothing but the order of sums: 1e-10, the promise (DESIGN section 1, number 6). In fp32 and bf16 the order of sums
shows, and how much of it depends on the model and on the number of terms: the bounds below are the largest deviation measured over all rows
of the table (docs/parity.md names them), times a margin of about ten in fp32 and three to four in bf16, whose noise is larger and so is hidden
less. They are no substitute for the fp64 column: there a missing reduction stands out by nine digits, here by one or two.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sample", "loss", "figure", "gradient", "moment", "weight"]
"""What is compared: sample ids, rows and words, which are equal or not; losses per token and per batch; other metrics, signals and what the
guard remembers; gradients; what optimisers and clipping remember; weights."""

FLOOR = 1e-3
"""A tensor is compared relative to its own norm, but to no less than so small a share of the root mean square over all tensors of its kind. A
gradient that is zero but for rounding has no digits of its own; what it may be wrong by is rounding at the scale of the gradients around
it. A tensor that matters so little moves no weight that another does not move a thousand times as far."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Of one precision, relative."""

    loss: float
    figure: float
    gradient: float
    moment: float
    weight: float
    sample: float = 0.0

    def of(self, kind: Kind) -> float:
        """The bound of one kind of comparison."""
        return float(getattr(self, kind))


EXACT = 1e-10
BOUNDS: dict[str, Bounds] = {
    "fp64": Bounds(loss=EXACT, figure=EXACT, gradient=EXACT, moment=EXACT, weight=EXACT),
    "fp32": Bounds(loss=2e-6, figure=1e-3, gradient=2e-5, moment=5e-5, weight=2e-6),
    "bf16": Bounds(loss=2e-2, figure=2e-1, gradient=2e-1, moment=3e-1, weight=2e-2),
}
PRECISIONS = tuple(BOUNDS)
"""The columns."""
