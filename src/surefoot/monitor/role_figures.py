"""How the parameters of each role move, in figures: what a run's last probe found."""

import math
from dataclasses import dataclass

import numpy as np

from surefoot.monitor.run import Columns

_INSIDE, _RATIO = "inside/", "/update_ratio"


@dataclass(frozen=True)
class RoleFigures:
    """One role of parameters at the newest probe; NaN where the rows do not tell."""

    role: str
    step: int
    """Of the probe."""
    lr: float
    """Learning rate of these parameters."""
    weight_decay: float
    """Share of a weight that decay takes off per step."""
    update_ratio: float
    """Size of an update over the size of the weights."""


def role_names(metrics: Columns) -> list[str]:
    """Roles that were probed, in the order of the model."""
    return [
        n.removeprefix(_INSIDE).removesuffix(_RATIO) for n in metrics if n.startswith(_INSIDE) and n.endswith(_RATIO)
    ]


def role_figures(metrics: Columns) -> tuple[RoleFigures, ...]:
    """Every role's figures, from the rows that count."""
    found = []
    for role in role_names(metrics):
        places = np.flatnonzero(np.isfinite(metrics[f"{_INSIDE}{role}{_RATIO}"]))
        if not len(places):
            continue
        lr, decay, ratio = (
            _at(metrics, f"{_INSIDE}{role}/{name}", places[-1]) for name in ("lr", "weight_decay", "update_ratio")
        )
        step = int(metrics["step"][places[-1]])
        found.append(RoleFigures(role=role, step=step, lr=lr, weight_decay=decay, update_ratio=ratio))
    return tuple(found)


def _at(metrics: Columns, name: str, place: int) -> float:
    return float(metrics[name][place]) if name in metrics else math.nan
