"""Moments, weights and activations at a probe: stale second moments, outliers, explosions."""

import math

from surefoot.guard.baseline import median
from surefoot.guard.inside import ProbeView

STALE_EXPONENT = 0.362
"""RMS_t's threshold is its ceiling to this power: the published 2.3 of beta2 = 0.99 (ceiling 10), 1.7 of 0.95, 3.5 of 0.999."""
STALE_RATIO = 2.5
"""And so many times what the role has had."""
MATRICES = ("hidden", "output", "expert", "latent")
"""Roles of so many elements that the mean over them is steady from step to step; the few gains and biases of a model are not."""
FIRST_SHARE = 0.3
"""Of the largest share that one update may be of its weights, for the first: Adam moves every weight by the rate itself there, which a warm-up
keeps far below its peak."""
ACTIVATION_RATIO = 10.0
"""Root mean square of a layer's residual stream, over the largest it has been in the probes remembered."""
OUTLIER_RATIO = 8.0
"""Growth of a role's largest weight (over its tensor's root mean square) since the last probe."""
OUTLIER_LEAST = 20.0
"""And at least so large: weights drawn from a normal distribution reach 4 to 5."""
NORM_RATIO = 3.0
"""Growth of a role's weight norm since the last probe."""
SEEN = 3
"""Earlier probes without which moments, norms and activations are not compared: what starts near zero grows fast."""


def stale_second_moment(view: ProbeView) -> None:
    """A warning where squared gradients have outgrown their moving average, which precedes loss spikes by 1 to 8 steps (arXiv:2304.13013)."""
    if not 0 < view.probe.beta2 < 1:
        return
    limit = (1 - view.probe.beta2) ** (-STALE_EXPONENT / 2)
    for role in view.probe.roles:
        earlier = view.values_before(f"rms_t/{role.role}")
        if role.role not in MATRICES or math.isnan(role.rms_t) or len(earlier) < SEEN:
            continue
        usual = median(earlier)
        text = f"second moment of {role.role} weights is stale: RMS_t {role.rms_t:.3g}, usually {usual:.3g}, limit {limit:.3g} at beta2 {view.probe.beta2:g}"
        begins = role.rms_t > max(limit, STALE_RATIO * usual)
        view.see("stale_second_moment", "warning", role.role, begins, role.rms_t > limit, text, role.rms_t, usual)


def update_ratio(view: ProbeView) -> None:
    """An alarm where one update is a large share of the weights it moves: the rate is too high for them, or the warm-up too short."""
    limit = view.thresholds.update_share * (FIRST_SHARE if view.probe.step <= 1 else 1.0)
    for role in view.probe.roles:
        value = role.update_ratio
        if role.role not in MATRICES or math.isnan(value):
            continue
        text = f"one update is {value:.2g} times the size of {role.role} weights, beyond {limit:g}: the rate is too high or the warm-up too short"
        view.escalate("update_ratio", role.role, value > limit, value > limit / 2, text, value, limit, value / limit)


def activation_explosion(view: ProbeView) -> None:
    """An alarm where a layer's activations are ten times the largest they have been, or not finite although other layers' are measured.

    In health they grow a hundredfold over the first tens of steps, but never tenfold from the third probe to the fourth, or later.
    """
    measured = any(math.isfinite(layer.activation_rms) for layer in view.probe.layers)
    for layer in view.probe.layers:
        value = layer.activation_rms
        where = f"layer {layer.layer}"
        broken = math.isinf(value) or (math.isnan(value) and measured)
        if math.isnan(value) and not broken:
            continue
        earlier = view.values_before(f"activation_rms/{layer.layer}")
        largest = max(earlier, default=0.0)
        begins = broken or (len(earlier) >= SEEN and value > ACTIVATION_RATIO * largest > 0)
        lasts = value > ACTIVATION_RATIO * largest / 2
        text = f"activations after {where} have root mean square {value:.3g}, before at most {largest:.3g}"
        view.see("activation_explosion", "alarm", where, begins, lasts, text, value, largest)


def broken_weights(view: ProbeView) -> None:
    """An alarm where weights are not finite, or where one weight (or a role's norm) has leapt since the last probe: a flipped bit.

    The leap of a weight carries the kind ``activation_explosion``, which is what it leads to, with its role as place.
    """
    finite = view.probe.weights_finite
    text = "weights are not finite: every update from here on is lost"
    view.see("nonfinite", "alarm", "weights", not finite, False, text, math.nan, 0.0)
    for role in view.probe.roles:
        earlier = view.values_before(f"largest_weight/{role.role}")
        largest = role.largest_weight
        leapt = bool(earlier) and largest > max(OUTLIER_LEAST, OUTLIER_RATIO * earlier[-1])
        text = f"largest {role.role} weight is {largest:.3g} times its tensor's root mean square"
        text += f", {earlier[-1]:.3g} at the last probe" if earlier else ""
        norms = view.values_before(f"weight_norm/{role.role}")
        if not leapt and len(norms) >= SEEN and norms[-1] > 0 and role.weight_norm > NORM_RATIO * norms[-1]:
            leapt = True
            text = f"norm of {role.role} weights is {role.weight_norm:.3g}, {norms[-1]:.3g} at the last probe"
        view.see(
            "activation_explosion", "alarm", role.role, leapt, False, text, largest, earlier[-1] if earlier else 0.0
        )
