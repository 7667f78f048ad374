"""Rows that come again under new names: refused whatever the loss says, where that is not what is usual."""

from dataclasses import replace

import pytest

from guard_series import THRESHOLDS, Watch, step
from surefoot.guard.detectors import DetectorState, limits_of
from surefoot.guard.limits import Limits
from surefoot.guard.signals import BatchFacts


def reading(share: float, num_steps: int = 40, regime: int = 0) -> Watch:
    return Watch().all([step(2.2, facts=BatchFacts(duplicated=share), regime=regime)] * num_steps)


def test_rows_read_lately_under_another_name_are_an_alarm_and_refused_inside_the_band() -> None:
    watch = reading(0.0)
    facts = BatchFacts(duplicated=0.26)
    assert limits_of(watch.state, THRESHOLDS).wrong(facts)
    (finding,) = watch.see(step(2.2, facts=facts))
    assert (finding.kind, finding.severity, finding.where) == ("too_good", "alarm", "duplicated")
    assert finding.text == "26% of the rows were read before under another name in the last 64 batches"
    assert watch.state.duplicated == reading(0.0).state.duplicated, "what is refused is not learned as usual"


@pytest.mark.parametrize(("usual", "share"), [(0.0, 0.25), (0.6, 0.6), (0.6, 0.61)])
def test_a_few_of_them_or_as_many_as_always_are_none(usual: float, share: float) -> None:
    watch = reading(usual)
    facts = BatchFacts(duplicated=share)
    assert not limits_of(watch.state, THRESHOLDS).wrong(facts)
    assert watch.see(step(2.2, facts=facts)) == ()


def test_more_of_them_than_a_duplicated_corpus_has_are_an_alarm() -> None:
    watch = reading(0.6)
    assert limits_of(watch.state, THRESHOLDS).wrong(BatchFacts(duplicated=0.8))
    assert [f.where for f in watch.see(step(2.2, facts=BatchFacts(duplicated=0.8)))] == ["duplicated"]


def test_nothing_is_said_before_what_is_usual_is_known_nor_refused_by_who_only_watches() -> None:
    facts = BatchFacts(duplicated=1.0)
    watch = reading(0.0, 15)
    assert not limits_of(watch.state, THRESHOLDS).wrong(facts)
    assert watch.see(step(2.2, facts=facts)) == ()
    limits = limits_of(reading(0.0).state, THRESHOLDS)
    assert not limits_of(reading(0.0).state, THRESHOLDS, regime=1).wrong(facts), "another mixture has another share"
    assert not replace(limits, refuse_nonfinite=False).wrong(facts)
    assert not Limits().wrong(facts)


def test_the_usual_share_is_saved_and_one_that_an_older_state_lacks_starts_afresh() -> None:
    state = reading(0.1).state
    saved = state.to_dict()
    assert DetectorState.from_dict(saved) == state
    del saved["duplicated"]
    assert DetectorState.from_dict(saved).duplicated == DetectorState().duplicated
