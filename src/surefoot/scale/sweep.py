"""A sweep: many settings of one recipe, some seeds of each, and what came of every one."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.data.build import Progress
from surefoot.monitor.durable import write_atomic
from surefoot.scale.sweep_axes import Combination
from surefoot.scale.sweep_page import best_flags, sweep_page
from surefoot.scale.sweep_score import Line, Score, score
from surefoot.scale.trials import Trial, TrialResult, run_trials, to_plain

SWEEP_FILE, PAGE_FILE = "sweep.json", "sweep.html"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is swept, and where it goes."""

    recipe: str
    combinations: Sequence[Combination]
    folder: Path
    command: str
    """That runs it, and goes on with it."""
    common: str = ""
    """Flags that all runs have, as ``surefoot train`` takes them."""


def run_sweep(
    sweep: Sweep,
    *,
    jobs: int,
    on_done: Callable[[TrialResult, Score], None],
    on_tick: Callable[[Sequence[str]], None],
    keep_checkpoints: bool,
    progress: Progress | None = None,
) -> Score:
    """Run the trials that are missing; sweep.json and sweep.html hold, at any time, what is known. Raises what ``run_trials`` raises."""
    results: dict[str, TrialResult] = {}

    def done(result: TrialResult) -> None:
        results[result.name] = result
        found = score(sweep.combinations, results)
        write(sweep, found)
        on_done(result, found)

    run_trials(
        [Trial(name=each.name, config=each.config) for each in sweep.combinations],
        sweep.folder,
        jobs=jobs,
        on_done=done,
        on_tick=on_tick,
        keep_checkpoints=keep_checkpoints,
        progress=progress,
    )
    return score(sweep.combinations, results)


def write(sweep: Sweep, found: Score) -> None:
    """The two files, each whole or not there."""
    facts = json.dumps(to_facts(sweep, found), indent=1, allow_nan=False)
    write_atomic(sweep.folder / SWEEP_FILE, facts + "\n", sync=False)
    page = sweep_page(
        found, title=f"Sweep of {sweep.recipe}", recipe=sweep.recipe, command=sweep.command, common=sweep.common
    )
    write_atomic(sweep.folder / PAGE_FILE, page, sync=False)


def to_facts(sweep: Sweep, found: Score) -> dict[str, Any]:
    """A sweep as plain JSON values: every run of every setting, loss against each leaf, the best."""
    best = found.best
    return {
        "recipe": sweep.recipe,
        "command": sweep.command,
        "keys": list(found.keys),
        "best": None
        if best is None
        else {"values": dict(best.values), "flags": best_flags(best, sweep.common), **_spread(best)},
        "remarks": found.remarks(),
        "settings": [
            {
                "values": dict(line.values),
                **_spread(line),
                "runs": [
                    {"seed": each.seed, **(to_plain(r) if r else {"name": each.name, "ending": "to do"})}
                    for each, r in line.runs
                ],
            }
            for line in found.lines
        ],
        "leaves": {
            key: [
                {
                    "value": value.text,
                    "best": None if value.best is None else {"values": dict(value.best.values), **_spread(value.best)},
                    "mean": _plain(value.mean),
                    "runs": value.count,
                    "diverged": value.diverged,
                }
                for value in found.leaf(key)
            ]
            for key in found.keys
        },
    }


def _spread(line: Line) -> dict[str, float | int | None]:
    spread = line.spread
    return {
        "loss": _plain(spread.mean),
        "loss_min": _plain(spread.low),
        "loss_max": _plain(spread.high),
        "loss_std": _plain(spread.std),
        "seeds_done": spread.count,
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
