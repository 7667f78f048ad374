"""The guard: counters, verdicts and what they are made of, with findings given by hand; a few with the real detectors."""

import json
import math
import random
from dataclasses import replace
from typing import Any, get_args

import pytest

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import ClipHarder, Halt, Investigate, LrEvent, Proceed, Rollback, SkipUpdate
from surefoot.guard.detectors import Detected, DetectorState, Scores, accept_level, limits_of
from surefoot.guard.evidence import Evidence, PassResult, Suspect
from surefoot.guard.finding import Finding, Kind, Severity
from surefoot.guard.guard import (
    GuardState,
    Verdict,
    action_name,
    conclude,
    decide,
    judge,
    judge_evaluation,
    limits,
    verdict_digest,
)
from surefoot.guard.limits import Limits
from surefoot.guard.record import PastRollback, Record
from surefoot.guard.signals import BatchFacts, DomainStats, EvalSignals, ProbeSignals, StepSignals

GUARDED, OBSERVE, STRICT = GuardConfig(), GuardConfig(policy="observe"), GuardConfig(policy="strict")
BATCH = 41


def signals(loss: float = 2.0, gradient_norm: float = 1.0, **fields: Any) -> StepSignals:
    known: dict[str, Any] = {"batch_index": BATCH, "step": 40, "num_targets": 100}
    return StepSignals(loss=loss, gradient_norm=gradient_norm, **(known | fields))


def finding(kind: Kind = "loss_spike", severity: Severity = "alarm", **fields: Any) -> Finding:
    known: dict[str, Any] = {"batch_index": BATCH, "onset": BATCH, "value": 8.0, "normal": 2.0}
    return Finding(kind=kind, severity=severity, text=f"{kind} seen", **(known | fields))


def decided(
    state: GuardState, *findings: Finding, config: GuardConfig = GUARDED, record: Record | None = None, **fields: Any
) -> Verdict:
    detected = Detected(DetectorState(batch_index=7), findings, Scores(expected_loss=2.0))
    return decide(state, signals(**fields), detected, config, record or Record())


# Counters


def test_a_healthy_step_counts_and_clears_what_was_skipped() -> None:
    before = GuardState(consecutive_skips=3, healthy_batches=0, data_skips=2, rejections=1)
    verdict = decided(before)
    assert verdict.action == Proceed()
    assert verdict.state == GuardState(healthy_batches=1, detectors=DetectorState(batch_index=7))
    assert verdict.diagnosis is None
    assert decided(GuardState(healthy_batches=9)).state.healthy_batches == 10


def test_a_refused_step_changes_only_the_counters_and_the_detectors() -> None:
    before = GuardState(consecutive_skips=3, healthy_batches=9, data_skips=1, rejections=2)
    verdict = decided(before, finding(), applied=False)
    assert verdict.state == GuardState(
        consecutive_skips=4, healthy_batches=0, data_skips=1, rejections=3, detectors=DetectorState(batch_index=7)
    )


@pytest.mark.parametrize(
    ("fields", "findings", "data_skips", "rejections"),
    [
        ({}, (finding(),), 0, 3),
        ({"loss": math.nan}, (finding("nonfinite"),), 0, 0),
        ({"gradient_norm": math.inf}, (), 0, 0),
        ({"facts": BatchFacts(misaligned=0.5)}, (finding("misaligned"),), 1, 0),
        ({"facts": BatchFacts(copied=0.9)}, (finding("too_good"),), 1, 0),
        ({"facts": BatchFacts(repeated=0.5)}, (finding("document_spike", where="repeated"),), 1, 0),
        ({"facts": BatchFacts(repeated=0.5)}, (finding("document_spike"),), 0, 3),
        ({"facts": BatchFacts(repeated=0.5)}, (), 0, 3),
    ],
)
def test_skips_are_told_apart_by_what_shows_the_data_at_fault(
    fields: dict[str, Any], findings: tuple[Finding, ...], data_skips: int, rejections: int
) -> None:
    after = decided(GuardState(rejections=2), *findings, applied=False, **fields).state
    assert (after.data_skips, after.rejections) == (data_skips, rejections)


@pytest.mark.parametrize(("severity", "healthy"), [("alarm", 0), ("warning", 10), ("note", 10)])
def test_no_checkpoint_is_certified_across_an_alarm(severity: Severity, healthy: int) -> None:
    for config in (GUARDED, OBSERVE):
        verdict = decided(GuardState(healthy_batches=9), finding("attention_growth", severity), config=config)
        assert verdict.state.healthy_batches == healthy


def test_a_batch_without_targets_changes_nothing() -> None:
    before = GuardState(consecutive_skips=2, healthy_batches=0)
    verdict = judge(before, signals(math.nan, math.nan, num_targets=0, applied=False), GUARDED, Record())
    assert verdict == Verdict(state=before, action=Proceed())


# Verdicts


def test_observe_says_everything_and_does_nothing() -> None:
    assert limits(GuardState(), OBSERVE) == Limits(refuse_nonfinite=False)
    for kind in get_args(Kind):
        verdict = decided(GuardState(), finding(kind), config=OBSERVE)
        assert verdict.action == Proceed()
        assert verdict.findings == (finding(kind),)
        assert verdict.diagnosis is not None
        assert verdict.state.consecutive_skips == 0
    assert decided(GuardState(), config=OBSERVE, loss=math.nan).state.healthy_batches == 0


def test_the_others_refuse_what_is_not_finite() -> None:
    state = GuardState()
    assert limits(state, GUARDED) == limits(state, STRICT) == limits_of(state.detectors, GUARDED.thresholds)
    assert limits(state, GUARDED).refuse_nonfinite


def test_every_action_but_proceed_carries_a_diagnosis() -> None:
    optimisers: tuple[Kind, ...] = ("update_size", "slow_spike", "attention_growth")
    for kind in optimisers:
        verdict = decided(GuardState(), finding(kind))
        assert verdict.diagnosis is not None
        assert verdict.diagnosis.cause == "optimiser"
    skipped = decided(GuardState(), finding("misaligned"), applied=False, facts=BatchFacts(misaligned=0.5))
    assert isinstance(skipped.action, SkipUpdate)
    assert skipped.diagnosis is not None
    assert (skipped.diagnosis.cause, skipped.diagnosis.certain) == ("data", True)
    said = decided(GuardState(), finding("validation", "warning"))
    assert said.action == Proceed()
    assert said.diagnosis is not None
    assert decided(GuardState(), finding("throughput", "note")).diagnosis is None


def test_weights_that_a_finding_or_a_probe_shows_broken_are_the_hardware_and_go_back() -> None:
    for broken in (finding("nonfinite", where="weights"), finding("activation_explosion", where="hidden")):
        verdict = decided(GuardState(), broken)
        assert isinstance(verdict.action, Rollback)
        assert verdict.diagnosis is not None
        assert (verdict.diagnosis.cause, verdict.diagnosis.state_is_broken) == ("hardware", True)
    layer = decided(GuardState(), finding("activation_explosion", where="layer 2"))
    assert isinstance(layer.action, LrEvent)
    probe = ProbeSignals(step=40, weights_finite=False)
    detected = Detected(DetectorState(), (), Scores())
    verdict = decide(GuardState(), signals(), detected, GUARDED, Record(), probe)
    assert isinstance(verdict.action, Rollback)
    assert decide(GuardState(), signals(), detected, OBSERVE, Record(), probe).action == Proceed()


def test_a_level_shift_is_accepted_aloud_after_its_rejections_also_where_nothing_is_refused() -> None:
    for config, applied in ((GUARDED, False), (OBSERVE, True), (GUARDED, True)):
        state = GuardState(consecutive_skips=0 if applied else 7, rejections=7)
        verdict = decided(state, finding(), config=config, applied=applied)
        assert isinstance(verdict.action, Proceed if applied else SkipUpdate)
        assert [f.kind for f in verdict.findings] == ["loss_spike", "level_shift"]
        assert verdict.state.rejections == 0
        shift = verdict.findings[-1]
        assert (shift.onset, shift.value, shift.normal) == (BATCH - 7, 2.0, 2.0)
        assert "8 finite outliers in a row" in shift.text
    refused = decided(GuardState(consecutive_skips=7, rejections=7), finding(), applied=False)
    assert isinstance(refused.action, SkipUpdate)
    assert "new normal" in refused.action.cause
    strict = decided(GuardState(consecutive_skips=7, rejections=7), finding(), applied=False, config=STRICT)
    assert isinstance(strict.action, Halt)
    assert "level_shift" not in [f.kind for f in strict.findings]


def test_accepting_a_level_is_handed_to_the_detectors() -> None:
    spiked = Detected(DetectorState(), (finding(),), Scores())
    for _ in range(8):
        seen = replace(spiked.state, loss=spiked.state.loss.reject(8.0))
        spiked = replace(spiked, state=seen)
    verdict = decide(
        GuardState(consecutive_skips=7, rejections=7), signals(8.0, applied=False), spiked, GUARDED, Record()
    )
    assert verdict.state.detectors == accept_level(spiked.state) != spiked.state


def test_findings_say_what_else_helps_once_the_dips_are_spent() -> None:
    spent = Record(lr_events_at=(1, 2, 3, 4))
    verdict = decided(GuardState(), finding("attention_growth"), record=spent)
    assert verdict.action == Proceed()
    assert "QK-norm" in verdict.findings[0].text


def test_a_lasting_refusal_goes_through_the_ladder_and_halts() -> None:
    state, seen = GuardState(), []
    for _ in range(20):
        verdict = decided(state, finding("nonfinite"), loss=math.nan, applied=False)
        state = verdict.state
        seen.append(action_name(verdict.action))
    assert seen == ["investigate", "skip", "investigate", *["skip"] * 16, "halt"]


# After an investigation


def suspect() -> Suspect:
    return Suspect(
        document="d" * 16,
        domain="web",
        row=3,
        loss=9.0,
        z=20.0,
        repetition=1.0,
        entropy=0.0,
        compression=0.02,
        reasons=("odd",),
        text="MMMM",
    )


def evidence(*results: PassResult, applied: bool = False, **fields: Any) -> Evidence:
    given = signals(8.0, applied=applied, facts=fields.pop("facts", BatchFacts()))
    return Evidence(signals=given, findings=(finding(),), expected_loss=2.0, results=results, **fields)


SAME = PassResult(kind="same_batch", loss=8.0, gradient_norm=1.0, same_bits=True, excess=6.0)
CURED = PassResult(kind="without_suspects", loss=2.0, gradient_norm=1.0)
SICK = PassResult(kind="healthy_batch", loss=4.0, gradient_norm=1.0, excess=2.0)
HEALTHY = PassResult(kind="healthy_batch", loss=2.0, gradient_norm=1.0)
AFTER = GuardState(consecutive_skips=2, data_skips=1, rejections=2)


def test_a_batch_shown_to_be_the_datas_fault_counts_as_such_and_no_longer_as_an_outlier() -> None:
    skips = replace(GUARDED, max_exclusions=0)
    verdict = conclude(AFTER, evidence(SAME, CURED, suspects=(suspect(),)), skips, Record())
    assert isinstance(verdict.action, SkipUpdate)
    assert "d" * 16 in verdict.action.cause
    assert verdict.state == GuardState(consecutive_skips=2, data_skips=2, rejections=0)
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.suspects == (suspect(),)
    guess = conclude(AFTER, evidence(SAME, HEALTHY), GUARDED, Record())
    assert isinstance(guess.action, SkipUpdate)
    assert guess.state == AFTER


def test_a_batch_that_one_document_alone_has_spoilt_is_read_again_without_it_once() -> None:
    seen = evidence(SAME, CURED, suspects=(suspect(),))
    batch = seen.signals.batch_index
    action = conclude(AFTER, seen, GUARDED, Record()).action
    assert isinstance(action, Rollback)
    assert (action.to_batch, action.exclude, action.lr_event) == (batch, ("d" * 16,), None)
    assert "read again without it" in action.cause
    for spent in (Record(exclusions_at=(batch,)), Record(num_excluded=GUARDED.max_exclusions)):
        assert isinstance(conclude(AFTER, seen, GUARDED, spent).action, SkipUpdate)
    elsewhere = Record(exclusions_at=(batch - 1,), num_excluded=GUARDED.max_exclusions - 1)
    assert isinstance(conclude(AFTER, seen, GUARDED, elsewhere).action, Rollback)
    not_alone = evidence(SAME, replace(CURED, loss=7.0, excess=5.0), HEALTHY, suspects=(suspect(),))
    assert isinstance(conclude(AFTER, not_alone, GUARDED, Record()).action, SkipUpdate)


def test_what_the_tokens_show_is_counted_once() -> None:
    leaked = replace(evidence(facts=BatchFacts(copied=0.9)), findings=(finding(where="copied"),))
    judged = decided(GuardState(), finding(where="copied"), applied=False, facts=BatchFacts(copied=0.9))
    assert judged.state.data_skips == 1
    assert isinstance(judged.action, Investigate)  # which documents it was, no more
    concluded = conclude(judged.state, leaked, GUARDED, Record())
    assert isinstance(concluded.action, SkipUpdate)
    assert concluded.state.data_skips == 1


def test_a_broken_state_is_rolled_back_and_halts_when_rollbacks_are_spent() -> None:
    sick = evidence(SAME, SICK)
    verdict = conclude(GuardState(consecutive_skips=2), sick, GUARDED, Record())
    assert isinstance(verdict.action, Rollback)
    assert verdict.action.to_batch == 37
    spent = Record(rollbacks=tuple(PastRollback(at_batch=n, to_batch=n) for n in range(4)))
    assert isinstance(conclude(GuardState(consecutive_skips=2), sick, GUARDED, spent).action, Halt)


def test_an_applied_update_is_never_skipped_after_the_fact() -> None:
    for given in (evidence(applied=True),):
        verdict = conclude(GuardState(healthy_batches=4), given, GUARDED, Record())
        assert verdict.action == Proceed()
        assert verdict.state == GuardState(healthy_batches=4)
        assert verdict.diagnosis is not None
        assert verdict.diagnosis.cause == "data"


# The real detectors


def test_held_out_losses_give_findings_and_no_action() -> None:
    state = GuardState(healthy_batches=3)
    for step, loss in enumerate((2.0, 1.9, 3.0, 3.1, 3.2)):
        verdict = judge_evaluation(state, EvalSignals(step=10 * step, losses=(("web", loss),)), GUARDED)
        assert verdict.action == Proceed()
        state = verdict.state
    assert state.healthy_batches == 3
    assert state.detectors != DetectorState()


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf), (-math.inf, math.nan)]
)
def test_what_is_not_finite_is_investigated_and_named(loss: float, norm: float) -> None:
    verdict = judge(GuardState(healthy_batches=9), signals(loss, norm, applied=False), GUARDED, Record())
    assert isinstance(verdict.action, Investigate)
    assert f"batch {BATCH}" in verdict.action.cause
    assert verdict.state.consecutive_skips == 1
    assert verdict.state.rejections == 0


def run_of(seed: int, config: GuardConfig, batches: int = 160) -> list[Verdict]:
    """A run with spikes, NaN, a leak and missing values, judged batch by batch under the limits of the state."""
    rng = random.Random(seed)
    state, verdicts, step = GuardState(), [], 0
    for batch in range(batches):
        loss, norm = 4.0 - 0.01 * batch + rng.gauss(0, 0.02), math.exp(rng.gauss(0, 0.1))
        odd = rng.random()
        if batch > 40 and odd < 0.05:
            loss = rng.choice((math.nan, math.inf, 9.0, 0.1))
        elif batch > 40 and odd < 0.1:
            norm *= rng.choice((3.0, 100.0, math.nan))
        facts = BatchFacts(copied=0.9) if odd > 0.97 else BatchFacts(copied=0.03)
        allowed = limits(state, config)
        beyond = loss > allowed.loss or norm > allowed.gradient_norm
        refused = beyond or (allowed.refuse_nonfinite and not (math.isfinite(loss) and math.isfinite(norm)))
        step += not refused
        given = StepSignals(
            batch_index=batch,
            step=step,
            loss=loss,
            gradient_norm=norm,
            num_targets=1000,
            applied=not refused,
            lr=1e-3,
            facts=facts,
            document_loss_max=loss + 1 if odd < 0.5 else math.nan,
            domains=(DomainStats(name="web", num_documents=8, mean=loss, mean_square=loss**2 + 0.1),),
            update_size=0.0 if refused else 1e-4,
            optimizer_steps=step,
        )
        probe = ProbeSignals(step=step, beta2=0.95) if batch % 50 == 49 else None
        verdict = judge(state, given, config, Record(), probe, 1000)
        again = judge(
            GuardState.from_dict(json.loads(json.dumps(state.to_dict()))), given, config, Record(), probe, 1000
        )
        assert repr(again) == repr(verdict)
        assert verdict_digest(again) == verdict_digest(verdict) < 2**48
        state = verdict.state
        verdicts.append(verdict)
    return verdicts


@pytest.mark.parametrize("config", [GUARDED, OBSERVE, STRICT], ids=["guarded", "observe", "strict"])
@pytest.mark.parametrize("seed", range(4))
def test_judging_is_pure_repeats_itself_and_survives_json_at_every_batch(seed: int, config: GuardConfig) -> None:
    verdicts = run_of(seed, config)
    assert any(v.findings for v in verdicts)
    for verdict in verdicts:
        json.dumps([f.to_dict() for f in verdict.findings])
        assert (verdict.diagnosis is None) <= (verdict.action == Proceed())
        if config.policy == "observe":
            assert verdict.action == Proceed()


def test_a_saved_state_from_before_there_were_detectors_starts_them_afresh() -> None:
    state = GuardState(consecutive_skips=2, healthy_batches=7, data_skips=1, rejections=1)
    assert GuardState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert GuardState.from_dict({"consecutive_skips": 2, "healthy_batches": 7}) == GuardState(
        consecutive_skips=2, healthy_batches=7
    )


# What ranks compare


def test_the_digest_covers_action_findings_and_state() -> None:
    plain = Verdict(state=GuardState(), action=Proceed(), findings=(finding(),))
    others = [
        replace(plain, action=SkipUpdate(cause="")),
        replace(plain, action=ClipHarder(cause="")),
        replace(plain, findings=()),
        replace(plain, findings=(finding(value=8.000000000000002),)),
        replace(plain, state=GuardState(healthy_batches=1)),
        replace(plain, state=GuardState(detectors=DetectorState(batch_index=1))),
    ]
    digests = [verdict_digest(v) for v in (plain, *others)]
    assert len(set(digests)) == len(digests)
    assert all(0 <= d < 2**48 for d in digests)
    assert verdict_digest(replace(plain)) == digests[0]


def test_every_action_has_the_name_that_ledger_rows_use() -> None:
    dip = LrEvent(factor=0.3, hold_steps=1, ramp_steps=1, settle=1.0, cause="")
    back = Rollback(to_batch=1, cause="")
    actions = (Proceed(), ClipHarder(cause=""), SkipUpdate(cause=""), Investigate(cause=""), dip, back, Halt(reason=""))
    assert [action_name(action) for action in actions] == [
        "proceed",
        "clip_harder",
        "skip",
        "investigate",
        "lr_event",
        "rollback",
        "halt",
    ]
