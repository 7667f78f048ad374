"""What to do about replicas that hold different bits: a fault of the hardware that no loss shows, and that stays in the state."""

from dataclasses import replace

from surefoot.config.guard import GuardConfig
from surefoot.guard.evidence import Diagnosis
from surefoot.guard.guard import GuardState, Verdict
from surefoot.guard.ladder import Situation, roll_back
from surefoot.guard.record import Record
from surefoot.guard.signals import StepSignals


def judge_replicas(
    state: GuardState, signals: StepSignals, config: GuardConfig, record: Record, text: str, same_at: int
) -> Verdict:
    """Back to before batch ``same_at``, up to which all replicas are known to have held the same bits, or Halt where rollbacks are spent.

    ``text``: a sentence without a full stop that names tensors and ranks. No document is excluded, since none is at fault.
    """
    found = Diagnosis(cause="hardware", text=text, state_is_broken=True, certain=True)
    now = Situation(signals=signals, findings=(), config=config, record=record, cause=found)
    return Verdict(state=replace(state, healthy_batches=0), action=roll_back(now, same_at), diagnosis=found)
