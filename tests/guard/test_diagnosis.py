"""Diagnosis: which pass is worth taking, and what the passes say."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest

from surefoot.guard.diagnosis import CAUSES, accused, cause_of, diagnose, differs, next_pass, shown_by_tokens
from surefoot.guard.evidence import Diagnosis, Evidence, PassKind, PassResult, Suspect
from surefoot.guard.finding import Finding, Kind, Severity
from surefoot.guard.limits import LEAKED
from surefoot.guard.signals import BatchFacts, ProbeSignals, RoleProbe, StepSignals

BATCH, EXPECTED, LOSS, NORM = 120, 2.4, 8.0, 0.9


def finding(kind: Kind, severity: Severity = "alarm", onset: int = BATCH, where: str = "", **fields: Any) -> Finding:
    numbers: dict[str, Any] = {"value": 8.0, "normal": 2.4} | fields
    return Finding(
        kind=kind, severity=severity, text=f"{kind} seen", batch_index=BATCH, onset=onset, where=where, **numbers
    )


def suspect(name: str = "d" * 16, z: float = 20.0, loss: float = 9.0) -> Suspect:
    return Suspect(
        document=name,
        domain="web",
        row=3,
        loss=loss,
        z=z,
        repetition=0.0,
        entropy=7.0,
        compression=0.8,
        reasons=("it is odd",),
        text="MMMM",
    )


def evidence(*results: PassResult, loss: float = LOSS, norm: float = NORM, **fields: Any) -> Evidence:
    signals = StepSignals(
        batch_index=BATCH,
        step=110,
        loss=loss,
        gradient_norm=norm,
        num_targets=4096,
        applied=fields.pop("applied", False),
        facts=fields.pop("facts", BatchFacts()),
    )
    facts = signals.facts
    odd = "copied" if facts.copied > LEAKED else "repeated" if facts.repeated > 0 else ""
    found = fields.pop("findings", (finding("loss_spike", where=odd),))
    return Evidence(signals=signals, findings=found, expected_loss=EXPECTED, results=results, **fields)


def result(kind: PassKind, loss: float = EXPECTED, norm: float = NORM, **fields: Any) -> PassResult:
    excess = loss - EXPECTED if math.isfinite(loss) else 0.0
    return PassResult(kind=kind, loss=loss, gradient_norm=norm, **({"excess": excess} | fields))


SAME = result("same_batch", LOSS, same_bits=True)
OTHER = result("same_batch", EXPECTED)
HEALTHY = result("healthy_batch", 2.3)
SICK = result("healthy_batch", 3.1)
WITHOUT = result("without_suspects", 2.5)
IN_VAIN = result("without_suspects", 7.0)
FULL = result("full_precision")
FULL_IN_VAIN = result("full_precision", math.nan, math.nan)
FIRST_BAD, SECOND_BAD = result("first_half", 8.0), result("second_half", 8.0)
FIRST_FINE, SECOND_FINE = result("first_half"), result("second_half")

Answer = tuple[list[PassKind], str, bool, bool]
"""Passes taken, cause, state broken, certain."""


def ask(given: Evidence, answers: list[PassResult], budget: int = 3) -> tuple[list[PassKind], Diagnosis]:
    """Take the passes that are asked for, with these answers."""
    known = {answer.kind: answer for answer in answers}
    taken: list[PassKind] = []
    while (kind := next_pass(given, budget)) is not None:
        taken.append(kind)
        given = replace(given, results=(*given.results, known[kind]))
    return taken, diagnose(given)


TABLE: list[tuple[str, Evidence, list[PassResult], Answer]] = [
    ("it does not repeat", evidence(), [OTHER], (["same_batch"], "hardware", False, True)),
    (
        "a bad document",
        evidence(suspects=(suspect(),)),
        [SAME, WITHOUT],
        (["same_batch", "without_suspects"], "data", False, True),
    ),
    (
        "a broken state, suspects or not",
        evidence(suspects=(suspect(),)),
        [SAME, IN_VAIN, SICK],
        (["same_batch", "without_suspects", "healthy_batch"], "hardware", True, True),
    ),
    (
        "a broken state that built up",
        evidence(findings=(finding("loss_spike"), finding("gradient_spike", onset=BATCH - 5, value=0.0))),
        [SAME, SICK],
        (["same_batch", "healthy_batch"], "optimiser", True, True),
    ),
    (
        "a broken state after wrong updates",
        evidence(findings=(finding("loss_spike"), finding("update_size"))),
        [SAME, SICK],
        (["same_batch", "healthy_batch"], "optimiser", True, True),
    ),
    (
        "a whole batch",
        evidence(),
        [SAME, HEALTHY, FIRST_BAD, SECOND_BAD],
        (["same_batch", "healthy_batch", "first_half"], "data", False, False),
    ),
    (
        "overflow",
        evidence(loss=math.nan, norm=math.nan, findings=(finding("nonfinite"),), low_precision=True),
        [replace(SAME, loss=math.nan), HEALTHY, FULL],
        (["same_batch", "healthy_batch", "full_precision"], "numerics", False, True),
    ),
    (
        "not finite in fp32 either",
        evidence(loss=math.nan, norm=math.nan, findings=(finding("nonfinite"),), low_precision=True),
        [replace(SAME, loss=math.nan), HEALTHY, FULL_IN_VAIN],
        (["same_batch", "healthy_batch", "full_precision"], "data", False, False),
    ),
    (
        "a suspect that is not alone",
        evidence(suspects=(suspect(),)),
        [SAME, IN_VAIN, HEALTHY],
        (["same_batch", "without_suspects", "healthy_batch"], "data", False, False),
    ),
    ("misaligned", evidence(facts=BatchFacts(misaligned=0.9)), [], ([], "data", False, True)),
    ("leaked", evidence(facts=BatchFacts(copied=0.9)), [], ([], "data", False, True)),
    ("flooded", evidence(facts=BatchFacts(repeated=0.3)), [], ([], "data", False, True)),
    (
        "weights not finite",
        evidence(probe=ProbeSignals(step=110, weights_finite=False)),
        [],
        ([], "hardware", True, True),
    ),
]


@pytest.mark.parametrize(("given", "answers", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_three_passes_settle_the_common_cases(given: Evidence, answers: list[PassResult], expected: Answer) -> None:
    taken, found = ask(given, answers)
    assert (taken, found.cause, found.state_is_broken, found.certain) == expected
    assert found.text
    assert not found.text.endswith(".")


@pytest.mark.parametrize("budget", [0, 1, 2])
@pytest.mark.parametrize(("given", "answers"), [row[1:3] for row in TABLE], ids=[row[0] for row in TABLE])
def test_no_more_passes_than_the_budget_and_always_a_diagnosis(
    given: Evidence, answers: list[PassResult], budget: int
) -> None:
    taken, found = ask(given, answers, budget)
    assert len(taken) <= budget
    assert found.cause != "unknown"


def test_with_more_passes_both_halves_are_tried_and_full_precision_before_them() -> None:
    taken, found = ask(evidence(), [SAME, HEALTHY, FIRST_BAD, SECOND_FINE], 6)
    assert taken == ["same_batch", "healthy_batch", "first_half", "second_half"]
    assert "in the first half" in found.text
    assert "either half is bad alone" in ask(evidence(), [SAME, HEALTHY, FIRST_BAD, SECOND_BAD], 6)[1].text
    taken, found = ask(evidence(), [SAME, HEALTHY, FIRST_FINE], 6)
    assert taken == ["same_batch", "healthy_batch", "first_half"]
    assert "in the second half" in found.text
    odd_gradient = evidence(
        findings=(finding("gradient_spike", value=90.0, normal=0.9),), norm=90.0, loss=2.4, low_precision=True
    )
    same = replace(SAME, loss=2.4, gradient_norm=90.0)
    bad = replace(FULL, gradient_norm=80.0)
    taken, _ = ask(odd_gradient, [same, HEALTHY, bad, FIRST_FINE], 6)
    assert taken == ["same_batch", "healthy_batch", "full_precision", "first_half"]


def test_suspects_that_are_not_alone_are_not_looked_for_in_halves() -> None:
    taken, _ = ask(evidence(suspects=(suspect(),)), [SAME, IN_VAIN, HEALTHY], 6)
    assert taken == ["same_batch", "without_suspects", "healthy_batch"]
    bad = evidence(loss=math.nan, findings=(finding("nonfinite"),), low_precision=True)
    taken, _ = ask(bad, [replace(SAME, loss=math.nan), HEALTHY, FULL], 6)
    assert taken[-1] == "full_precision"


def test_a_high_loss_is_not_computed_again_in_full_precision() -> None:
    taken, _ = ask(evidence(low_precision=True), [SAME, HEALTHY, FIRST_FINE])
    assert "full_precision" not in taken


def test_after_an_applied_update_no_pass_is_worth_taking() -> None:
    assert next_pass(evidence(applied=True), 3) is None


def test_the_suspects_that_did_it_are_named_and_only_those() -> None:
    bystander = suspect("e" * 16, z=1.0, loss=2.5)
    _, found = ask(evidence(suspects=(suspect(), bystander)), [SAME, WITHOUT])
    assert [s.document for s in found.suspects] == ["d" * 16]
    assert "without one document" in found.text
    assert next_pass(evidence(SAME, suspects=(bystander,)), 3) == "healthy_batch"
    assert next_pass(evidence(SAME, suspects=(suspect(z=math.inf, loss=math.nan),)), 3) == "without_suspects"
    assert next_pass(evidence(SAME, suspects=(suspect(z=-5.0, loss=0.1),)), 3) == "without_suspects"


@pytest.mark.parametrize(
    ("was", "now", "same_bits", "noise", "expected"),
    [
        ((8.0, 0.9), (8.0, 0.9), True, 0.0, False),
        ((8.0, 0.9), (8.0, 0.9000001), False, 0.0, True),
        ((8.0, 0.9), (8.0, 0.9000001), False, 1e-6, False),
        ((8.0, 0.9), (8.0, 0.91), False, 1e-3, True),
        ((8.0, 0.9), (8.0, 0.9045), False, 1e-3, True),
        ((8.0, 0.9), (8.1, 0.9), False, 1e-3, True),
        ((8.0, 800.0), (8.0, 801.0), False, 1e-3, False),
        ((math.nan, math.nan), (math.nan, math.nan), False, 0.0, False),
        ((math.nan, math.nan), (2.4, math.nan), False, 0.0, True),
        ((math.inf, 0.9), (2.4, 0.9), False, 0.1, True),
        ((8.0, 0.9), (8.0, math.nan), False, 0.1, True),
        ((0.0, 0.0), (0.0, 0.0), False, 0.0, False),
    ],
)
def test_a_repeated_pass_differs_when_noise_does_not_explain_it(
    was: tuple[float, float], now: tuple[float, float], same_bits: bool, noise: float, expected: bool
) -> None:
    given = evidence(loss=was[0], norm=was[1], noise=noise)
    assert differs(result("same_batch", now[0], now[1], same_bits=same_bits), given) is expected


@pytest.mark.parametrize(
    ("without", "data"),
    [
        (result("without_suspects", 2.5), True),
        (result("without_suspects", 3.7), True),  # a quarter of the excess of 5.6 is left
        (result("without_suspects", 3.9), False),
        (result("without_suspects", math.nan), False),
        (result("without_suspects", 2.5, math.inf), False),
    ],
)
def test_cured_is_finite_with_most_of_the_excess_gone(without: PassResult, data: bool) -> None:
    found = diagnose(evidence(SAME, without, HEALTHY, suspects=(suspect(),)))
    assert found.certain is data


@pytest.mark.parametrize(("norm", "cured"), [(1.0, True), (8.9, True), (9.1, False), (80.0, False)])
def test_cured_needs_the_gradient_nearer_to_normal_than_to_what_was_refused(norm: float, cured: bool) -> None:
    spiked = (finding("gradient_spike", value=90.0, normal=0.9),)
    given = evidence(
        SAME, result("without_suspects", 2.5, norm), HEALTHY, findings=spiked, suspects=(suspect(),), norm=90.0
    )
    assert diagnose(given).certain is cured


@pytest.mark.parametrize(("norm", "cured"), [(22.0, True), (23.0, False)])
def test_without_a_normal_gradient_a_quarter_of_the_refused_one_is_calm(norm: float, cured: bool) -> None:
    spiked = (finding("gradient_spike", value=90.0, normal=0.0),)
    given = evidence(
        SAME, result("without_suspects", 2.5, norm), HEALTHY, findings=spiked, suspects=(suspect(),), norm=90.0
    )
    assert diagnose(given).certain is cured


def test_a_gradient_spike_on_a_healthy_batch_shows_that_the_state_is_broken() -> None:
    spiked = (finding("gradient_spike", value=90.0, normal=0.9),)
    bad = result("healthy_batch", 2.4, 60.0)
    lasting = replace(evidence(SAME, bad, findings=spiked, norm=90.0), skips=3)
    assert diagnose(lasting).state_is_broken
    assert not diagnose(replace(lasting, results=(SAME, replace(bad, gradient_norm=1.0)))).state_is_broken
    # At first a healthy batch that has its loss is healthy, and weights are not thrown away for one large gradient.
    assert not diagnose(replace(lasting, skips=1)).state_is_broken
    assert diagnose(replace(lasting, skips=1, results=(SAME, replace(bad, excess=0.5)))).state_is_broken
    assert diagnose(replace(lasting, skips=1, results=(SAME, replace(bad, excess=math.nan)))).state_is_broken


def test_without_an_expected_loss_the_refused_one_is_the_measure() -> None:
    blind = replace(evidence(SAME, suspects=(suspect(),)), expected_loss=math.nan)
    better = replace(blind, results=(SAME, replace(WITHOUT, excess=0.0)))
    assert diagnose(better).cause == "data"
    assert diagnose(better).certain
    no_better = replace(blind, results=(SAME, result("without_suspects", 7.9, excess=0.0), HEALTHY))
    assert not diagnose(no_better).certain


def roles(largest: float = 4.0, update: float = 0.1, rms_t: float = 1.0, weight: float = 10.0) -> ProbeSignals:
    role = RoleProbe(role="hidden", weight_norm=weight, update_norm=update, largest_weight=largest, rms_t=rms_t)
    return ProbeSignals(step=100, roles=(role,), beta2=0.95)


@pytest.mark.parametrize(
    ("now", "before", "cause", "phrase"),
    [
        (roles(largest=2000.0), (), "hardware", "2e+03 times the size of its neighbours"),
        (roles(largest=30.0), (roles(),), "hardware", "(it was 4): a bit may have flipped"),
        (roles(largest=30.0, update=0.5), (roles(),), "optimiser", "5.0 times those of the last probe"),
        (roles(largest=30.0, rms_t=3.0), (roles(),), "optimiser", "the second moment lags"),
        (roles(weight=1e30), (), "hardware", "the norm of the hidden parameters is 1e+30"),
        (roles(weight=math.inf), (), "hardware", "the norm of the hidden parameters is inf"),
    ],
)
def test_a_weight_out_of_line_is_the_hardware_unless_updates_were_too(
    now: ProbeSignals, before: tuple[ProbeSignals, ...], cause: str, phrase: str
) -> None:
    found = diagnose(evidence(probe=now, probes_before=before))
    assert (found.cause, found.state_is_broken) == (cause, True)
    assert phrase.split(":")[0] in found.text


@pytest.mark.parametrize(("largest", "before"), [(6.1, 1.5), (12.1, 4.0), (1000.1, 900.0)])
def test_weights_are_out_of_line_from_the_stated_growth_on(largest: float, before: float) -> None:
    assert diagnose(evidence(probe=roles(largest=largest), probes_before=(roles(largest=before),))).state_is_broken


@pytest.mark.parametrize("largest", [5.9, 11.0])
def test_weights_that_grew_a_little_are_not_out_of_line(largest: float) -> None:
    before = (roles(largest=1.5 if largest < 6 else 4.0),)
    assert next_pass(evidence(probe=roles(largest=largest), probes_before=before), 3) == "same_batch"
    assert next_pass(evidence(probe=roles(largest=500.0)), 3) == "same_batch"


def test_a_broken_state_with_clean_weights_was_led_there_by_updates() -> None:
    found = diagnose(evidence(SAME, SICK, probe=roles(), probes_before=(roles(),)))
    assert (found.cause, found.state_is_broken) == ("optimiser", True)
    assert "no weight sticks out" in found.text
    assert "+0.70 nats" in found.text


def test_a_weight_that_sticks_out_of_a_broken_state_is_the_hardware_unless_the_optimiser_left_marks() -> None:
    found = diagnose(evidence(SAME, SICK, probe=roles(largest=25.0)))
    assert (found.cause, found.state_is_broken) == ("hardware", True)
    assert "a weight of the hidden parameters is 25 times" in found.text
    assert diagnose(evidence(SAME, SICK, probe=roles(largest=19.0))).cause == "optimiser"
    assert diagnose(evidence(SAME, SICK, probe=roles(largest=25.0, rms_t=3.0))).cause == "optimiser"
    nan = replace(SICK, loss=math.nan, excess=0.0)
    assert "nats from when" not in diagnose(evidence(SAME, nan, probe=roles())).text


def test_before_the_first_update_there_is_no_better_state_to_go_back_to() -> None:
    given = evidence(SAME, SICK, findings=(finding("nonfinite"),))
    given = replace(given, signals=replace(given.signals, step=0))
    found = diagnose(given)
    assert (found.cause, found.state_is_broken, found.certain) == ("numerics", False, False)
    assert "no update has been applied yet" in found.text


def test_every_kind_of_finding_has_a_cause_without_an_investigation() -> None:
    assert set(CAUSES) == set(get_args(Kind))
    for kind in get_args(Kind):
        assert cause_of([finding(kind)]) == CAUSES[kind] != "unknown"
    assert cause_of([]) == "unknown"


@pytest.mark.parametrize(
    ("findings", "cause"),
    [
        ((finding("loss_spike"), finding("update_size")), "optimiser"),
        ((finding("loss_spike"), finding("gradient_spike")), "data"),
        ((finding("loss_spike"), finding("stale_second_moment", "warning")), "data"),
        ((finding("throughput", "note"), finding("stale_second_moment", "warning")), "optimiser"),
        ((finding("too_good", "warning"),), "unknown"),
        ((finding("too_good"), finding("document_spike")), "data"),
        ((finding("nonfinite"), finding("gradient_spike")), "numerics"),
        ((finding("nonfinite", where="weights"),), "hardware"),
        ((finding("activation_explosion", where="layer 3"),), "optimiser"),
        ((finding("activation_explosion", where="hidden"),), "hardware"),
    ],
)
def test_the_gravest_and_most_telling_finding_names_the_cause(findings: tuple[Finding, ...], cause: str) -> None:
    assert cause_of(findings) == cause


def test_facts_about_the_tokens_count_only_out_of_the_band_but_misalignment_always() -> None:
    quiet = (finding("stale_second_moment", "warning"),)
    loud = (finding("loss_spike"),)
    for facts, where, phrase in (
        (BatchFacts(copied=0.9), "copied", "90 % of the targets stand in the input"),
        (BatchFacts(repeated=0.3), "repeated", "30 % of the tokens"),
        (BatchFacts(repeated=0.9, copied=0.9), "copied", "90 % of the tokens"),
    ):
        assert shown_by_tokens(facts, quiet) == ""
        assert shown_by_tokens(facts, loud) == ""  # no more of it than usual
        assert shown_by_tokens(facts, (finding("stale_second_moment", "warning", where=where),)) == ""
        assert phrase in shown_by_tokens(facts, (finding("loss_spike", where=where),))
    assert shown_by_tokens(BatchFacts(copied=0.3, repeated=0.05), (finding("loss_spike", where="copied"),)) == ""
    assert "1 % of the targets are not the tokens shifted by one" in shown_by_tokens(BatchFacts(misaligned=0.01), ())
    assert shown_by_tokens(BatchFacts(misaligned=0.004), ()).startswith("0.4 % of the targets")
    assert shown_by_tokens(BatchFacts(misaligned=0.0005), loud) == ""
    assert cause_of((finding("gradient_spike", where="copied"),), BatchFacts(copied=0.9)) == "data"
    assert cause_of((finding("gradient_spike"),), BatchFacts(copied=0.9)) == "optimiser"


def test_of_many_suspects_one_far_ahead_of_the_others_is_tried_alone() -> None:
    first, near, far = (replace(suspect(name * 16), z=z) for name, z in (("a", 40.0), ("b", 20.0), ("c", -4.5)))
    assert accused(evidence(suspects=(first, far))) == (first,)
    assert accused(evidence(suspects=(first, near, far))) == (first, near, far)
    unknown = replace(first, z=math.inf)
    assert accused(evidence(suspects=(unknown, far))) == (unknown, far)


def test_broken_weights_are_not_explained_away_by_the_batchs_tokens() -> None:
    broken = evidence(facts=BatchFacts(repeated=0.4), probe=ProbeSignals(step=110, weights_finite=False))
    assert diagnose(broken).state_is_broken
    assert next_pass(broken, 3) is None


def test_a_too_good_alarm_carries_its_own_evidence() -> None:
    alarm = finding("too_good")
    assert shown_by_tokens(BatchFacts(), (alarm,)) == "too_good seen"
    assert shown_by_tokens(BatchFacts(), (finding("too_good", "warning"),)) == ""


def test_what_the_tokens_show_names_the_documents_that_are_odd() -> None:
    plain = replace(suspect("a" * 16), reasons=())
    found = diagnose(evidence(facts=BatchFacts(repeated=0.4), suspects=(suspect(), plain)))
    assert [s.document for s in found.suspects] == ["d" * 16]


def test_of_rows_that_came_again_no_document_is_tried_without() -> None:
    """The batch's loss is healthy with any documents and without: the pass would acquit none and blank the odd ones."""
    again = evidence(
        facts=BatchFacts(duplicated=1.0), suspects=(suspect(),), findings=(finding("too_good", where="duplicated"),)
    )
    assert next_pass(again, 6) is None
    found = diagnose(again)
    assert (found.cause, found.certain, found.cured_without) == ("data", True, False)
    flooded = evidence(facts=BatchFacts(repeated=0.4), suspects=(suspect(),))
    assert next_pass(flooded, 6) == "without_suspects"


def test_without_any_pass_the_findings_and_suspects_speak() -> None:
    found = diagnose(evidence(suspects=(suspect(),), findings=(finding("gradient_spike"),)))
    assert (found.cause, found.certain) == ("data", False)
    assert "not tried without" in found.text
    assert diagnose(evidence()).text == "probably the data"
    assert diagnose(evidence(SAME)).text == "the fault repeats, bit for bit; probably the data"
    assert diagnose(evidence(replace(SAME, same_bits=False))).text == "the fault repeats; probably the data"
    found = diagnose(evidence(findings=()))
    assert (found.cause, found.text) == ("unknown", "the cause is not known")
    # Where nothing is finite every document is a suspect, which says nothing.
    nothing = evidence(loss=math.nan, findings=(finding("nonfinite"),), suspects=(suspect(z=math.inf, loss=math.nan),))
    assert diagnose(nothing).cause == "numerics"
