"""One row of the ledger: its kinds, its fields, its place in the chain of hashes."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from surefoot.config.data import Exclusion

KINDS: Mapping[str, tuple[str, ...]] = {
    "attempt": ("attempt", "reason", "from_step", "from_batch", "checkpoint", "exclude", "cause"),
    "checkpoint": ("name", "step", "batch_index", "attempt", "digest"),
    "certified": ("name",),
    "skip": ("batch_index", "step", "cause"),
    "verdict": (),
    "lr_event": ("start_step", "factor", "hold_steps", "ramp_steps", "settle", "cause", "batch_index"),
    "horizon": ("last_step", "step", "batch_index"),
    "lineage": ("parent", "step", "diff"),
    "finish": ("step", "batch_index", "digest"),
    "stop": ("reason",),
}
"""Every kind of row and the fields it cannot do without."""

REASONS = ("start", "resume", "rollback", "fork")
"""Why an attempt begins."""

Row = Mapping[str, Any]


class LedgerError(ValueError):
    """A row that cannot be part of this ledger; ``n`` is its place."""

    def __init__(self, n: int, problem: str) -> None:
        super().__init__(f"ledger row {n}: {problem}")
        self.n = n


def chained_hash(previous: str, row: Row) -> str:
    """16 hex of sha256(previous hash + canonical JSON of the row without ``hash`` and ``time``)."""
    body = {key: value for key, value in row.items() if key not in ("hash", "time")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256((previous + text).encode()).hexdigest()[:16]


def plain_value(value: Any) -> Any:
    """A JSON value that reads back equal: tuples become lists, numbers that are not finite their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, Exclusion):
        return {"document": value.document, "from_batch": value.from_batch}
    return value
