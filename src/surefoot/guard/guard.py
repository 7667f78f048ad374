"""Signals in, verdict out: one rule so far, non-finite -> skipped step."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Action, Halt, Proceed, SkipUpdate
from surefoot.guard.signals import StepSignals


@dataclass(frozen=True, kw_only=True)
class GuardState:
    """What the guard remembers; rewinds with the weights."""

    consecutive_skips: int = 0
    """Skipped steps in a row, up to now."""
    healthy_batches: int = 0
    """Batches since the last skipped step: what certifies a checkpoint."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "GuardState":
        """The state that ``to_dict`` wrote."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The guard's answer to one step."""

    state: GuardState
    """What it remembers now."""
    findings: tuple[str, ...]
    """What it saw, a sentence each."""
    action: Action


class Judge(Protocol):
    """A pure function from what is remembered and seen to a verdict; ``judge`` below is the one that runs use."""

    def __call__(self, state: GuardState, signals: StepSignals, config: GuardConfig) -> Verdict:
        """The verdict on one step."""


def judge(state: GuardState, signals: StepSignals, config: GuardConfig) -> Verdict:
    """The verdict on one step.

    Non-finite loss or gradient norm is a skipped step, as the device has already decided by the same rule; ``max_consecutive_skips`` of them
    in a row halt the run, since a fault that stays is not the batch's. A batch without targets says nothing and changes nothing.
    """
    if signals.num_targets == 0:
        finding = f"batch {signals.batch_index} has no target token left: consumed without an update"
        return Verdict(state=state, findings=(finding,), action=Proceed())
    if signals.finite:
        healthy = GuardState(consecutive_skips=0, healthy_batches=state.healthy_batches + 1)
        return Verdict(state=healthy, findings=(), action=Proceed())
    cause = _what_is_not_finite(signals)
    after = replace(state, consecutive_skips=state.consecutive_skips + 1, healthy_batches=0)
    if after.consecutive_skips >= config.max_consecutive_skips:
        reason = (
            f"{after.consecutive_skips} skipped steps in a row up to batch {signals.batch_index} ({cause}): the fault is in the state, "
            f"the learning rate or the numerics, not in one batch. Weights are those of step {signals.step}; resume from an "
            "earlier checkpoint with `surefoot fork RUN --at STEP` and a lower optim.lr, or precision fp32"
        )
        return Verdict(state=after, findings=(cause,), action=Halt(reason=reason))
    return Verdict(state=after, findings=(cause,), action=SkipUpdate(cause=cause))


def _what_is_not_finite(signals: StepSignals) -> str:
    return (
        f"batch {signals.batch_index}: loss {signals.loss:.4g}, gradient norm {signals.gradient_norm:.4g}, not finite"
    )
