"""Signs that the weights themselves are wrong, and signs that the optimiser made them so."""

import math
from collections.abc import Sequence

from surefoot.guard.evidence import Evidence
from surefoot.guard.finding import Finding, Kind
from surefoot.guard.signals import ProbeSignals, RoleProbe

OUTLIER = 1e3
"""Largest element over the root mean square of its tensor that no training reaches; sqrt(n) is all that a tensor of n elements can show,"""
OUTLIER_GROWTH = 3.0
"""hence also so many times what it was at the last probe,"""
OUTLIER_LEAST = 6.0
"""from so much on: a Gaussian tensor of a million elements shows 5."""
LARGEST_NORM = 1e8
"""Norm of a role's parameters that only a flipped exponent bit reaches: the highest makes 1e30 of a weight."""
SUSPICIOUS = 20.0
"""Largest element over the root mean square of its tensor from which, in a state that is broken, a flipped bit is likelier than the updates."""
UPDATE_GROWTH = 3.0
"""Times the update of the last probe from which the optimiser, not a flipped bit, is suspected."""
STALE = 0.6
"""Share of the largest possible RMS_t, 1/sqrt(1 - beta2), from which the second moment lags behind (2.7 at 0.95; arXiv:2304.13013 has 2.3)."""
BUILD_UP = 3
"""Batches between the onset of a finding and its being seen, from which it has built up."""

MARKS: tuple[Kind, ...] = (
    "update_size",
    "optimizer_steps",
    "attention_growth",
    "slow_spike",
    "gradient_creep",
    "stale_second_moment",
)
"""Findings that point to the optimiser, its rate or its schedule."""


def weights_broken(probe: ProbeSignals | None, before: Sequence[ProbeSignals] = ()) -> str:
    """What is wrong with the weights, by a probe and those before it; empty where nothing shows."""
    if probe is None:
        return ""
    if not probe.weights_finite:
        return "weights are not finite"
    earlier = {role.role: role for role in before[-1].roles} if before else {}
    for role in probe.roles:
        if role.weight_norm > LARGEST_NORM:
            return f"the norm of the {role.role} parameters is {role.weight_norm:.3g}"
        if _is_outlier(role, earlier.get(role.role)):
            was = f" (it was {earlier[role.role].largest_weight:.3g})" if role.role in earlier else ""
            return f"a weight of the {role.role} parameters is {role.largest_weight:.3g} times the size of its neighbours{was}"
    return ""


def broken_by(findings: Sequence[Finding]) -> str:
    """What a finding says is wrong with the weights themselves; empty where none does. An activation is blamed on a layer, a weight on a role."""
    for finding in findings:
        if finding.severity != "alarm":
            continue
        if finding.kind == "nonfinite" and finding.where == "weights":
            return finding.text
        if finding.kind == "activation_explosion" and finding.where and not finding.where.startswith("layer"):
            return finding.text
    return ""


def _is_outlier(role: RoleProbe, before: RoleProbe | None) -> bool:
    if role.largest_weight > OUTLIER:
        return True
    return before is not None and role.largest_weight > max(OUTLIER_LEAST, OUTLIER_GROWTH * before.largest_weight)


def optimiser_marks(evidence: Evidence) -> str:
    """What points to the optimiser, in words; empty where nothing does."""
    marked = [f.text for f in evidence.findings if f.kind in MARKS]
    if marked:
        return marked[0]
    probe = evidence.probe
    if probe is None:
        return ""
    bound = 1 / math.sqrt(1 - probe.beta2) if 0 <= probe.beta2 < 1 else math.inf
    earlier = {role.role: role for role in evidence.probes_before[-1].roles} if evidence.probes_before else {}
    for role in probe.roles:
        if role.rms_t > STALE * bound:
            return (
                f"RMS_t of the {role.role} parameters is {role.rms_t:.2g}: the second moment lags behind the gradients"
            )
        was = earlier.get(role.role)
        # Over the weights: of a broken weight the decay alone is a large update.
        if was is not None and 0 < UPDATE_GROWTH * was.update_ratio < role.update_ratio:
            return f"updates of the {role.role} parameters are {role.update_ratio / was.update_ratio:.1f} times those of the last probe"
    return ""


def suspicious_weight(probe: ProbeSignals | None) -> str:
    """The weight that sticks out most, where one does; empty where none does."""
    roles = [role for role in probe.roles if role.largest_weight > SUSPICIOUS] if probe else []
    if not roles:
        return ""
    role = max(roles, key=lambda r: r.largest_weight)
    return f"a weight of the {role.role} parameters is {role.largest_weight:.3g} times the size of its neighbours: a bit may have flipped"


def built_up(evidence: Evidence) -> bool:
    """A finding can be traced back over several batches."""
    return any(f.batch_index - f.onset >= BUILD_UP for f in evidence.findings)
