"""The catalogue of faults that the drill puts into runs: what each is, what caused it in truth, and from which ranges its dose is drawn."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from surefoot.config.run import RunConfig
from surefoot.proof import data_faults, setting_faults, step_faults
from surefoot.proof.faults import Bench, Dose

Truth = Literal["data", "optimiser", "numerics", "hardware"]
SHARES = (0.1, 0.01, 0.001)
"""Shares of a batch's tokens that faults of the data are diluted to."""


def _as_it_is(config: RunConfig, dose: Dose) -> RunConfig:
    return config


def _nothing(bench: Bench, dose: Dose) -> Bench:
    return bench


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: str
    title: str
    """For a table."""
    cause: Truth
    fast: bool
    """Shows at once or never; its delay is counted in steps."""
    curable: bool
    """Skipping, excluding or going back can undo it; else it lasts, or lies in the config."""
    length: tuple[int, int] = (1, 1)
    """Batches or steps it lasts, drawn uniformly."""
    magnitude: tuple[float, float] = (0.0, 0.0)
    """Drawn uniformly in the logarithm; whole numbers where ``whole``."""
    unit: str = ""
    """What the magnitude counts."""
    whole: bool = False
    throughout: bool = False
    """The whole run has it: a setting."""
    at_resume: bool = False
    """It happens while the run is stopped and continued."""
    dilutable: bool = False
    slows: bool = False
    """It costs time and no quality: notes count as seen."""
    arm: Callable[[Bench, Dose], Bench] = _nothing
    configure: Callable[[RunConfig, Dose], RunConfig] = _as_it_is

    def dose(self, seed: int, steps: int, share: float = 1.0) -> Dose:
        """The dose of one seed in a run of ``steps``: the onset in its middle, so that there is a before and an after."""
        draw = random.Random(f"{self.name}/{seed}")
        onset = 0 if self.throughout else draw.randint(round(0.4 * steps), round(0.55 * steps))
        length = steps if self.throughout else draw.randint(*self.length)
        low, high = self.magnitude
        magnitude = (
            draw.randint(round(low), round(high)) if self.whole else low * (high / low) ** draw.random() if low else 0.0
        )
        return Dose(onset=onset, length=length, magnitude=float(magnitude), share=share, seed=draw.randrange(2**31))


def _spoiling(spoil: data_faults.Spoil) -> Callable[[Bench, Dose], Bench]:
    return partial(data_faults.spoil_with, spoil)


CATALOGUE: tuple[Fault, ...] = (
    Fault(
        name="repeated_letter",
        title="a document of one repeated letter",
        cause="data",
        fast=True,
        curable=True,
        length=(1, 3),
        dilutable=True,
        arm=_spoiling(data_faults.one_letter),
    ),
    Fault(
        name="repeated_bytes",
        title="30 batches of one repeated byte",
        cause="data",
        fast=True,
        curable=True,
        length=(30, 30),
        dilutable=True,
        arm=_spoiling(data_faults.one_byte),
    ),
    Fault(
        name="random_tokens",
        title="random tokens",
        cause="data",
        fast=True,
        curable=True,
        length=(1, 8),
        dilutable=True,
        arm=_spoiling(data_faults.random_bytes),
    ),
    Fault(
        name="shifted_labels",
        title="labels shifted by one",
        cause="data",
        fast=True,
        curable=True,
        length=(5, 30),
        dilutable=True,
        arm=_spoiling(data_faults.shifted_targets),
    ),
    Fault(
        name="target_leak",
        title="the input holds the target",
        cause="data",
        fast=True,
        curable=True,
        length=(20, 60),
        dilutable=True,
        arm=_spoiling(data_faults.leaked_targets),
    ),
    Fault(
        name="duplicated_shard",
        title="a duplicated shard",
        cause="data",
        fast=False,
        curable=True,
        length=(30, 90),
        magnitude=(2, 24),
        unit="rows",
        whole=True,
        dilutable=True,
        arm=_spoiling(data_faults.same_rows),
    ),
    Fault(
        name="mixture_jump",
        title="a mixture jump nobody planned",
        cause="data",
        fast=False,
        curable=False,
        length=(30, 90),
        dilutable=True,
        arm=data_faults.jump,
    ),
    Fault(
        name="rate_times_10",
        title="learning rate times 10 for 5 steps",
        cause="optimiser",
        fast=True,
        curable=False,
        length=(5, 5),
        magnitude=(10, 10),
        unit="times the rate",
        arm=step_faults.raise_rate,
    ),
    Fault(
        name="rate_too_high",
        title="learning rate far too high, no QK-norm",
        cause="optimiser",
        fast=False,
        curable=False,
        magnitude=(10, 40),
        unit="times the rate",
        throughout=True,
        configure=setting_faults.high_rate,
    ),
    Fault(
        name="no_warmup",
        title="warm-up of 1",
        cause="optimiser",
        fast=False,
        curable=False,
        magnitude=(3, 10),
        unit="times the rate",
        throughout=True,
        configure=setting_faults.no_warmup,
    ),
    Fault(
        name="long_memory",
        title="beta2 .999 with epsilon 1e-15",
        cause="optimiser",
        fast=False,
        curable=False,
        magnitude=(1, 4),
        unit="times the rate",
        throughout=True,
        configure=setting_faults.long_memory,
    ),
    Fault(
        name="gradient_times_1000",
        title="one gradient tensor times 1,000",
        cause="hardware",
        fast=True,
        curable=True,
        magnitude=(300, 3000),
        unit="times",
        arm=partial(step_faults.strike_gradient, step_faults.multiply),
    ),
    Fault(
        name="nan_gradient",
        title="NaN in one gradient",
        cause="hardware",
        fast=True,
        curable=True,
        arm=partial(step_faults.strike_gradient, step_faults.spoil_one),
    ),
    Fault(
        name="inf_loss",
        title="an infinite loss",
        cause="numerics",
        fast=True,
        curable=True,
        arm=step_faults.overflow,
        configure=setting_faults.low_precision,
    ),
    Fault(
        name="weight_bit",
        title="a flipped exponent bit in a weight",
        cause="hardware",
        fast=True,
        curable=True,
        magnitude=(29, 30),
        unit="bit",
        whole=True,
        arm=partial(step_faults.strike_weight, step_faults.flip_bit),
    ),
    Fault(
        name="gradient_bit",
        title="a flipped exponent bit in a gradient",
        cause="hardware",
        fast=True,
        curable=True,
        magnitude=(29, 30),
        unit="bit",
        whole=True,
        arm=partial(step_faults.strike_gradient, step_faults.flip_bit),
    ),
    Fault(
        name="update_twice",
        title="an update applied twice",
        cause="optimiser",
        fast=True,
        curable=True,
        arm=step_faults.update_twice,
    ),
    Fault(
        name="stale_gradients",
        title="gradients not zeroed once",
        cause="optimiser",
        fast=True,
        curable=True,
        arm=step_faults.keep_gradients,
    ),
    Fault(
        name="step_count_lost",
        title="Adam's step count lost on resume",
        cause="optimiser",
        fast=True,
        curable=True,
        at_resume=True,
    ),
    Fault(
        name="slow_source",
        title="a slow source",
        cause="hardware",
        fast=True,
        curable=False,
        length=(20, 40),
        magnitude=(0.05, 0.2),
        unit="s a batch",
        slows=True,
        arm=data_faults.slow_down,
    ),
)
"""In the order of the issue that asked for it."""

FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in CATALOGUE}
