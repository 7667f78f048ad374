"""How far a layout may be from one process, and why so far.

In fp64 a layout may change nothing but the order of sums: 1e-10, the promise (DESIGN section 1, number 6); measured up to 1e-14. In fp32 and
bf16 the order of sums shows. Largest deviations of `tiny` over micro-batches, replicas, shards, tensor, context and pipeline ranks, with AdamW
and Muon: in fp32 1.6e-7 of losses, 1e-6 of other figures, 2.1e-6 of gradients, 2.8e-6 of moments, 1.5e-7 of weights; in bf16 4.3e-3, 1.9e-2,
5.6e-2, 7.6e-2 and 3.3e-3 (moments under QK-norm 0.29: second moments are squares, off by twice as much). Where bf16 rounds at other places
(tensor and context ranks) gradients are
as far from the one process as each of them is from fp64, 3e-2 to 5e-2 in the first of 8 layers: that is the precision's own noise. The bounds
are about ten times the measured in fp32, and about three times in bf16, whose noise is of one size on all layouts. They are no substitute
for the fp64 column: there a missing reduction stands out by nine digits, here by one or two.
"""

from dataclasses import dataclass, replace
from typing import Literal

from surefoot.config.optim import Lion, Muon, OptimConfig

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
    "fp32": Bounds(loss=2e-6, figure=1e-5, gradient=2e-5, moment=3e-5, weight=2e-6),
    "bf16": Bounds(loss=1.5e-2, figure=6e-2, gradient=0.2, moment=0.4, weight=1e-2),
}
LION_WEIGHT = {"fp64": EXACT, "fp32": 1e-3, "bf16": 2e-2}
"""Weights that move by signs: noise in an element near zero turns its step over, and one of a thousand elements is 3e-4 of its tensor at a
rate of 1e-3. Measured in bf16 6.7e-3."""


WHOLE_GRADIENT = {"fp64": EXACT, "fp32": 2e-5, "bf16": 2e-2}
"""Gradients of layouts that leave every product of a row whole (replicas, shards, stages, micro-batches, recomputation): the forward keeps
its bits, and only the sums over rows are cut elsewhere. Measured in bf16 3.3e-3. Angles that FSDP2 rounded to bf16 unseen gave 5e-2, which the wider
bound had let pass as noise."""


def bounds_of(precision: str, optim: OptimConfig, *, products_whole: bool = False) -> Bounds:
    """The bounds of a run; ``products_whole``: no tensor and no context ranks."""
    kind = optim.optimizer
    signs = isinstance(kind, Lion) or (isinstance(kind, Muon) and isinstance(kind.others, Lion))
    bounds = BOUNDS[precision]
    if products_whole:
        bounds = replace(bounds, gradient=WHOLE_GRADIENT[precision])
    return replace(bounds, weight=LION_WEIGHT[precision]) if signs else bounds


PRECISIONS = tuple(BOUNDS)
"""The columns."""
