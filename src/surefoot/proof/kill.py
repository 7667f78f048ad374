"""The kill test: SIGKILL at random times, restart, and at the end the run that was never killed.

    python -m surefoot.proof.kill [--kills 100] [--per-cell 10] [--out docs/proof] [--seed 0]

Each cell kills a rehearsed run (with a skipped step, a rollback and an exclusion in it) a number of times: a third of the kills come
at uniformly random moments, the others a random moment after a save, a ledger append or a rollback has begun. It then lets it end, and compares it with the same run unkilled: weights, moments, counters, every surviving row, the audit of samples. One
result file per cell; cells that have one are not run again. The summary table is written from the files.
"""

import argparse
import contextlib
import dataclasses
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.config.run import RunConfig
from surefoot.data.audit import ConsumedBatch, audit
from surefoot.data.build import prepare
from surefoot.data.loader import Loader
from surefoot.monitor import ledger_file
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import Script, rehearsal, rehearse, write_corpus
from surefoot.train import acting, checkpoint
from surefoot.train.opening import commit_of

PLACES = ("save", "ledger", "rollback")
"""What a kill can land in. A board that parent and child share has two bytes for each: under way or not, and how often it has begun."""
AIMS = {"save": 0.02, "ledger": 0.004, "rollback": 0.02}
"""Seconds after the beginning of each within which an aimed kill comes."""
GIVE_UP_AFTER = 500
"""Restarts of one run without an end: then something is wrong."""


@dataclass(frozen=True)
class Aim:
    """When a kill comes: ``delay_s`` after the start, or after ``place`` has begun for the ``times``-th time."""

    delay_s: float
    place: str = ""
    times: int = 0


@dataclass(frozen=True)
class Kill:
    """One SIGKILL."""

    aim: Aim
    places: tuple[str, ...]
    """What it landed in; empty for the rest of the loop."""


@dataclass(frozen=True)
class Cell:
    """What one cell of the proof found."""

    seed: int
    asynchronous: bool
    """Saves in the background (odd seeds) or while the step waits."""
    kills: int
    in_save: int
    in_ledger: int
    in_rollback: int
    runs: int
    """Runs that were killed until they ended; each was compared."""
    same: bool
    problems: tuple[str, ...]


def kill_config(corpus: Path, cache: Path, *, asynchronous: bool) -> RunConfig:
    """The rehearsal with a checkpoint every other step: a third of the time and more is saving."""
    config = rehearsal(corpus, cache, steps=20)
    every = dataclasses.replace(config.checkpoint, every=2, keep_last=2, asynchronous=asynchronous)
    return dataclasses.replace(config, checkpoint=every, eval=dataclasses.replace(config.eval, every=7))


def run_cell(seed: int, num_kills: int, folder: Path) -> Cell:
    """Kill runs until ``num_kills`` kills have landed, let the last one end, and compare every one with the unkilled run."""
    draw = random.Random(seed)
    write_corpus(folder / "texts")
    config = kill_config(folder / "texts", folder / "cache", asynchronous=bool(seed % 2))
    loader = Loader(config.data, prepare(config.data), config.seed)
    document = _document_of(loader, 13)
    script = Script(nan_batches=(5,), rollback_after=13, rollback_to=9, exclude=(document,))
    begun = time.monotonic()
    _end(_fork(config, folder / "unkilled", script, None), None, None)
    whole = time.monotonic() - begun
    kills: list[Kill] = []
    problems: list[str] = []
    runs = 0
    while len(kills) < num_kills:
        runs += 1
        target = folder / f"killed-{runs}"
        kills += kill_until_it_ends(config, target, script, draw, num_kills - len(kills), whole)
        problems += differences(folder / "unkilled", target, loader)
        shutil.rmtree(target)
    return Cell(
        seed=seed,
        asynchronous=config.checkpoint.asynchronous,
        kills=len(kills),
        in_save=sum("save" in kill.places for kill in kills),
        in_ledger=sum("ledger" in kill.places for kill in kills),
        in_rollback=sum("rollback" in kill.places for kill in kills),
        runs=runs,
        same=not problems,
        problems=tuple(problems),
    )


def kill_until_it_ends(
    config: RunConfig, folder: Path, script: Script, draw: random.Random, most: int, whole_s: float
) -> list[Kill]:
    """Start, kill, start again .. until the run ends, which took ``whole_s`` unkilled; at most ``most`` kills."""
    kills: list[Kill] = []
    for _ in range(GIVE_UP_AFTER):
        board = mmap.mmap(-1, 2 * len(PLACES))
        pid = _fork(config, folder, script, board)
        aim = choose_aim(draw, whole_s) if len(kills) < most else None
        if _end(pid, aim, board):
            return kills
        assert aim is not None
        kills.append(Kill(aim, tuple(name for at, name in enumerate(PLACES) if board[at])))
    raise RuntimeError(f"{folder}: not ended after {GIVE_UP_AFTER} starts")


def choose_aim(draw: random.Random, whole_s: float) -> Aim:
    """A third of the time uniform over the run, else at one of the places, mostly a save."""
    if draw.random() < 1 / 3:
        return Aim(draw.uniform(0.0, whole_s))
    place = draw.choices(PLACES, weights=(4, 1, 1))[0]
    times = 1 if place == "rollback" else draw.randrange(1, 6)
    return Aim(draw.uniform(0.0, AIMS[place]), place, times)


def differences(unkilled: Path, killed: Path, loader: Loader) -> list[str]:
    """Sentences about what a killed run does not share with the unkilled one."""
    one, other = Run(unkilled), Run(killed)
    found = compare(one, other)
    problems = [] if found.same else [f"{killed.name}: rows differ: {found.first_difference}"]
    ends = [run.ledger.finish for run in (one, other)]
    if (
        ends[0] is None
        or ends[1] is None
        or any(ends[0][key] != ends[1][key] for key in ("digest", "step", "batch_index"))
    ):
        problems.append(f"{killed.name}: the end differs: {ends}")
    consumed = [
        ConsumedBatch(
            row["batch_index"], row["sample_digest"], tuple(row.get("excluded", ())), bool(row.get("skipped"))
        )
        for row in other.rows
    ]
    return problems + list(audit(consumed, loader, other.ledger.exclusions).mistakes)


def _document_of(loader: Loader, batch_index: int) -> str:
    source, _, row = loader.sample_ids(batch_index)[0].tolist()
    return loader.row_documents(source, row)[0].document


def _fork(config: RunConfig, folder: Path, script: Script, board: mmap.mmap | None) -> int:
    """Start the run in a forked child; its exit code is 0 when it has ended."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        with _marking(board) if board is not None else contextlib.nullcontext():
            code = 0 if rehearse(config, folder, script).reason == "done" else 2
    except BaseException:  # noqa: BLE001 - a child says everything to its parent by text and exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(pid: int, aim: Aim | None, board: mmap.mmap | None) -> bool:
    """Wait for a child; True when it ended by itself, False when it was killed. Raises RuntimeError when it failed."""
    deadline = time.monotonic() + aim.delay_s if aim and not aim.place else None
    while True:
        if deadline is None and aim and board and board[len(PLACES) + PLACES.index(aim.place)] >= aim.times:
            deadline = time.monotonic() + aim.delay_s
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if os.waitstatus_to_exitcode(status):
                raise RuntimeError(f"the run failed with exit code {os.waitstatus_to_exitcode(status)}, see above")
            return True
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            return os.WIFEXITED(status)
        time.sleep(0.0002)


@contextlib.contextmanager
def _marking(board: mmap.mmap) -> Iterator[None]:
    """Mark on the board what the child is in the middle of, by wrapping the functions that do it."""
    wrapped: list[tuple[Any, str, int]] = [
        (checkpoint, "_write", 0),
        (ledger_file.LedgerFile, "append", 1),
        (acting, "roll_back", 2),
    ]
    for owner, name, at in wrapped:
        setattr(owner, name, _marked(getattr(owner, name), board, at))
    yield


def _marked(function: Callable[..., Any], board: mmap.mmap, at: int) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        board[at] = 1
        board[len(PLACES) + at] = min(255, board[len(PLACES) + at] + 1)
        try:
            return function(*args, **kwargs)
        finally:
            board[at] = 0

    return wrapper


def main() -> int:
    """Run the cells that have no result yet, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--per-cell", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/proof"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(-(-args.kills // args.per_cell)):
        seed = args.seed + number
        result = args.out / f"kill-{seed:04d}.json"
        if result.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            cell = run_cell(seed, args.per_cell, Path(folder))
        facts = dataclasses.asdict(cell) | {
            "command": " ".join([Path(sys.executable).name, "-m", "surefoot.proof.kill", *sys.argv[1:]])
        }
        result.write_text(json.dumps(facts | {"commit": commit_of(), "torch": torch.__version__}, indent=1) + "\n")
        print(f"cell {seed}: {cell.kills} kills, {cell.in_save} in a save, same end: {cell.same}", flush=True)
    text = table(args.out)
    (args.out / "KILL.md").write_text(text)
    print(text)
    return 0 if all(json.loads(p.read_text())["same"] for p in args.out.glob("kill-*.json")) else 1


def table(folder: Path) -> str:
    """The results in ``folder`` as Markdown; a test holds KILL.md to it."""
    cells = [json.loads(path.read_text()) for path in sorted(folder.glob("kill-*.json"))]
    keys = ("kills", "in_save", "in_ledger", "in_rollback", "runs")
    lines = [
        "# The kill test",
        "",
        "Written by `python -m surefoot.proof.kill` from the result files beside it; not by hand.",
        "",
        "| seed | saves | kills | in a save | in a ledger append | in a rollback | runs | same end as the unkilled run | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c['seed']} | {'background' if c['asynchronous'] else 'waited for'} | {' | '.join(str(c[key]) for key in keys)} | {'yes' if c['same'] else 'NO'} | {c['commit'][:10]} |"
        for c in cells
    ]
    sums = {key: sum(c[key] for c in cells) for key in keys}
    lines.append(
        f"| all | | {' | '.join(str(sums[key]) for key in keys)} | {'yes' if all(c['same'] for c in cells) else 'NO'} | |"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
