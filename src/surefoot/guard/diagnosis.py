"""Why it happened: from what was seen and what extra passes over the batch bring back."""

import math
from collections.abc import Mapping, Sequence

from surefoot.guard.actions import Cause
from surefoot.guard.broken_state import broken_by, built_up, optimiser_marks, suspicious_weight, weights_broken
from surefoot.guard.evidence import Diagnosis, Evidence, PassKind, PassResult, Suspect
from surefoot.guard.finding import Finding, Kind
from surefoot.guard.limits import LEAKED, MISALIGNED
from surefoot.guard.pass_results import cured, differs, fine
from surefoot.guard.signals import BatchFacts
from surefoot.guard.suspects import stands_out

FAR_AHEAD = 3.0
"""Times the z of the next suspect from which the first is taken to have done it alone."""
REPEATED = 0.1
"""Share of tokens in an n-gram flood; banners and tables reach a few per cent."""

OUTSIDE: frozenset[Kind] = frozenset({"nonfinite", "loss_spike", "document_spike", "gradient_spike", "too_good"})
"""Findings that say the batch is out of its band: facts about its tokens count as the reason only together with one."""

CAUSES: Mapping[Kind, Cause] = {
    "misaligned": "data",
    "optimizer_steps": "optimiser",
    "update_size": "optimiser",
    "too_good": "data",
    "update_ratio": "optimiser",
    "attention_growth": "optimiser",
    "slow_spike": "optimiser",
    "entropy_collapse": "optimiser",
    "activation_explosion": "optimiser",
    "document_spike": "data",
    "loss_spike": "data",
    "nonfinite": "numerics",
    "gradient_spike": "optimiser",
    "stale_second_moment": "optimiser",
    "embedding_gradient": "optimiser",
    "gradient_creep": "optimiser",
    "logit_drift": "optimiser",
    "level_shift": "data",
    "validation": "data",
    "mixture": "data",
    "frozen_gradient": "optimiser",
    "data_wait": "hardware",
    "throughput": "hardware",
}
"""What each finding usually comes from, most telling first."""

_SEVERITY = ("note", "warning", "alarm")


def cause_of(findings: Sequence[Finding], facts: BatchFacts | None = None) -> Cause:
    """The likely cause without a further pass: what the tokens show, else the most telling of the gravest findings."""
    if not findings:
        return "unknown"
    if facts is not None and shown_by_tokens(facts, findings):
        return "data"
    if broken_by(findings):
        return "hardware"
    gravest = max(findings, key=lambda f: _SEVERITY.index(f.severity)).severity
    # A loss too good for no reason the tokens give is learning more often than not.
    kinds = {f.kind for f in findings if f.severity == gravest and (f.kind != "too_good" or gravest == "alarm")}
    return next((cause for kind, cause in CAUSES.items() if kind in kinds), "unknown")


def shown_by_tokens(facts: BatchFacts, findings: Sequence[Finding]) -> str:
    """What is wrong with the batch's tokens, without asking the model; empty where nothing is shown.

    Misaligned targets are wrong whatever the loss says. A too-good alarm is raised on such evidence only. Copies and floods count only with a
    finding that says that the batch is out of its band and that they are more than usual (its ``where``): alone they are odd, not harmful.
    """
    if facts.misaligned > MISALIGNED:
        return f"{_percent(facts.misaligned)} of the targets are not the tokens shifted by one"
    odd = {f.where for f in findings if f.kind in OUTSIDE}
    if leak := next((f for f in findings if f.kind == "too_good" and f.severity == "alarm"), None):
        return leak.text
    if facts.repeated > REPEATED and odd & {"repeated", "copied"}:
        return f"{_percent(facts.repeated)} of the tokens are a few repeated over and over"
    if facts.copied > LEAKED and "copied" in odd:
        return f"{_percent(facts.copied)} of the targets stand in the input at their own place: the answer leaks"
    return ""


def next_pass(evidence: Evidence, budget: int) -> PassKind | None:
    """The pass worth taking next, or None when no answer is worth one; ``budget`` counts those taken, too.

    Nothing to ask: the weights show it already, or the update was applied, so that the weights are others now. Where the tokens show it, only
    whether the batch is healthy without the documents that are accused. Otherwise

    1. same_batch. Differs -> hardware, done.
    2. Reproducible, and suspects stand out -> without_suspects. Cured -> data, done.
    3. healthy_batch. Bad too -> the state is broken, done.
    4. full_precision, when computing below fp32 and what is wrong is not simply a high loss. Cured -> numerics, done.
    5. No suspects: first_half, then second_half, to say where in the batch it is.

    So three passes settle a bad document (2), a fault that does not repeat (1), a broken state (2 or 3), overflow without suspects (3), and
    find the half of a bad batch without suspects (3).
    """
    if not evidence.signals.applied and len(evidence.results) < budget:
        return _worth_asking(evidence)
    return None


def _worth_asking(evidence: Evidence) -> PassKind | None:
    """The tree, for an update that was refused."""
    if weights_broken(evidence.probe, evidence.probes_before):
        return None
    without = evidence.result("without_suspects")
    if shown_by_tokens(evidence.signals.facts, evidence.findings):
        # Of rows that came again the loss is healthy, with any documents and without.
        again = any(f.where == "duplicated" for f in evidence.findings)
        asked = without is not None or evidence.signals.facts.misaligned > MISALIGNED or again
        return None if asked or not accused(evidence) else "without_suspects"
    same = evidence.result("same_batch")
    if same is None:
        return "same_batch"
    if differs(same, evidence):
        return None
    suspected = bool(accused(evidence))
    if suspected and without is None:
        return "without_suspects"
    if without is not None and cured(without, evidence):
        return None
    healthy = evidence.result("healthy_batch")
    if healthy is None:
        return "healthy_batch"
    if not fine(healthy, evidence):
        return None
    return _where_in_the_batch(evidence, suspected)


def _where_in_the_batch(evidence: Evidence, suspected: bool) -> PassKind | None:
    """The rest of the tree, for a bad batch at healthy weights."""
    full = evidence.result("full_precision")
    high = any(f.kind in ("loss_spike", "document_spike") for f in evidence.findings)
    if full is None and evidence.low_precision and not (high and evidence.signals.finite):
        return "full_precision"
    if suspected or (full is not None and cured(full, evidence)):
        return None
    first = evidence.result("first_half")
    if first is None:
        return "first_half"
    if not cured(first, evidence) and evidence.result("second_half") is None:
        return "second_half"
    return None


def diagnose(evidence: Evidence) -> Diagnosis:
    """The likely cause, by the strongest evidence there is: weights, tokens, passes in the order they are taken, then the findings alone."""
    if broken := weights_broken(evidence.probe, evidence.probes_before):
        marks = optimiser_marks(evidence)
        cause: Cause = "optimiser" if marks else "hardware"
        why = f"; {marks}" if marks else ", while updates were of their usual size: a bit may have flipped"
        return Diagnosis(cause=cause, text=f"{broken}{why}", state_is_broken=True, certain=True)
    if shown := shown_by_tokens(evidence.signals.facts, evidence.findings):
        return _shown(shown, evidence)
    same = evidence.result("same_batch")
    if same is None:
        return _by_findings(evidence, "")
    if differs(same, evidence):
        now, was = (_numbers(it.loss, it.gradient_norm) for it in (same, evidence.signals))
        text = f"the same batch again gave {now}, not {was}: a fault that does not repeat, of the hardware or a race between devices"
        return Diagnosis(cause="hardware", text=text, certain=True)
    without = evidence.result("without_suspects")
    if without is not None and cured(without, evidence):
        did = accused(evidence)
        text = f"without {_documents(len(did))} the batch is healthy again ({_numbers(without.loss, without.gradient_norm)})"
        return Diagnosis(cause="data", text=text, suspects=did, certain=True, cured_without=True)
    healthy = evidence.result("healthy_batch")
    if healthy is None:
        return _by_findings(evidence, "the fault repeats, bit for bit; " if same.same_bits else "the fault repeats; ")
    if not fine(healthy, evidence):
        return _broken(evidence, healthy)
    return _bad_batch(evidence)


def accused(evidence: Evidence) -> tuple[Suspect, ...]:
    """The suspects that ``without_suspects`` blanks: where the tokens show what is wrong, those with odd text; else those whose loss stands
    out, or the first alone where it stands out ``FAR_AHEAD`` times as far as the next: of many documents a few stand out by chance."""
    if shown_by_tokens(evidence.signals.facts, evidence.findings):
        return tuple(s for s in evidence.suspects if s.reasons)
    standing = sorted((s for s in evidence.suspects if stands_out(s)), key=lambda s: -abs(s.z))
    if len(standing) > 1 and math.isfinite(standing[0].z) and abs(standing[0].z) >= FAR_AHEAD * abs(standing[1].z):
        return tuple(standing[:1])
    return tuple(s for s in evidence.suspects if stands_out(s))


def _shown(shown: str, evidence: Evidence) -> Diagnosis:
    """The tokens show it; whether the accused alone did it, a pass may have said."""
    without = evidence.result("without_suspects")
    alone = without is not None and cured(without, evidence)
    did = accused(evidence)
    text = f"{shown}; without {_documents(len(did))} the batch is healthy" if alone else shown
    return Diagnosis(cause="data", text=text, suspects=did, certain=True, cured_without=alone)


def _broken(evidence: Evidence, healthy: PassResult) -> Diagnosis:
    """Healthy batches are bad as well. Marks of the optimiser speak for it, a weight that sticks out or a sudden break for the hardware."""
    excess = f", {healthy.excess:+.2f} nats from when it was learned" if math.isfinite(healthy.loss) else ""
    seen = f"a healthy batch is bad at these weights too ({_numbers(healthy.loss, healthy.gradient_norm)}{excess})"
    if evidence.signals.step == 0:
        text = f"{seen}, and no update has been applied yet: there is no better state to go back to"
        return Diagnosis(cause=cause_of(evidence.findings), text=text)
    cause: Cause = "optimiser"
    if why := optimiser_marks(evidence):
        pass
    elif why := suspicious_weight(evidence.probe):
        cause = "hardware"
    elif built_up(evidence):
        why = "it built up over several batches"
    elif evidence.probe is not None:
        why = "no weight sticks out, so updates have led here"
    else:
        cause, why = "hardware", "it came between two steps, with nothing leading to it"
    return Diagnosis(cause=cause, text=f"{seen}: the state is broken; {why}", state_is_broken=True, certain=True)


def _bad_batch(evidence: Evidence) -> Diagnosis:
    """Healthy weights, and a batch that is bad every time it is computed."""
    full = evidence.result("full_precision")
    if full is not None and cured(full, evidence):
        text = f"in fp32 the same batch is healthy ({_numbers(full.loss, full.gradient_norm)}): the precision is too low for it"
        return Diagnosis(cause="numerics", text=text, certain=True)
    known = "it repeats, and other batches are healthy at these weights"
    suspects = tuple(s for s in evidence.suspects if stands_out(s))
    first, second = evidence.result("first_half"), evidence.result("second_half")
    if suspects:
        text = f"{known}: probably its data; {_documents(len(suspects))} stand{'s' if len(suspects) == 1 else ''} out, but not alone"
    elif first is None:
        text = f"{known}: probably its data, or this batch at this state; no single document stands out"
    elif cured(first, evidence):
        text = f"{known}: probably its data, in the second half of each rank's rows; the first half is healthy alone"
    elif second is None or cured(second, evidence):
        text = f"{known}: probably its data, in the first half of each rank's rows"
    else:
        text = f"{known}: probably its data as a whole; either half is bad alone"
    return Diagnosis(cause="data", text=text, suspects=suspects)


def _by_findings(evidence: Evidence, known: str) -> Diagnosis:
    """No pass settled it: what such findings usually come from."""
    suspects = tuple(s for s in evidence.suspects if stands_out(s))
    cause = cause_of(evidence.findings) if not suspects or not math.isfinite(evidence.signals.loss) else "data"
    if cause == "data" and suspects:
        return Diagnosis(
            cause=cause, text=f"{known}probably {_documents(len(suspects))}: not tried without", suspects=suspects
        )
    return Diagnosis(cause=cause, text=f"{known}{usual(cause)}")


def usual(cause: Cause) -> str:
    """In words, a cause that only the kind of finding speaks for."""
    if cause == "unknown":
        return "the cause is not known"
    return {"optimiser": "probably the optimiser, its rate or the state they led to"}.get(
        cause, f"probably the {cause}"
    )


def _documents(count: int) -> str:
    return "one document" if count == 1 else f"{count} documents"


def _numbers(loss: float, norm: float) -> str:
    return f"loss {loss:.3g} nats, gradient norm {norm:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
