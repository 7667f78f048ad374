"""How fast the run goes, by rank 0's clock: notes about throughput and waiting for data. Nothing here is saved or acted on."""

from dataclasses import dataclass, replace

from surefoot.guard.baseline import median
from surefoot.guard.finding import Finding
from surefoot.guard.lasting import Lasting
from surefoot.guard.signals import PaceSignals

WINDOW = 64
"""Batches that say what is usual."""
SETTLED = 16
IN_A_ROW = 8
"""Batches for which it must last."""
SLOW_SHARE = 0.6
"""Of the usual tokens per second, below which the run is slow."""
WAIT_SHARE = 0.25
"""Of a batch's time spent waiting for data, from which on waiting is worth saying."""


@dataclass(frozen=True, kw_only=True)
class PaceState:
    """The pace lately."""

    rates: tuple[float, ...] = ()
    """Tokens per second of usual batches, oldest first."""
    slow: tuple[float, ...] = ()
    """Rates of the slow batches in a row."""
    waits: tuple[float, ...] = ()
    """Share of time waited for data, of the last ``IN_A_ROW`` batches."""
    active: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paced:
    """What a batch's pace shows."""

    state: PaceState
    findings: tuple[Finding, ...] = ()


def observe_pace(state: PaceState, pace: PaceSignals) -> Paced:
    """Judge one batch's clock. A slow pace that lasts for ``WINDOW`` batches is the usual one from then on."""
    if pace.seconds <= 0 or pace.tokens <= 0:
        return Paced(state)
    lasting = Lasting(state.active)
    rate = pace.tokens / pace.seconds
    usual = median(state.rates) if len(state.rates) >= SETTLED else 0.0
    if rate >= SLOW_SHARE * usual:
        state = replace(state, rates=(*state.rates[1 - WINDOW :], rate), slow=())
    elif len(state.slow) + 1 >= WINDOW:
        state = replace(state, rates=(*state.slow, rate), slow=())
    else:
        state = replace(state, slow=(*state.slow, rate))
    share = pace.data_wait / pace.seconds
    state = replace(state, waits=(*state.waits[1 - IN_A_ROW :], share))
    lasting.see(
        "throughput",
        len(state.slow) >= IN_A_ROW,
        len(state.slow) > 0,
        lambda: _note(
            pace,
            "throughput",
            f"{median(state.slow):,.0f} tokens/s for {len(state.slow)} batches, {usual:,.0f} before",
            median(state.slow),
            usual,
            len(state.slow),
        ),
    )
    waited = len(state.waits) == IN_A_ROW and min(state.waits) > WAIT_SHARE
    lasting.see(
        "data_wait",
        waited,
        share > WAIT_SHARE / 2,
        lambda: _note(
            pace,
            "data_wait",
            f"{median(state.waits):.0%} of the time goes into waiting for data, for {IN_A_ROW} batches: more of them prepared ahead, or a faster disk",
            median(state.waits),
            0.0,
            IN_A_ROW,
        ),
    )
    return Paced(replace(state, active=lasting.active), tuple(lasting.findings))


def _note(pace: PaceSignals, kind: str, text: str, value: float, normal: float, lasted: int) -> Finding:
    return Finding(
        kind="throughput" if kind == "throughput" else "data_wait",
        severity="note",
        text=text,
        batch_index=pace.batch_index,
        onset=pace.batch_index - lasted + 1,
        value=value,
        normal=normal,
    )
