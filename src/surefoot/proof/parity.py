"""Layouts held against one process: the same small run, row by row and precision by precision."""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.config.fingerprint import fingerprint
from surefoot.config.run import RunConfig
from surefoot.config.validate import validate
from surefoot.parallel.apply import compiles
from surefoot.parallel.fork_launch import run_ranks
from surefoot.proof.parity_bounds import bounds_of
from surefoot.proof.parity_by_hand import compare_by_hand, uncountable
from surefoot.proof.parity_compare import Deviation, compare, compare_states, worst_of
from surefoot.proof.parity_course import Course, run_course
from surefoot.proof.parity_layouts import Cell, Leg, laid_out, with_precision, with_variant
from surefoot.proof.parity_text import reading
from surefoot.proof.parity_trace import Incoherent, Trace, whole_trace
from surefoot.recipes.shrink import shrink

BATCHES = 3
"""Consumed by a run; the third is the first after a resume."""
TIMEOUT_S = 300.0
"""For one leg of one cell: seconds alone, more on a machine that has other work."""
BYTES = 8
"""Damaged, so that a sign or a leading digit is among them."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One cell of the matrix."""

    cell: str
    precision: str
    worst: str
    """The tensor or metric that deviates most, beside its bound."""
    deviation: float
    bound: float
    compared: int
    """Comparisons made."""
    beyond: tuple[str, ...]
    """What is beyond its bound, furthest first, with its deviation."""
    largest: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Of each kind of comparison the largest deviation and what shows it."""
    left_out: str = ""
    """Why the cell was not run: the recipe's own rules, or the machine."""
    error: str = ""
    """What the run broke off with."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Nothing is beyond its bound; of what was left out nothing is known."""
        return not self.beyond and not self.error


class Parity:
    """A recipe's small form, and its one-process runs, which are made once."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """``config``: the recipe at its own size; ``folder`` is for texts and runs. Raises ConfigError, DataError."""
        self.folder = folder
        self.config = reading(shrink(config), folder)
        self.fingerprint = fingerprint(shrink(config))
        """Of all settings but where the texts lie."""
        self._alone: dict[tuple[str, str], Trace] = {}

    def configured(self, variant: str, precision: str) -> RunConfig:
        """The small run, without a layout."""
        return with_precision(with_variant(self.config, variant), precision)

    def alone(self, variant: str, precision: str) -> Trace:
        """The run as one process."""
        key = (variant, precision)
        if key not in self._alone:
            self._alone[key] = self.run(self.configured(variant, precision), (Leg(),))[-1]
        return self._alone[key]

    def run(self, config: RunConfig, legs: Sequence[Leg], *, damaged: bool = False) -> list[Trace]:
        """Traces of the legs of one run, the last one that of the whole run."""
        with tempfile.TemporaryDirectory(prefix="run-", dir=self.folder) as folder:
            return self._run_in(Path(folder) / "run", config, legs, damaged=damaged)

    def _run_in(self, folder: Path, config: RunConfig, legs: Sequence[Leg], *, damaged: bool) -> list[Trace]:
        traces: list[Trace] = []
        spoilt = ""
        for number, leg in enumerate(legs):
            last = number == len(legs) - 1
            course = Course(
                config=laid_out(config, leg), folder=folder, stop_after=BATCHES - 1 if last else BATCHES - 2
            )
            traces.append(whole_trace(run_ranks(leg.ranks, run_course, course, timeout_s=TIMEOUT_S)))
            if damaged and not last:
                spoilt = flip_newest(folder)
        if spoilt and spoilt in traces[-1].opening:
            raise Incoherent(f"the damaged checkpoint {spoilt} was opened: {traces[-1].opening}")
        if len(traces) > 1:
            traces.append(joined(traces))
        return traces

    def judge(self, cell: Cell, precision: str) -> Verdict:
        """Run a cell and hold it against the run of one process; what goes wrong in it is its verdict."""
        begun = time.monotonic()
        config = self.configured(cell.variant, precision)
        as_it_is = bool(cell.variant) and config == self.configured("", precision)
        reason = f"{cell.variant} changes nothing in this recipe" if as_it_is else left_out(config, cell)
        if reason:
            return Verdict(
                cell=cell.title,
                precision=precision,
                worst="",
                deviation=0.0,
                bound=0.0,
                compared=0,
                beyond=(),
                left_out=reason,
            )
        try:
            deviations = self.deviations(cell, precision)
        except Incoherent as error:
            deviations = [Deviation(str(error), math.inf, "sample")]
        except Exception as error:  # noqa: BLE001 - whatever a run breaks off with is the cell's result, and the others go on
            text = f"{type(error).__name__}: {error}"
            return Verdict(
                cell=cell.title, precision=precision, worst="", deviation=math.inf, bound=0.0, compared=0, beyond=(), error=text,
                seconds=time.monotonic() - begun,
            )  # fmt: skip
        return self._verdict(cell, precision, deviations, time.monotonic() - begun)

    def deviations(self, cell: Cell, precision: str) -> list[Deviation]:
        """All comparisons of a cell."""
        config, alone = self.configured(cell.variant, precision), self.alone(cell.variant, precision)
        if not cell.legs:
            return compare_by_hand(config, alone)
        traces = self.run(config, cell.legs, damaged=cell.damaged)
        found = compare(traces[-1], alone, exact=precision == "fp64")
        if len(cell.legs) > 1 and not cell.damaged:
            before, after = traces[0], traces[1]
            step = max(before.states)
            found += [
                Deviation(d.what, d.value, "sample")
                for d in compare_states(after.states.get(step, {}), before.states[step], f"restored at step {step}")
            ]
        return found

    def _verdict(self, cell: Cell, precision: str, deviations: Sequence[Deviation], seconds: float) -> Verdict:
        bounds = bounds_of(precision, self.config.optim, products_whole=cell.products_whole)
        kinds = dict.fromkeys(d.kind for d in deviations)
        worst = worst_of(deviations, bounds)
        beyond = sorted((d for d in deviations if d.share(bounds) > 1), key=lambda d: -d.share(bounds))
        return Verdict(
            cell=cell.title,
            precision=precision,
            worst=worst.what if worst.value else "nothing",
            deviation=worst.value,
            bound=bounds.of(worst.kind),
            compared=len(deviations),
            beyond=tuple(f"{d.what}: {d.value:.1e}" for d in beyond),
            largest={kind: max((d.value, d.what) for d in deviations if d.kind == kind) for kind in kinds},
            seconds=seconds,
        )


@contextmanager
def parity_of(config: RunConfig) -> Iterator[Parity]:
    """Parity in a folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="surefoot-parity-") as folder:
        yield Parity(config, Path(folder))


def left_out(config: RunConfig, cell: Cell) -> str:
    """Why a cell cannot be run: the rule of the config that it breaks, or what the machine lacks; empty where it can."""
    if not cell.legs:
        return uncountable(config)
    for leg in cell.legs:
        mine = laid_out(config, leg)
        if problems := validate(mine, leg.ranks):
            return problems[0]
        if mine.parallel.compile == "on":
            try:
                compiles(mine.parallel)
            except Exception as error:  # noqa: BLE001 - EnvironmentFault, whose text is the reason
                return str(error)
    return ""


def joined(traces: Sequence[Trace]) -> Trace:
    """The legs of a run as one: batches consumed again count as consumed the last time."""
    batches = {batch.batch_index: batch for trace in traces for batch in trace.batches}
    states = {step: state for trace in reversed(traces) for step, state in trace.states.items()}
    last = traces[-1]
    return Trace(
        batches=[batches[index] for index in sorted(batches)],
        gradient=traces[0].gradient,
        states={step: states[step] for step in (0, 1, max(states))},
        memory=last.memory,
        opening=last.opening,
        warnings=last.warnings,
    )


def flip_newest(folder: Path) -> str:
    """Turn over a bit of each of a few bytes in the middle of the largest file of the newest checkpoint, whose name is returned."""
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: path.name)
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    middle = len(content) // 2
    content[middle : middle + BYTES] = bytes(byte ^ 0x80 for byte in content[middle : middle + BYTES])
    largest.write_bytes(content)
    return newest.name
