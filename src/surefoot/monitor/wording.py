"""Numbers as a person reads them."""

import math


def short(value: float, digits: int = 3) -> str:
    """41234 as 41.2k, 2100000 as 2.10M; below a thousand the number itself."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # What rounds up to the next thousand belongs to the next letter.
        if abs(value) >= size * (1 - 0.5 * 10**-digits):
            return f"{value / size:#.{digits}g}".rstrip(".") + letter
    return f"{value:.0f}" if value == round(value) else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """0:42, 12:07, 3:25:10, 2 d 04:10."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def rate(value: float) -> str:
    """A learning rate: 3e-3, 2.41e-3."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if value else "0"


def percent(share: float) -> str:
    """0.523 as 52 %."""
    return f"{100 * share:.0f} %" if math.isfinite(share) else "? %"


def several(count: int, word: str) -> str:
    """1 skipped step, 2 skipped steps, no skipped steps."""
    return f"{count if count else 'no'} {word}{'' if count == 1 else 's'}" if count < 1000 else f"{count:,} {word}s"
