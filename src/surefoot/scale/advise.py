"""Learning rate, batch size, warm-up and decay by published laws, side by side: each with its source and where it was fitted. No torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLACK = 0.02
"""How far, relatively, beyond the ends of a range still counts as inside: sizes are quoted rounded."""


@dataclass(frozen=True)
class Range:
    """Where a law was fitted, one quantity."""

    what: str
    low: float
    high: float
    unit: str = ""

    def holds(self, value: float) -> bool:
        return self.low * (1.0 - SLACK) <= value <= self.high * (1.0 + SLACK)


@dataclass(frozen=True)
class Run:
    """What is asked about."""

    num_params: float
    """Parameters; laws differ in which they count, and say so."""
    num_tokens: float

    @property
    def flops(self) -> float:
        """6 operations per parameter and token; attention's own left out."""
        return 6.0 * self.num_params * self.num_tokens

    @property
    def tokens_per_param(self) -> float:
        return self.num_tokens / self.num_params


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What one law says of one run; what it does not speak of is None."""

    law: str
    source: str
    lr: float | None = None
    """Peak rate of AdamW."""
    batch_tokens: float | None = None
    warmup_tokens: float | None = None
    weight_decay: float | None = None
    """Decoupled: a step takes lr x weight_decay off."""
    decay_source: str = ""
    """The law's own source, or the timescale's."""
    beta2: float | None = None
    schedule: str = ""
    """That the law was fitted with."""
    ranges: tuple[Range, ...]
    outside: tuple[str, ...]
    """Where the run lies outside of what was fitted, in words; empty is inside."""
    note: str
    """What its numbers count, and what was not checked against the source."""


@dataclass(frozen=True, kw_only=True)
class Law:
    """A published law."""

    name: str
    source: str
    ranges: tuple[tuple[Range, Callable[[Run], float]], ...]
    lr: Callable[[Run], float] | None = None
    batch_tokens: Callable[[Run], float] | None = None
    warmup_tokens: Callable[[Run], float] | None = None
    weight_decay: float | None = None
    beta2: Callable[[float], float] | None = None
    """Of the batch in tokens."""
    schedule: str = ""
    note: str = ""


def _params(run: Run) -> float:
    return run.num_params


def _tokens(run: Run) -> float:
    return run.num_tokens


def _flops(run: Run) -> float:
    return run.flops


def _ratio(run: Run) -> float:
    return run.tokens_per_param


LAWS: tuple[Law, ...] = (
    Law(
        name="Step Law",
        source="arXiv:2503.04715",
        ranges=((Range("parameters", 215e6, 1.07e9), _params), (Range("tokens", 4e9, 100e9), _tokens)),
        lr=lambda run: 1.79 * run.num_params**-0.713 * run.num_tokens**0.307,
        batch_tokens=lambda run: 0.58 * run.num_tokens**0.571,
        schedule="cosine to 1e-5, whatever the peak",
        note="parameters without embeddings; on its own 17 cells of runs the loss it loses is 0.1 % in the mean",
    ),
    Law(
        name="DeepSeek LLM",
        source="arXiv:2401.02954",
        ranges=((Range("compute", 1e17, 8e23, " FLOP"), _flops),),
        lr=lambda run: 0.3118 * run.flops**-0.1250,
        batch_tokens=lambda run: 0.2920 * run.flops**0.3271,
        schedule="steps down at 80 % and 90 % of the tokens",
        note="compute taken as 6 x parameters without embeddings x tokens (theirs counts attention too); fitted from 1e17 to 2e19 FLOP (not "
        "checked against the paper), used up to the 67B model",
    ),
    Law(
        name="Porian et al.",
        source="arXiv:2406.19146",
        ranges=((Range("parameters", 5e6, 901e6), _params), (Range("tokens per parameter", 10.0, 40.0), _ratio)),
        lr=lambda run: 3.7 * run.num_params**-0.36,
        batch_tokens=lambda run: 2048.0 * 0.00037 * run.num_params**0.703,
        warmup_tokens=_params,
        schedule="constant",
        note="parameters with the output matrix; at about 20 tokens a parameter, so that tokens do not enter; batch in rows of 2,048",
    ),
    Law(
        name="OLMo-core ladder",
        source="OLMo-core WSDSChinchillaRunConfigurator, after Porian et al.",
        ranges=((Range("parameters", 60e6, 13e9), _params), (Range("tokens per parameter", 10.0, 200.0), _ratio)),
        lr=lambda run: 0.0047 * (run.num_params / 108e6) ** (-1.0 / 3.0) / 2.0,
        batch_tokens=lambda run: 2048.0 * 160.0 * (run.num_params / 108e6) ** (2.0 / 3.0),
        warmup_tokens=_params,
        weight_decay=0.1,
        beta2=lambda batch: 0.95 if batch >= 524_288 else 0.99,
        schedule="WSD, the last 10 % decay",
        note="a working rule, not a fit: half of Porian's rate for WSD, good at about 80 tokens a parameter by its own comment; no decay on "
        "embeddings",
    ),
    Law(
        name="Power Lines: optimal batch",
        source="arXiv:2505.13738",
        ranges=((Range("parameters", 111e6, 3.3e9), _params),),
        batch_tokens=lambda run: 2048.0 * 0.0306 * run.num_tokens**0.383,
        schedule="linear to 0, under muP",
        note="rows of 2,048 tokens; the exponent is checked, the constant 0.0306 is not",
    ),
    Law(
        name="Power Lines: critical batch",
        source="arXiv:2505.13738",
        ranges=((Range("parameters", 111e6, 3.3e9), _params),),
        batch_tokens=lambda run: 2048.0 * 0.0471 * run.num_tokens**0.462,
        schedule="linear to 0, under muP",
        note="twice the tokens, half the steps; above it more rows hardly save steps; the constant 0.0471 is not checked",
    ),
)
"""In the order in which they are shown."""

TIMESCALE = "arXiv:2505.13738"
_TIMESCALE_CONSTANT, _TIMESCALE_EXPONENT = 1.084, -0.527


def timescale_decay(run: Run, lr: float, batch_tokens: float) -> float:
    """The decay that gives AdamW the best timescale tau = B / (lr decay D), which is 1.084 (D/N)^-0.527 (arXiv:2505.13738; the exponent is checked, the constant is not)."""
    tau = _TIMESCALE_CONSTANT * run.tokens_per_param**_TIMESCALE_EXPONENT
    return batch_tokens / float(lr * run.num_tokens * tau)


def critical_batch(loss: float) -> float:
    """Tokens of a batch at which steps and tokens cost alike, at a loss in nats per token: 2.1e8 / L^(1/0.21) (arXiv:2001.08361 eq. 1.4,
    after arXiv:1812.06162)."""
    return 2.1e8 / float(loss ** (1.0 / 0.21))


KAPLAN_LOSSES = Range("loss", 2.4, 7.0, " nats per token")
"""Of WebText2, by a tokenizer of 50,257; the ends are those of the paper's figures, not of its text."""


def advise(run: Run, *, loss: float | None = None, laws: Sequence[Law] = LAWS) -> list[Advice]:
    """What every law says, those outside of their range too, marked. Decay is the law's own, or by the AdamW timescale of its rate and batch.

    ``loss`` (nats per token, expected at the end) adds the critical batch of Kaplan et al.
    """
    found = [_of(law, run) for law in laws]
    if loss is not None:
        inside = KAPLAN_LOSSES.holds(loss)
        found.append(
            Advice(
                law="Kaplan et al.: critical batch",
                source="arXiv:2001.08361 eq. 1.4 (arXiv:1812.06162)",
                batch_tokens=critical_batch(loss),
                ranges=(KAPLAN_LOSSES,),
                outside=() if inside else (_beyond(KAPLAN_LOSSES, loss),),
                note="at the loss given; it grows as the loss falls; another tokenizer has another loss for the same text",
            )
        )
    return found


def _of(law: Law, run: Run) -> Advice:
    lr = law.lr(run) if law.lr else None
    batch = law.batch_tokens(run) if law.batch_tokens else None
    decay, decay_source = law.weight_decay, law.source
    if decay is None and lr is not None and batch is not None:
        decay, decay_source = timescale_decay(run, lr, batch), TIMESCALE
    return Advice(
        law=law.name,
        source=law.source,
        lr=lr,
        batch_tokens=batch,
        warmup_tokens=law.warmup_tokens(run) if law.warmup_tokens else None,
        weight_decay=decay,
        decay_source=decay_source if decay is not None else "",
        beta2=law.beta2(batch) if law.beta2 and batch is not None else None,
        schedule=law.schedule,
        ranges=tuple(each for each, _ in law.ranges),
        outside=tuple(_beyond(each, of(run)) for each, of in law.ranges if not each.holds(of(run))),
        note=law.note,
    )


def _beyond(fitted: Range, value: float) -> str:
    return f"{fitted.what} {short(value)}{fitted.unit}, fitted from {short(fitted.low)} to {short(fitted.high)}"


def short(value: float) -> str:
    """Three digits with K, M, B or T; powers of ten beyond."""
    for limit, unit, scale in ((1e3, "", 1.0), (1e6, "K", 1e3), (1e9, "M", 1e6), (1e12, "B", 1e9), (1e15, "T", 1e12)):
        if 0.01 <= abs(value) < limit:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.2e}".replace("e+", "e")


def parse_count(text: str) -> float:
    """A count as people write it: 125M, 2.5B, 1e9, 300_000_000. ValueError for what is none, or not above 0."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    word = text.strip().upper()
    scale = units.get(word[-1:], 1.0)
    value = float(word[:-1] if scale != 1.0 else word) * scale
    if not 0.0 < value < math.inf:
        raise ValueError(text)
    return value
