"""Attention on its way to ruin: the growth of its logits with a forecast, and the collapse of its entropy."""

import math
from collections.abc import Sequence

from surefoot.guard.baseline import LARGEST
from surefoot.guard.inside import Point, ProbeView

LEAST_POINTS = 4
"""Probes, this one included, that a forecast rests on."""
SLOWING = 0.8
"""Growth of the later half over that of the earlier one below which growth is slowing down."""
STEEP = 0.02
"""Least growth of the logarithm over the remembered probes that counts as growing."""
COLLAPSED = 0.02
"""Mean entropy over that of uniform attention below which a layer looks at single keys only."""
COLLAPSED_SHARE = 0.25
"""And so little of the highest it has had."""


def attention_growth(view: ProbeView) -> None:
    """Per layer: beyond ruin, or forecast to get there before the run's end, an alarm; large and growing, a warning."""
    warning, ruin = view.thresholds.logit_warning, view.thresholds.logit_ruin
    for layer in view.probe.layers:
        value = layer.attention_logit_max
        if math.isnan(value):
            continue
        where = f"layer {layer.layer}"
        points = (*view.before.get(f"attention_logit/{layer.layer}", ()), (view.probe.step, value))
        judged = len(points) >= LEAST_POINTS and math.isfinite(value)
        arrives = arrival(points, ruin) if judged else math.inf
        growing = judged and min(log_slope(points), log_slope(points[len(points) // 2 :])) * _span(points) > STEEP
        if value > ruin:
            text = f"largest attention logit of {where} is {value:.3g}, beyond {_short(ruin)}, where every published run diverged"
        elif growing and math.isfinite(arrives):
            text = f"largest attention logit of {where} is {value:.3g}: at this slope {where} reaches {_short(ruin)} at step {arrives:,.0f}"
        else:
            text = f"largest attention logit of {where} is {value:.3g}"
        soon = value > warning and growing and arrives <= view.total_steps
        lasts = value > warning and growing
        alarm = value > ruin or soon
        excess = min(value, LARGEST) / warning
        view.escalate("attention_growth", where, alarm, lasts, text, value, warning, excess)
        view.see("attention_growth", "warning", where, lasts and not alarm, value > 0.8 * warning, text, value, warning)


def arrival(points: Sequence[Point], ruin: float) -> float:
    """Step at which a figure reaches ruin, by its growth in log space over the given points; infinity where it does not.

    The slope is that of all points or of their later half, whichever is less. Where the later half grows clearly less than the earlier, each
    further half is taken to grow less in the same ratio, so that growth that levels off arrives nowhere.
    """
    (start, _), (step, value) = points[0], points[-1]
    if value >= ruin:
        return float(step)
    if value <= 0:  # a layer that a fault has silenced
        return math.inf
    half = len(points) // 2
    early, late = log_slope(points[: half + 1]), log_slope(points[half:])
    slope = min(log_slope(points), late)
    if slope <= 0:
        return math.inf
    needed = math.log(ruin / value)
    ratio = late / early if early > 0 else 1.0
    if ratio < SLOWING:
        span = (step - start) / 2
        share = needed * (1 - ratio) / (slope * span * ratio)
        return step + span * math.log1p(-share) / math.log(ratio) if share < 1 else math.inf
    return step + needed / slope


def log_slope(points: Sequence[Point]) -> float:
    """Growth of the logarithm per step, by least squares."""
    logs = [(step, math.log(value)) for step, value in points if value > 0]
    if len(logs) < 2:
        return 0.0
    mean_step = sum(step for step, _ in logs) / len(logs)
    mean_log = sum(log for _, log in logs) / len(logs)
    spread = sum((step - mean_step) ** 2 for step, _ in logs)
    return sum((step - mean_step) * (log - mean_log) for step, log in logs) / spread if spread else 0.0


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e+0", "e")


def _span(points: Sequence[Point]) -> int:
    return points[-1][0] - points[0][0]


def entropy_collapse(view: ProbeView) -> None:
    """An alarm where a layer's attention has collapsed onto single keys in two probes in a row."""
    for layer in view.probe.layers:
        value = layer.attention_entropy
        highest = max(view.values_before(f"highest_entropy/{layer.layer}"), default=0.0)
        earlier = view.values_before(f"entropy/{layer.layer}")
        if math.isnan(value) or not earlier:
            continue
        limit = min(COLLAPSED, COLLAPSED_SHARE * highest)
        where = f"layer {layer.layer}"
        text = (
            f"attention entropy of {where} has collapsed to {value:.2%} of uniform, from {highest:.2%} at its highest"
        )
        begins = value < limit and earlier[-1] < limit
        excess = limit / max(value, 1e-6)
        view.escalate("entropy_collapse", where, begins, value < 2 * limit, text, value, highest, excess)
