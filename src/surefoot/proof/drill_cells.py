"""The cells of the drill: which there are, and running those that have no result yet, a few processes at a time."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.data.build import prepare
from surefoot.proof.drill import Base, Task, base_config, run_cell
from surefoot.proof.fault_catalogue import FAULTS, SHARES
from surefoot.proof.resumable import run_missing

Cell = Mapping[str, Any]
Say = Callable[[str], None]
SEEDS = (0, 1, 2, 3, 4)
"""Of the score; calibration takes 100 and up."""
DILUTED_SEEDS = 3
"""As many of the seeds are run with diluted faults."""
NOISE_SKIPS = (1, 4, 8)
"""Healthy batches that the runs skip which say how far a run's end moves by chance."""
PREFIX = {"A": "calibration-", "B": ""}


def share_code(share: float) -> str:
    """A share of tokens in a file's name."""
    return "full" if share >= 1 else f"{share * 100:g}pc".replace(".", "")


def task_name(fault: str, share: float, seed: int, guarded: bool, base: Base = "B") -> str:
    """Name of the cell of a fault; without one, of a clean run."""
    what = f"{fault}-{share_code(share)}" if fault else "clean"
    return f"{PREFIX[base]}{what}-s{seed}-{'guarded' if guarded else 'unguarded'}"


def grid(seeds: Sequence[int], faults: Sequence[str], base: Base = "B") -> list[Task]:
    """All cells but the controls, which follow from the guarded ones: unguarded before guarded, undiluted before diluted."""
    tasks: list[Task] = []
    for seed in seeds:
        tasks += [_task("", 1.0, seed, guarded, base) for guarded in (False, True)]
        middle = base_config(base, seed, Path()).steps // 2
        tasks += [
            Task(
                name=f"{PREFIX[base]}noise-{count}-s{seed}",
                seed=seed,
                skips=tuple(range(middle, middle + count)),
                base=base,
            )
            for count in NOISE_SKIPS
        ]
    for share in (1.0, *SHARES):
        for fault in faults:
            if share == 1.0 or FAULTS[fault].dilutable:
                some = seeds if share == 1.0 else seeds[:DILUTED_SEEDS]
                tasks += [_task(fault, share, seed, guarded, base) for guarded in (False, True) for seed in some]
    return tasks


def controls(cells: Iterable[Cell]) -> list[Task]:
    """A control for every guarded run that ended having skipped batches: the same ones of a healthy run, skipped."""
    return [
        Task(
            name=f"{PREFIX[cell['base']]}control-{cell['name'].removeprefix(PREFIX[cell['base']])}",
            seed=cell["seed"],
            skips=tuple(cell["refused"]),
            base=cell["base"],
        )
        for cell in cells
        if cell["fault"]
        and cell["guarded"]
        and cell["refused"]
        and cell["ending"] == "done"
        and FAULTS[cell["fault"]].curable
    ]


def _task(fault: str, share: float, seed: int, guarded: bool, base: Base) -> Task:
    name = task_name(fault, share, seed, guarded, base)
    return Task(name=name, fault=fault, share=share, seed=seed, guarded=guarded, base=base)


def read_cells(folder: Path) -> list[Cell]:
    """Every finished cell in a folder, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def run_grid(
    tasks: Sequence[Task], folder: Path, cache: Path, command: str, *, workers: int = 2, say: Say = print
) -> list[str]:
    """Run the cells that ``folder`` has no result of, and return what went wrong, a sentence per cell that did not come to an end."""
    if any(not (folder / f"{task.name}.json").exists() for task in tasks):
        prepare(base_config("B", 0, cache).data)
    jobs = {task.name: partial(run_cell, task, cache, command) for task in tasks}
    return run_missing(jobs, folder, workers=workers, say=say, describe=describe)


def describe(cell: Cell) -> str:
    """One line for a log."""
    loss = "not finite" if cell["loss"] is None else f"{cell['loss']:.4f}"
    saw = f", {cell['first_kind']} after {cell['delay']} batches" if cell["detected"] else ""
    return f"{cell['ending']}, held-out loss {loss}{saw} ({cell['seconds']:.1f} s)"
