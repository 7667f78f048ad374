"""The ladder: what was found and what has been spent already, to an action.

note < clip harder < skip < investigate < dip the rate < roll back < halt. Each rung has a budget in ``Record``, a cool-down in which nothing
is ordered twice for the same trouble unless it is a rung higher, and words for a person who was not there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Action, ClipHarder, Halt, Investigate, LrEvent, Proceed, Rollback, SkipUpdate
from surefoot.guard.advice import ADVICE, AFTER_DIPS, seen
from surefoot.guard.evidence import Diagnosis
from surefoot.guard.finding import Finding, Kind
from surefoot.guard.limits import MISALIGNED
from surefoot.guard.record import Record
from surefoot.guard.retreat import repeats, target
from surefoot.guard.signals import StepSignals

DIP = 0.3
"""Rate during a dip, over the scheduled one."""
HOLD_STEPS = 20
RAMP_STEPS = 50
SHORT_HOLD_STEPS = 10
"""Of a dip against updates out of line with the rate, which bring it down by what was measured; and of its ramp."""
SETTLE = 0.5
"""Where a dip ends when the rate itself is the trouble, over what it was; events multiply, so each halves again."""
LOWEST_DIP = 0.01
"""A measured update far out of line dips the rate no further."""
INVESTIGATION_SPAN = 1000
"""Batches over which ``max_investigations`` is counted."""
LOOK_AGAIN = 3
"""Skipped step in a row that is investigated a second time: what lasts may be the state."""
MARGIN = 20
"""Batches that a rollback for a slow spike, or for a state the optimiser broke, goes back beyond the onset; doubles with each repeat."""
SUDDEN_MARGIN = 2
"""The same for a state that broke at one blow."""

DIPS: frozenset[Kind] = frozenset({"attention_growth", "entropy_collapse", "activation_explosion", "update_ratio"})
"""Alarms that a lower rate cures, with weights as they are."""
DIPS_IF_STRICT: frozenset[Kind] = DIPS | {
    "update_size",
    "stale_second_moment",
    "embedding_gradient",
    "gradient_creep",
    "logit_drift",
}
"""Warnings for which ``strict`` dips the rate."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One step as the ladder sees it."""

    signals: StepSignals
    findings: tuple[Finding, ...]
    config: GuardConfig
    record: Record
    cause: Diagnosis
    """As far as it is known without an investigation."""
    skips: int = 0
    """Skipped steps in a row, this one included."""
    data_skips: int = 0
    """Of those, the ones shown to be the data's fault."""
    rejections: int = 0
    """Finite outliers refused in a row, the data not shown at fault; this one included."""
    broken: str = ""
    """What a probe says is wrong with the weights."""

    @property
    def seen(self) -> str:
        """What was found, in words."""
        return seen(self.signals, self.findings)


def after_refusal(now: Situation) -> Action:
    """What to do about an update that the device refused."""
    config = now.config
    shown_data = now.cause.cause == "data" and now.cause.certain
    limit = config.max_data_skips if now.data_skips == now.skips else config.max_consecutive_skips
    if now.skips >= limit:
        return Halt(
            reason=f"{now.seen}; {now.skips} skipped steps in a row ({now.cause.text}). {ADVICE[now.cause.cause]}"
        )
    if now.broken:
        return roll_back(now, now.signals.batch_index - now.skips, now.broken)
    if shown_data and now.skips == 1 and _names_documents(now) and _may_investigate(now):
        return Investigate(cause=f"{now.seen}; the data are at fault: {now.cause.text}")
    if shown_data:
        why = "" if now.cause.text in now.seen else f": {now.cause.text}"
        return SkipUpdate(cause=f"{now.seen}; the data are at fault{why}")
    if now.skips in (1, LOOK_AGAIN) and _may_investigate(now):
        lasts = "" if now.skips == 1 else f"; it lasts, {now.skips} skipped steps in a row"
        return Investigate(cause=now.seen + lasts)
    if now.rejections >= config.max_rejections and config.policy == "strict":
        return Halt(
            reason=f"{now.seen}; {now.rejections} finite outliers in a row, and nothing says that the data are at fault: the level has shifted "
            f"for a reason the guard does not know. {ADVICE['unknown']}; where the shift is meant, policy guarded accepts it"
        )
    lasts = f"; skipped step {now.skips} in a row" if now.skips > 1 else ""
    return SkipUpdate(cause=f"{now.seen}{lasts}; {now.cause.text}")


def accepts_level(now: Situation, action: Action) -> bool:
    """So many finite outliers in a row are the new normal: only where the answer would have been one more skip, or none at all."""
    return now.rejections >= now.config.max_rejections and isinstance(action, SkipUpdate | Proceed) and not now.broken


def after_update(now: Situation) -> Action:
    """What to do after an update that was applied; the gravest finding decides."""
    config = now.config
    acted = [
        f for f in now.findings if f.severity == "alarm" or (f.severity == "warning" and config.policy == "strict")
    ]
    alarms = {f.kind: f for f in reversed(acted) if f.severity == "alarm"}
    if now.broken:
        # Broken at some time since the last probe.
        return roll_back(now, now.signals.batch_index - max(config.probe_every, SUDDEN_MARGIN), now.broken)
    if "nonfinite" in alarms or not now.signals.finite:
        return roll_back(now, alarms["nonfinite"].onset if "nonfinite" in alarms else now.signals.batch_index)
    if finding := alarms.get("optimizer_steps") or alarms.get("update_size"):
        again = repeats(now.record, now.signals.batch_index, config.cooldown)
        dip = _dip_against(finding) if again else None
        # The dip must be there when the fault comes again: no further back than it, the first time.
        return roll_back(now, finding.onset, dip=dip, exactly=dip is not None and again == 1)
    if finding := alarms.get("slow_spike"):
        again = repeats(now.record, now.signals.batch_index, config.cooldown)
        return roll_back(now, finding.onset - MARGIN * 2**again, dip=_dip(settle=SETTLE if again else 1.0))
    dips = [f for f in acted if f.kind in (DIPS if f.severity == "alarm" else DIPS_IF_STRICT)]
    if dips and isinstance(lower := _dip_rate(now, dips), LrEvent):
        return lower
    if now.signals.clipped_harder:
        return ClipHarder(cause=f"{now.seen}; its gradient was scaled down to the guard's limit")
    return Proceed()


def _names_documents(now: Situation) -> bool:
    """A look at the documents may tell something that the tokens do not: which of them it is."""
    facts = now.signals.facts
    return facts.misaligned <= MISALIGNED and not any(f.where == "duplicated" for f in now.findings)


def _may_investigate(now: Situation) -> bool:
    within = [at for at in now.record.investigations_at if abs(now.signals.batch_index - at) < INVESTIGATION_SPAN]
    return len(within) < now.config.max_investigations


def _lately(now: Situation, batches: Sequence[int]) -> bool:
    """Something was ordered within the cool-down."""
    return any(abs(now.signals.batch_index - at) <= now.config.cooldown for at in batches)


def out_of_dips(now: Situation) -> bool:
    """The rate would be dipped, but as often as may be it has been."""
    return len(now.record.lr_events_at) >= now.config.max_lr_events


def said_without_dip(now: Situation) -> tuple[Finding, ...]:
    """The findings; those that a dip was for say what else helps, once there are no dips left."""
    if not out_of_dips(now):
        return now.findings
    return tuple(
        replace(f, text=f"{f.text}; {AFTER_DIPS}") if f.kind in DIPS and f.severity == "alarm" else f
        for f in now.findings
    )


def after_investigation(now: Situation) -> Action:
    """What to do once the passes are back; ``cause`` is what they say."""
    found, batch = now.cause, now.signals.batch_index
    if now.signals.applied and not found.state_is_broken:
        return Proceed()
    if found.state_is_broken:
        onset = min([batch - now.skips, *(f.onset for f in now.findings)])
        again = repeats(now.record, batch, now.config.cooldown)
        optimiser = found.cause == "optimiser"
        margin = (MARGIN if optimiser else SUDDEN_MARGIN) * 2**again
        dip = _dip(settle=1.0 if again == 1 else SETTLE) if optimiser and again else None
        return roll_back(now, onset - margin, found.text, dip=dip)
    if found.cured_without and (exclusion := _exclude(now)):
        return exclusion
    if found.cause == "hardware" and now.config.policy == "strict":
        return Halt(reason=f"{now.seen}; {found.text}. {ADVICE['hardware']}")
    return SkipUpdate(cause=f"{now.seen}; {found.text}{_named(found)}{_next(found)}")


def _exclude(now: Situation) -> Rollback | None:
    """The refused batch again without the documents that alone spoilt it, and they in no later batch; None where a batch that was read again
    already is refused once more, or as many documents as may be are left out."""
    record, batch = now.record, now.signals.batch_index
    names = tuple(dict.fromkeys(s.document for s in now.cause.suspects))
    if not names or batch in record.exclusions_at or record.num_excluded + len(names) > now.config.max_exclusions:
        return None
    done = f"it is read again without {'them' if len(names) > 1 else 'it'}, and so are the batches to come"
    return Rollback(to_batch=batch, exclude=names, cause=f"{now.seen}; {now.cause.text}{_named(now.cause)}; {done}")


def roll_back(
    now: Situation,
    wanted: int,
    why: str = "",
    *,
    dip: LrEvent | None = None,
    exactly: bool = False,
) -> Action:
    """Back to before a batch, further on a repeat unless ``exactly``; or halt, where as many rollbacks as may be did not help."""
    record, config, batch = now.record, now.config, now.signals.batch_index
    if now.signals.step == 0 and not now.signals.applied:
        return SkipUpdate(
            cause=f"{now.seen}; no update has been applied yet, so the weights as they were drawn, or the precision, are at fault. "
            "Look at model.init and parallel.precision"
        )
    because = "; ".join(dict.fromkeys(text for text in (now.seen, why or now.cause.text) if text))
    if len(record.rollbacks) >= config.max_rollbacks:
        spent = (
            f"{len(record.rollbacks)} rollbacks did not cure it"
            if record.rollbacks
            else "no rollback is allowed (guard.max_rollbacks=0)"
        )
        return Halt(reason=f"{because}; {spent}. {ADVICE[now.cause.cause]}")
    to_batch = max(0, wanted) if exactly else target(record, batch, wanted, config.cooldown)
    if dip is not None and out_of_dips(now):
        dip = None
    done = f"going back to before batch {to_batch:,}"
    if dip is not None:
        done += f" with the rate at {100 * dip.factor:.0f} % for {dip.hold_steps} steps"
        dip = replace(dip, cause=because)
    return Rollback(to_batch=to_batch, cause=f"{because}; {done}", lr_event=dip)


def _dip_rate(now: Situation, dips: Sequence[Finding]) -> Action:
    """A dip, unless one ordered lately must first show what it does, or all are spent."""
    if out_of_dips(now) or _lately(now, now.record.lr_events_at):
        return Proceed()
    # A warning is dipped and re-warmed; for an alarm the rate has been too high and stays lower.
    settle = SETTLE if any(f.severity == "alarm" for f in dips) else 1.0
    dip = _dip(settle=settle)
    after = f", then {100 * settle:.0f} % of what it was" if settle < 1 else ", then back up"
    cause = f"{seen(now.signals, dips)}; the learning rate goes to {100 * dip.factor:.0f} % for {dip.hold_steps} steps{after}"
    return replace(dip, cause=f"{cause}; if it goes on, {AFTER_DIPS}")


def _dip(*, settle: float, factor: float = DIP) -> LrEvent:
    return LrEvent(factor=factor, hold_steps=HOLD_STEPS, ramp_steps=RAMP_STEPS, settle=settle, cause="")


def _dip_against(finding: Finding) -> LrEvent | None:
    """A dip that brings a measured update back into line; none where the update is not too large."""
    if finding.kind != "update_size" or not finding.value > finding.normal > 0:
        return None
    ratio = finding.normal / finding.value if math.isfinite(finding.value) else 0.0
    factor = max(LOWEST_DIP, min(0.5, ratio))
    return replace(_dip(settle=1.0, factor=factor), hold_steps=SHORT_HOLD_STEPS, ramp_steps=SHORT_HOLD_STEPS)


def _named(found: Diagnosis) -> str:
    """The suspects of a diagnosis: name, why, and how the text begins."""
    if not found.suspects:
        return ""
    worst = found.suspects[0]
    why = f" ({', '.join(worst.reasons)})" if worst.reasons else ""
    more = f" and {len(found.suspects) - 1} more" if len(found.suspects) > 1 else ""
    beginning = " ".join(worst.text.split())[:60]
    return (
        f"; document {worst.document} of {worst.domain}{why}"
        + (f", which begins {beginning!r}" if beginning else "")
        + more
    )


def _next(found: Diagnosis) -> str:
    """What to do next, where the cause is not the data, which need nothing more."""
    return "" if found.cause == "data" else f"; {ADVICE[found.cause][0].lower()}{ADVICE[found.cause][1:]}"
