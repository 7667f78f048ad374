"""A probe of the inside in hand, with what earlier ones have shown."""

import math
from dataclasses import dataclass

from surefoot.config.guard import Thresholds
from surefoot.guard.baseline import LARGEST
from surefoot.guard.finding import Finding, Kind, Severity
from surefoot.guard.lasting import Lasting
from surefoot.guard.signals import ProbeSignals

HISTORY = 8
"""Probes remembered."""

Point = tuple[int, float]
"""(step, value), finite."""
Series = tuple[tuple[str, tuple[Point, ...]], ...]
"""Name of a figure, as ``attention_logit/3``, and its latest points, oldest first; by name."""


@dataclass(frozen=True)
class ProbeView:
    """What detectors over probes are given."""

    probe: ProbeSignals
    batch_index: int
    thresholds: Thresholds
    total_steps: int
    """At which the run ends; 0 is not known."""
    before: dict[str, tuple[Point, ...]]
    lasting: Lasting

    def see(
        self,
        kind: Kind,
        severity: Severity,
        where: str,
        begins: bool,
        lasts: bool,
        text: str,
        value: float,
        normal: float,
    ) -> None:
        """A condition of one layer or role, which ``text`` says."""
        finding = self._finding(kind, severity, where, text, value, normal)
        self.lasting.see(f"{kind}/{severity}/{where}", begins, lasts, lambda: finding)

    def escalate(
        self, kind: Kind, where: str, begins: bool, lasts: bool, text: str, value: float, normal: float, excess: float
    ) -> None:
        """An alarm of one layer, said again each time that its ``excess`` (a ratio) has doubled: what was ordered for it has not helped."""
        level = max(0, math.floor(math.log2(max(excess, 1.0)))) if begins else -1
        finding = self._finding(kind, "alarm", where, text, value, normal)
        self.lasting.escalate(f"{kind}/alarm/{where}", level, lasts, lambda: finding)

    def _finding(self, kind: Kind, severity: Severity, where: str, text: str, value: float, normal: float) -> Finding:
        return Finding(
            kind=kind,
            severity=severity,
            text=text,
            batch_index=self.batch_index,
            onset=self.batch_index,
            value=value,
            normal=normal,
            where=where,
        )

    def values_before(self, figure: str) -> tuple[float, ...]:
        """A figure's values in earlier probes."""
        return tuple(value for _, value in self.before.get(figure, ()))


def figures(probe: ProbeSignals) -> dict[str, float]:
    """Every figure that is remembered, by the name it is remembered under."""
    found = {}
    for layer in probe.layers:
        found[f"attention_logit/{layer.layer}"] = layer.attention_logit_max
        found[f"entropy/{layer.layer}"] = layer.attention_entropy
        found[f"activation_rms/{layer.layer}"] = layer.activation_rms
    for role in probe.roles:
        found[f"rms_t/{role.role}"] = role.rms_t
        found[f"largest_weight/{role.role}"] = role.largest_weight
        found[f"weight_norm/{role.role}"] = role.weight_norm
    return found


def remember(series: Series, probe: ProbeSignals) -> Series:
    """The figures with this probe's; what is not finite is left out. The highest entropy of a layer is kept for good."""
    points = dict(series)
    for name, value in figures(probe).items():
        if abs(value) <= LARGEST:
            earlier = points.get(name, ())
            if earlier and earlier[-1][0] >= probe.step:  # a second probe of one step: at a finding
                earlier = tuple(point for point in earlier if point[0] < probe.step)
            points[name] = (*earlier[1 - HISTORY :], (probe.step, value))
            if name.startswith("entropy/"):
                highest = f"highest_{name}"
                points[highest] = (max((*points.get(highest, ()), (probe.step, value)), key=lambda point: point[1]),)
    return tuple(sorted(points.items()))
