"""Which documents of a batch stand out, by loss and by text."""

import math
import statistics
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from surefoot.guard.evidence import Candidate, Suspect

STANDS_OUT = 4.0
"""Sigmas of loss from which a document is worth a pass without it."""
MAX_PERIOD = 13
REPETITIONS = 32
"""A run is at least so many repetitions of a period of 1 to 13 tokens (the published rule, OLMo 2 arXiv:2501.00656). In a piece with no room
for them half of it must repeat, and at least ``FEWEST`` times."""
FEWEST = 4
TOKEN_VARIANCE = 4.0
"""Of one token's loss, nats^2: the mean of a piece with n targets wanders by this over n, however alike the documents are."""
LEAST_SPREAD = 0.05
"""Nats per token: a domain whose documents hardly differ does not make every other one a suspect."""
READ_CLOSELY = 64
"""Candidates whose text is looked at: those with the most unusual losses."""
TEXT_WEIGHT = 4.0
"""Sigmas that one oddity of the text counts for in the order of suspicion."""
FEW_TOKENS = 32
"""Pieces below this length say nothing about entropy or compression."""


def rank(
    candidates: Sequence[Candidate], expected: Callable[[str], tuple[float, float]], keep: int = 8
) -> tuple[Suspect, ...]:
    """The ``keep`` most suspect documents, most suspect first; one piece of each, its worst.

    ``expected`` gives mean and spread of a domain's document losses lately, NaN where unknown: then the other candidates are the measure.
    The z is two-sided: far too easy is as odd as far too hard. Suspicion is |z| plus ``TEXT_WEIGHT`` for each oddity of the text; where
    losses are not finite, only the text tells one from another. Ties go by row.
    """
    among = _spread_among([c.loss for c in candidates if math.isfinite(c.loss)])
    scored = [(_z(c, expected(c.domain), among), c) for c in candidates]
    scored.sort(key=lambda pair: (-abs(pair[0]), pair[1].row, pair[1].document))
    read = [_suspect(c, z, expected(c.domain)) for z, c in scored[: max(READ_CLOSELY, keep)]]
    read.sort(key=lambda pair: (-pair[0], -pair[1].repetition, pair[1].row, pair[1].document))
    worst: dict[str, Suspect] = {}
    for _, suspect in read:
        worst.setdefault(suspect.document, suspect)
    return tuple(worst.values())[:keep]


def repetition(tokens: Sequence[int]) -> float:
    """Share of tokens inside a run of repetitions of a period of 1 to 13 tokens."""
    inside = bytearray(len(tokens))
    for period in range(1, min(MAX_PERIOD, len(tokens) // 2) + 1):
        needed = min(REPETITIONS * period, max(FEWEST * period, -(-len(tokens) // 2)))
        start = 0
        for at in range(period, len(tokens) + 1):
            if at < len(tokens) and tokens[at] == tokens[at - period]:
                continue
            # The run is tokens[start:at]: all of it repeats at this period.
            if at - start >= needed:
                inside[start:at] = b"\x01" * (at - start)
            start = at - period + 1
    return sum(inside) / len(tokens) if tokens else 0.0


def entropy(tokens: Sequence[int]) -> float:
    """Entropy of the token frequencies, bits per token."""
    total = len(tokens)
    return sum(n / total * math.log2(total / n) for n in Counter(tokens).values())


def compression(tokens: Sequence[int]) -> float:
    """Compressed over plain length of the ids, in the fewest of 1, 2 or 4 bytes that hold them; 1 for none."""
    if not tokens:
        return 1.0
    largest = max(tokens)
    plain = array("B" if largest < 1 << 8 else "H" if largest < 1 << 16 else "I", tokens).tobytes()
    return len(zlib.compress(plain, 9)) / len(plain)


def stands_out(suspect: Suspect) -> bool:
    """Its loss is so unusual that a pass without it is worth taking."""
    return not math.isfinite(suspect.loss) or abs(suspect.z) >= STANDS_OUT


def _spread_among(losses: Sequence[float]) -> tuple[float, float]:
    """Median and robust spread of the batch's own documents; NaN for fewer than five."""
    if len(losses) < 5:
        return math.nan, math.nan
    middle = statistics.median(losses)
    return middle, 1.4826 * statistics.median(abs(loss - middle) for loss in losses)


def _z(candidate: Candidate, expected: tuple[float, float], among: tuple[float, float]) -> float:
    """Sigmas from its domain's mean; infinite where the loss is not finite, 0 where nothing is known to compare with."""
    if not math.isfinite(candidate.loss):
        return math.inf
    mean, spread = expected if all(map(math.isfinite, expected)) else among
    if not math.isfinite(mean):
        return 0.0
    variance = max(spread, LEAST_SPREAD) ** 2 + TOKEN_VARIANCE / max(1, candidate.num_targets)
    return (candidate.loss - mean) / math.sqrt(variance)


def _suspect(candidate: Candidate, z: float, expected: tuple[float, float]) -> tuple[float, Suspect]:
    """Its suspicion, and the candidate with its features and why it stands out."""
    tokens = candidate.tokens
    repeated, bits, packed = repetition(tokens), entropy(tokens), compression(tokens)
    oddities = _oddities(len(tokens), repeated, bits, packed)
    suspect = Suspect(
        document=candidate.document,
        domain=candidate.domain,
        row=candidate.row,
        loss=candidate.loss,
        z=z,
        repetition=repeated,
        entropy=bits,
        compression=packed,
        reasons=(*_about_loss(candidate, z, expected[0]), *oddities),
        text=candidate.text,
    )
    return abs(z) + TEXT_WEIGHT * len(oddities), suspect


def _about_loss(candidate: Candidate, z: float, mean: float) -> tuple[str, ...]:
    if not math.isfinite(candidate.loss):
        return ("its loss is not finite",)
    if abs(z) < STANDS_OUT:
        return ()
    normal = f" where {mean:.2f} is normal for {candidate.domain}" if math.isfinite(mean) else ""
    return (f"loss {candidate.loss:.2f} nats{normal} ({z:+.0f} sigma)",)


def _oddities(length: int, repeated: float, bits: float, packed: float) -> tuple[str, ...]:
    """Phrases for what is odd about the text itself; each oddity once, repetition before its symptoms."""
    if repeated >= 0.25:
        return (f"{100 * repeated:.0f} % of its tokens repeat the same few over and over",)
    if length < FEW_TOKENS:
        return ()
    if bits < 2.0:
        return (f"only {bits:.1f} bits per token: hardly more than a few different tokens",)
    if packed < 0.15:
        return (f"its tokens compress to {100 * packed:.0f} %: copies of itself",)
    if packed > 0.98 and length >= 4 * FEW_TOKENS:
        return ("its tokens do not compress at all, like random ones",)
    return ()
