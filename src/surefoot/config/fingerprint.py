"""What decides the computation of a run, and what may change when it is continued."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from surefoot.config.codec import to_dict
from surefoot.config.diff import ABSENT, diff, flatten
from surefoot.config.errors import ConfigError, closest
from surefoot.config.run import RunConfig

LAYOUT = tuple(
    f"parallel.{name}"
    for name in (
        "data_parallel",
        "shard_size",
        "tp",
        "pp",
        "pipeline",
        "cp",
        "cp_attention",
        "recompute",
        "offload",
        "nccl",
        "micro_batch_size",
    )
)
"""Keys that say how the work is cut. Like the number of ranks they are no part of which run it is, only of its last bits; that they changed
is said at resume."""

FREE = (
    *LAYOUT,
    "log",
    "checkpoint",
    "parallel.timeout_s",
    "data.cache_dir",
    "guard.snapshots",
    "guard.snapshot_every",
    "guard.snapshot_budget_gib",
)
"""Keys that cannot change the surviving run, but for rounding: not in the fingerprint, free to change at resume."""

_QUOTE = '"'
_SHOWN = 3


def fingerprint(cfg: RunConfig) -> str:
    """16 hex digits of the SHA-256 of the settings that decide the computation, as canonical JSON."""
    decisive = {key: value for key, value in flatten(to_dict(cfg)).items() if not _under(key, FREE)}
    text = json.dumps(decisive, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layout_settings(cfg: RunConfig) -> dict[str, Any]:
    """The settings of the layout, as plain values by dotted key."""
    return {key: value for key, value in flatten(to_dict(cfg)).items() if _under(key, LAYOUT)}


def changed_computation(before: RunConfig, now: RunConfig, allowed: Iterable[str] = ()) -> list[str]:
    """The keys that decide the computation and differ, except those ``allowed`` (a key, or a table of keys)."""
    free = (*FREE, *allowed)
    return [key for key, _, _ in diff(before, now) if not _under(key, free)]


def refuse_changes(before: RunConfig, now: RunConfig, run: str, allowed: Sequence[str] = ()) -> None:
    """Raises ConfigError naming every changed setting that would make the continued run another run."""
    known = {**flatten(to_dict(before)), **flatten(to_dict(now))}
    problems = []
    for key in allowed:
        if not any(_under(name, (key,)) for name in known):
            near = closest(key, known)
            hint = f"; nearest: {near}" if near else ""
            problems.append(f"--allow-change {key}: {key} is not a setting{hint}")
    changed = set(changed_computation(before, now, allowed))
    rows = [row for row in diff(before, now) if row[0] in changed]
    problems += [f"{key} was {was} when {run} started and is {is_now} now" for key, was, is_now in rows]
    if rows:
        given = [(key, is_now) for key, _, is_now in rows if is_now != ABSENT]
        sets = "".join(f" --set {key}={is_now.strip(_QUOTE)}" for key, is_now in given[:_SHOWN])
        more = " ..." if len(given) > _SHOWN else ""
        allow = " ".join(f"--allow-change {key}" for key, _, _ in rows[:_SHOWN])
        allow += " ..." if len(rows) > _SHOWN else ""
        problems[-1] += (
            f"\nthis would be another run: `surefoot fork {run} --at STEP{sets}{more}` starts one from a checkpoint, "
            f"`--fresh` starts over, `{allow}` continues on your own responsibility"
        )
    if problems:
        raise ConfigError(problems)


def _under(key: str, prefixes: Iterable[str]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)
