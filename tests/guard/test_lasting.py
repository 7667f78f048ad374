"""Hysteresis: a lasting condition is one finding until it has ended."""

from surefoot.guard.finding import Finding
from surefoot.guard.lasting import Lasting


def told(begins: bool, lasts: bool, active: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    lasting = Lasting(active)
    finding = Finding(kind="validation", severity="warning", text="x", batch_index=0, onset=0, value=1.0)
    lasting.see("k", begins, lasts, lambda: finding)
    return len(lasting.findings), lasting.active


def test_a_condition_is_said_when_it_begins_holds_at_a_milder_threshold_and_may_begin_again_after_its_end() -> None:
    assert told(begins=True, lasts=True, active=()) == (1, ("k",))
    assert told(begins=True, lasts=True, active=("k",)) == (0, ("k",))
    assert told(begins=False, lasts=True, active=("k",)) == (0, ("k",))
    assert told(begins=False, lasts=False, active=("k",)) == (0, ())
    assert told(begins=False, lasts=True, active=()) == (0, ())


def test_what_was_not_judged_stays_as_it_was() -> None:
    assert Lasting(("other",)).active == ("other",)
