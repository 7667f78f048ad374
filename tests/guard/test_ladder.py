"""The ladder: what was found, and what has been spent, to an action."""

import math
from dataclasses import replace
from typing import Any

import pytest

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import ClipHarder, Halt, Investigate, LrEvent, Proceed, Rollback, SkipUpdate
from surefoot.guard.advice import seen
from surefoot.guard.evidence import Diagnosis, Suspect
from surefoot.guard.finding import Finding, Kind, Severity
from surefoot.guard.ladder import (
    Situation,
    accepts_level,
    after_investigation,
    after_refusal,
    after_update,
    said_without_dip,
)
from surefoot.guard.record import PastRollback, Record
from surefoot.guard.retreat import repeats, target
from surefoot.guard.signals import StepSignals

BATCH = 500


def finding(kind: Kind, severity: Severity = "alarm", onset: int = BATCH, **fields: Any) -> Finding:
    numbers: dict[str, Any] = {"value": 8.0, "normal": 2.0} | fields
    return Finding(kind=kind, severity=severity, text=f"{kind} seen", batch_index=BATCH, onset=onset, **numbers)


def situation(
    *findings: Finding, applied: bool = True, loss: float = 2.4, clipped: bool = False, **fields: Any
) -> Situation:
    signals = StepSignals(
        batch_index=BATCH,
        step=480,
        loss=loss,
        gradient_norm=1.0,
        num_targets=4096,
        applied=applied,
        clipped_harder=clipped,
    )
    defaults: dict[str, Any] = {
        "config": GuardConfig(),
        "record": Record(),
        "cause": Diagnosis(cause="optimiser", text="probably the optimiser"),
    }
    return Situation(signals=signals, findings=findings, **(defaults | fields))


def rolled_back(*pairs: tuple[int, int], restored: int = -1) -> Record:
    rollbacks = tuple(PastRollback(at_batch=at, to_batch=to, restored=restored) for at, to in pairs)
    return Record(rollbacks=rollbacks)


# Refused updates

SPIKE = finding("loss_spike")


def refused(skips: int = 1, **fields: Any) -> Situation:
    return situation(SPIKE, applied=False, **({"skips": skips, "rejections": skips} | fields))


@pytest.mark.parametrize(
    ("now", "action"),
    [
        (refused(1), Investigate),
        (refused(2), SkipUpdate),
        (refused(3), Investigate),
        (refused(4), SkipUpdate),
        (refused(19), SkipUpdate),
        (refused(20), Halt),
        (refused(1, record=Record(investigations_at=(1,) * 20)), SkipUpdate),
        (refused(1, record=Record(investigations_at=(1,) * 19)), Investigate),
        (refused(1, config=GuardConfig(max_investigations=0)), SkipUpdate),
        (refused(1, broken="a weight is 300 times its neighbours"), Rollback),
    ],
)
def test_a_refused_update_is_investigated_first_and_when_it_lasts_and_halts_at_the_budget(
    now: Situation, action: type
) -> None:
    assert type(after_refusal(now)) is action


def test_how_long_it_has_lasted_is_said_from_the_second_skipped_step_on() -> None:
    causes = {skips: getattr(after_refusal(refused(skips)), "cause") for skips in (1, 2, 3)}  # noqa: B009
    assert causes[1] == "batch 500: loss_spike seen"
    assert causes[2] == "batch 500: loss_spike seen; skipped step 2 in a row; probably the optimiser"
    assert causes[3] == "batch 500: loss_spike seen; it lasts, 3 skipped steps in a row"
    unasked = after_refusal(refused(1, config=GuardConfig(max_investigations=0)))
    assert unasked == SkipUpdate(cause="batch 500: loss_spike seen; probably the optimiser")


def test_what_the_data_show_by_themselves_is_looked_at_once_and_has_its_own_budget() -> None:
    shown = Diagnosis(cause="data", text="90 % of the targets stand in the input", certain=True)
    for skips, action in (
        (1, Investigate),
        (2, SkipUpdate),
        (3, SkipUpdate),
        (20, SkipUpdate),
        (99, SkipUpdate),
        (100, Halt),
    ):
        found = after_refusal(refused(skips, cause=shown, data_skips=skips))
        assert type(found) is action, skips
    unasked = refused(1, cause=shown, data_skips=1, config=GuardConfig(max_investigations=0))
    first = after_refusal(unasked)
    assert isinstance(first, SkipUpdate)
    assert "90 % of the targets stand in the input" in first.cause
    one_other = after_refusal(refused(20, cause=shown, data_skips=19))
    assert isinstance(one_other, Halt)
    guess = Diagnosis(cause="data", text="probably the data")
    assert isinstance(after_refusal(refused(1, cause=guess)), Investigate)


def test_a_halt_says_what_was_seen_why_and_what_to_do_next() -> None:
    action = after_refusal(refused(20))
    assert isinstance(action, Halt)
    for part in (
        "batch 500: loss_spike seen",
        "20 skipped steps in a row",
        "probably the optimiser",
        "surefoot fork RUN --at STEP",
    ):
        assert part in action.reason


def test_a_level_that_cannot_be_explained_is_accepted_by_guarded_and_halts_strict() -> None:
    strict = GuardConfig(policy="strict")
    assert not accepts_level(refused(7), after_refusal(refused(7)))
    assert accepts_level(refused(8), after_refusal(refused(8)))
    assert not accepts_level(refused(8, rejections=0), after_refusal(refused(8)))
    assert isinstance(after_refusal(refused(7, config=strict)), SkipUpdate)
    halted = after_refusal(refused(8, config=strict))
    assert isinstance(halted, Halt)
    assert "8 finite outliers in a row" in halted.reason
    assert not accepts_level(refused(8), Investigate(cause=""))
    assert not accepts_level(refused(8, broken="yes"), SkipUpdate(cause=""))


# Applied updates


@pytest.mark.parametrize(
    ("findings", "guarded", "strict"),
    [
        ((), Proceed, Proceed),
        ((finding("throughput", "note"),), Proceed, Proceed),
        ((finding("validation", "warning"),), Proceed, Proceed),
        ((finding("frozen_gradient", "warning"),), Proceed, Proceed),
        ((finding("stale_second_moment", "warning"),), Proceed, LrEvent),
        ((finding("embedding_gradient", "warning"),), Proceed, LrEvent),
        ((finding("gradient_creep", "warning"),), Proceed, LrEvent),
        ((finding("logit_drift", "warning"),), Proceed, LrEvent),
        ((finding("attention_growth", "warning"),), Proceed, LrEvent),
        ((finding("attention_growth"),), LrEvent, LrEvent),
        ((finding("entropy_collapse"),), LrEvent, LrEvent),
        ((finding("activation_explosion"),), LrEvent, LrEvent),
        ((finding("slow_spike"),), Rollback, Rollback),
        ((finding("update_size"),), Rollback, Rollback),
        ((finding("optimizer_steps"),), Rollback, Rollback),
        ((finding("nonfinite"),), Rollback, Rollback),
        ((finding("attention_growth"), finding("update_size")), Rollback, Rollback),
        ((finding("misaligned"),), Proceed, Proceed),
        ((finding("too_good", "warning"),), Proceed, Proceed),
    ],
)
def test_what_each_finding_leads_to(findings: tuple[Finding, ...], guarded: type, strict: type) -> None:
    assert type(after_update(situation(*findings))) is guarded
    assert type(after_update(situation(*findings, config=GuardConfig(policy="strict")))) is strict


def test_an_update_clipped_harder_is_said_unless_something_graver_is() -> None:
    action = after_update(situation(finding("gradient_spike", "warning"), clipped=True))
    assert isinstance(action, ClipHarder)
    assert "gradient_spike seen" in action.cause
    assert isinstance(after_update(situation(finding("update_size"), clipped=True)), Rollback)


def test_nothing_finite_in_an_applied_update_goes_back_to_before_it() -> None:
    action = after_update(situation(loss=math.nan))
    assert isinstance(action, Rollback)
    assert action.to_batch == BATCH
    assert "not finite" in action.cause


def test_broken_weights_go_back_beyond_the_last_probe() -> None:
    action = after_update(situation(broken="weights are not finite"))
    assert isinstance(action, Rollback)
    assert action.to_batch == BATCH - 50
    assert "weights are not finite" in action.cause


def test_a_wrong_update_goes_back_to_before_it_and_dips_the_rate_only_when_it_comes_again() -> None:
    bad = finding("update_size", onset=497, value=10.0, normal=1.0)
    first = after_update(situation(bad))
    assert isinstance(first, Rollback)
    assert (first.to_batch, first.lr_event, first.exclude) == (497, None, ())
    again = after_update(situation(bad, record=rolled_back((498, 497))))
    assert isinstance(again, Rollback)
    assert again.to_batch == 497  # the dip must be there when it comes again
    assert again.lr_event is not None
    assert again.lr_event.factor == pytest.approx(0.1)
    assert again.lr_event.settle == 1
    assert "the rate at 10 % for 10 steps" in again.cause


@pytest.mark.parametrize(
    ("value", "factor"), [(3.0, 1 / 3), (1.5, 0.5), (1e9, 0.01), (math.inf, 0.01), (0.2, None), (0.0, None)]
)
def test_the_dip_against_a_wrong_update_is_its_measured_ratio(value: float, factor: float | None) -> None:
    action = after_update(situation(finding("update_size", value=value, normal=1.0), record=rolled_back((499, 495))))
    assert isinstance(action, Rollback)
    assert (action.lr_event.factor if action.lr_event else None) == (pytest.approx(factor) if factor else None)


def test_no_rate_cures_a_wrong_count_of_updates() -> None:
    action = after_update(situation(finding("optimizer_steps"), record=rolled_back((499, 495))))
    assert isinstance(action, Rollback)
    assert action.lr_event is None


def test_a_slow_spike_goes_further_each_time_and_settles_lower_from_the_second_on() -> None:
    slow = finding("slow_spike", onset=400)
    first = after_update(situation(slow))
    assert isinstance(first, Rollback)
    assert first.to_batch == 380
    assert first.lr_event == LrEvent(factor=0.3, hold_steps=20, ramp_steps=50, settle=1.0, cause=first.lr_event.cause)  # type: ignore[union-attr]
    second = after_update(situation(slow, record=rolled_back((490, 380), restored=350)))
    assert isinstance(second, Rollback)
    assert second.to_batch == 490 - 2 * (490 - 350)
    assert second.lr_event is not None
    assert second.lr_event.settle == 0.5
    assert "slow_spike seen" in second.lr_event.cause


def test_a_dip_waits_for_the_one_before_and_stops_at_its_budget() -> None:
    growing = finding("attention_growth")
    action = after_update(situation(growing))
    assert isinstance(action, LrEvent)
    assert (action.factor, action.hold_steps, action.ramp_steps, action.settle) == (0.3, 20, 50, 0.5)
    assert "30 % for 20 steps, then 50 % of what it was" in action.cause
    assert "QK-norm" in action.cause
    for events, expected in (
        ((BATCH - 100,), Proceed),
        ((BATCH - 101,), LrEvent),
        ((BATCH + 30,), Proceed),
        ((1, 2, 3), LrEvent),
        ((1, 2, 3, 4), Proceed),
    ):
        assert type(after_update(situation(growing, record=Record(lr_events_at=events)))) is expected, events
    warned = after_update(situation(finding("logit_drift", "warning"), config=GuardConfig(policy="strict")))
    assert isinstance(warned, LrEvent)
    assert warned.settle == 1
    assert "for 20 steps, then back up" in warned.cause


def test_when_dips_are_spent_the_finding_says_what_else_helps() -> None:
    spent = Record(lr_events_at=(1, 2, 3, 4))
    growing, other = finding("attention_growth"), finding("validation", "warning")
    found = said_without_dip(situation(growing, other, record=spent))
    assert "QK-norm" in found[0].text
    assert found[1] == other
    assert said_without_dip(situation(growing)) == (growing,)
    # A rollback goes on without its dip.
    action = after_update(situation(finding("slow_spike", onset=400), record=spent))
    assert isinstance(action, Rollback)
    assert action.lr_event is None


def test_when_rollbacks_are_spent_the_run_halts_with_what_to_do_next() -> None:
    four = rolled_back((10, 5), (20, 15), (30, 25), (40, 35))
    action = after_update(situation(finding("update_size"), record=four))
    assert isinstance(action, Halt)
    for part in ("update_size seen", "4 rollbacks did not cure it", "a lower optim.lr"):
        assert part in action.reason
    assert isinstance(after_update(situation(finding("update_size"), record=rolled_back((10, 5)))), Rollback)
    never = after_update(situation(finding("update_size"), config=GuardConfig(max_rollbacks=0)))
    assert isinstance(never, Halt)
    assert "guard.max_rollbacks=0" in never.reason


# How far back


@pytest.mark.parametrize(
    ("rollbacks", "count"),
    [
        ((), 0),
        (((450, 440),), 1),
        (((400, 390),), 1),
        (((399, 390),), 0),
        (((300, 290), (399, 390), (450, 440)), 3),
        (((200, 190), (399, 390), (450, 440)), 2),
        (((520, 300),), 1),
    ],
)
def test_a_repeat_is_within_the_cooldown_of_where_the_trouble_was_last_seen(
    rollbacks: tuple[tuple[int, int], ...], count: int
) -> None:
    assert repeats(rolled_back(*rollbacks), BATCH, 100) == count


def test_each_repeat_goes_at_least_twice_as_far_as_the_state_the_last_one_got() -> None:
    assert target(Record(), 500, 490, 100) == 490
    assert target(Record(), 500, 600, 100) == 500
    assert target(Record(), 5, -15, 100) == 0
    assert target(rolled_back((500, 490)), 500, 490, 100) == 480
    assert target(rolled_back((500, 490), restored=450), 500, 490, 100) == 400
    assert target(rolled_back((500, 490), restored=450), 510, 300, 100) == 300
    assert target(rolled_back((500, 500)), 500, 500, 100) == 498
    assert target(rolled_back((300, 200)), 500, 490, 100) == 490
    assert target(rolled_back((500, 490)), 495, 490, 100) == 475


# After an investigation


def suspect(name: str = "0123456789abcdef") -> Suspect:
    return Suspect(
        document=name,
        domain="web",
        row=3,
        loss=9.0,
        z=37.0,
        repetition=1.0,
        entropy=0.0,
        compression=0.02,
        reasons=("loss 9.00 nats where 2.41 is normal for web (+37 sigma)",),
        text="MMMM\nMMMM",
    )


def concluded(cause: Any, broken: bool = False, suspects: tuple[Suspect, ...] = (), **fields: Any) -> Situation:
    found = Diagnosis(cause=cause, text="here is why", suspects=suspects, state_is_broken=broken)
    return refused(**({"skips": 1} | fields), cause=found)


def test_bad_documents_are_skipped_by_name_with_why_and_how_they_begin() -> None:
    action = after_investigation(concluded("data", suspects=(suspect(), suspect("f" * 16))))
    assert isinstance(action, SkipUpdate)
    for part in (
        "batch 500: loss_spike seen",
        "here is why",
        "0123456789abcdef of web",
        "+37 sigma",
        "'MMMM MMMM'",
        "and 1 more",
    ):
        assert part in action.cause
    assert not action.cause.endswith(".")


@pytest.mark.parametrize(
    ("cause", "advice"), [("hardware", "surefoot doctor"), ("numerics", "fp32"), ("unknown", "surefoot report RUN")]
)
def test_other_causes_with_whole_weights_are_skipped_with_advice(cause: str, advice: str) -> None:
    action = after_investigation(concluded(cause))
    assert isinstance(action, SkipUpdate)
    assert advice in action.cause
    assert not action.cause.endswith(".")


def test_strict_halts_on_hardware_that_fails_now_and_then() -> None:
    strict = GuardConfig(policy="strict")
    action = after_investigation(concluded("hardware", config=strict))
    assert isinstance(action, Halt)
    assert isinstance(after_investigation(concluded("data", config=strict)), SkipUpdate)


@pytest.mark.parametrize(
    ("cause", "skips", "onset", "to_batch"),
    [("hardware", 1, 500, 497), ("hardware", 3, 500, 495), ("optimiser", 1, 500, 479), ("optimiser", 1, 450, 430)],
)
def test_a_broken_state_goes_back_to_before_the_last_applied_update(
    cause: str, skips: int, onset: int, to_batch: int
) -> None:
    now = concluded(cause, broken=True, skips=skips)
    action = after_investigation(replace(now, findings=(replace(SPIKE, onset=onset),)))
    assert isinstance(action, Rollback)
    assert (action.to_batch, action.exclude, action.lr_event) == (to_batch, (), None)
    assert action.to_batch < BATCH - skips


def test_a_state_the_optimiser_broke_again_goes_deeper_with_a_dip_that_settles_lower_the_third_time() -> None:
    again = after_investigation(concluded("optimiser", broken=True, record=rolled_back((495, 470))))
    assert isinstance(again, Rollback)
    assert again.to_batch == 445
    assert again.lr_event is not None
    assert again.lr_event.settle == 1
    third = after_investigation(concluded("optimiser", broken=True, record=rolled_back((495, 470), (498, 430))))
    assert isinstance(third, Rollback)
    assert third.to_batch == 498 - 2 * 68
    assert third.lr_event is not None
    assert third.lr_event.settle == 0.5
    hardware = after_investigation(concluded("hardware", broken=True, record=rolled_back((495, 470))))
    assert isinstance(hardware, Rollback)
    assert hardware.lr_event is None


def test_the_margin_doubles_with_each_repeat() -> None:
    shallow = ((495, 494), (498, 497))
    for count, to_batch in ((0, 479), (1, 459), (2, 419)):
        record = rolled_back(*shallow[:count])
        action = after_investigation(concluded("optimiser", broken=True, record=record))
        assert isinstance(action, Rollback)
        assert action.to_batch == to_batch
    known = after_refusal(refused(2, broken="a weight is 300 times its neighbours"))
    assert isinstance(known, Rollback)
    assert known.to_batch == 498


def test_a_dip_that_must_wait_hides_nothing_else() -> None:
    """Inside the cool-down of the last dip a gradient that was scaled down is still told of."""
    grown = finding("attention_growth")
    now = situation(grown, record=Record(lr_events_at=(BATCH - 10,)), clipped=True)
    assert isinstance(after_update(now), ClipHarder)


def test_an_applied_update_that_was_looked_into_cannot_be_skipped() -> None:
    now = situation(finding("too_good"), cause=Diagnosis(cause="data", text="read twice", certain=True))
    assert after_investigation(now) == Proceed()


# Words


def test_what_was_seen_is_the_two_gravest_findings_or_the_bare_numbers() -> None:
    now = situation(finding("validation", "warning"), finding("throughput", "note"), finding("slow_spike"))
    assert now.seen == "batch 500: slow_spike seen; validation seen"
    assert situation().seen == "batch 500: loss 2.4 nats, gradient norm 1"
    assert situation(loss=math.nan).seen == "batch 500: loss nan nats, gradient norm 1, not finite"
    told = replace(SPIKE, text="batch 500: loss 8 nats")
    assert seen(now.signals, (told, told)) == "batch 500: loss 8 nats"
    large = replace(situation().signals, document_loss_max=9.5)
    assert seen(large, ()) == "batch 500: loss 2.4 nats, gradient norm 1, largest document loss 9.5 nats"
