"""How a run went, in figures, from its folder alone: what the end of training, ``runs show`` and the report tell."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from surefoot.monitor.facts import RunFacts, Sample, Yardstick
from surefoot.monitor.role_figures import RoleFigures, role_figures
from surefoot.monitor.run import Columns, Run, Status

FINAL_STEPS = 50
"""Most updates whose mean is the final training loss, a twentieth of the run otherwise: one batch alone is noise."""


@dataclass(frozen=True)
class Domain:
    """Held-out figures of one domain, and what general-purpose compressors need for the same bytes (NaN: not measured)."""

    name: str
    step: int
    """Of the evaluation."""
    loss: float
    """Nats per token."""
    bits_per_byte: float
    first_bits_per_byte: float
    """At the first evaluation of this run."""
    zlib_bits_per_byte: float
    xz_bits_per_byte: float

    @property
    def yardstick(self) -> str:
        """How it compares, in words; empty where nothing was measured."""
        if math.isnan(self.zlib_bits_per_byte):
            return ""
        if self.bits_per_byte < min(self.zlib_bits_per_byte, self.xz_bits_per_byte):
            best = min(self.zlib_bits_per_byte, self.xz_bits_per_byte)
            return f"{100 * (1 - self.bits_per_byte / best):.0f} % fewer bits than the better compressor"
        return "a general-purpose compressor still does better"


@dataclass(frozen=True)
class Summary:
    """The figures of a run as it stands."""

    name: str
    folder: str
    parent: str
    """Folder of the run this was forked from; empty for a run of its own."""
    state: str
    reason: str
    steps: int
    """Where it is to end; 0 when unknown."""
    step: int
    batch_index: int
    """Batches consumed."""
    tokens: int
    final_loss: float
    """Mean training loss of the last twentieth of the updates, FINAL_STEPS at most; nats per token."""
    last_loss: float
    wall_s: float
    """Time a job was at work on this run, all attempts, as far as the folder tells."""
    train_s: float
    """Time of the steps that count."""
    lost_s: float
    """Time of steps that a rollback or resume took the place of."""
    tokens_per_s: float
    """Median over the steps that count."""
    mfu: float
    """Median; NaN where it was not measured."""
    critical_batch: float
    """Tokens, by the last measurement of the gradient noise scale; NaN where there is none."""
    memory_gib: float
    skipped: int
    rollbacks: int
    read_again: int
    """Batches that were read again without the documents that alone had spoilt them."""
    lr_events: int
    """Decisions that changed the learning rate."""
    resumes: int
    excluded: tuple[str, ...]
    """Documents blanked by decisions."""
    checkpoint: str
    """Newest surviving one; empty where there is none."""
    state_digest: str
    """Of the newest surviving checkpoint or the finish."""
    domains: tuple[Domain, ...]
    roles: tuple[RoleFigures, ...]
    samples: tuple[Sample, ...]
    facts: RunFacts | None
    how_to_continue: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; what is unknown is null."""
        return {key: _json(value) for key, value in asdict(self).items()}


def summarise(run: Run) -> Summary:
    """Read a run and condense it; works on one that is running or was killed."""
    metrics, status = run.metrics(), run.status()
    trained = ~np.nan_to_num(column(metrics, "train/skipped")).astype(bool)
    losses = column(metrics, "train/loss")[trained]
    losses = losses[np.isfinite(losses)]
    event = run.last_event("facts")
    facts = RunFacts.read(event) if event else None
    steps = _goal(run, facts)
    checkpoints = run.ledger.surviving_checkpoints()
    count = len(metrics["step"])
    return Summary(
        name=run.name,
        folder=str(run.folder),
        parent=str(run.ledger.lineage["parent"]) if run.ledger.lineage else "",
        state=status.state,
        reason=status.reason,
        steps=steps,
        step=max(int(metrics["step"][-1]) if count else 0, 0),
        batch_index=int(metrics["batch_index"][-1]) + 1 if count else 0,
        tokens=max(int(metrics["tokens"].max()), 0) if count else 0,
        final_loss=float(losses[-min(FINAL_STEPS, -(-len(losses) // 20)) :].mean()) if len(losses) else math.nan,
        last_loss=float(losses[-1]) if len(losses) else math.nan,
        wall_s=_wall_s(run),
        train_s=float(np.nansum(column(metrics, "perf/step_s"))),
        lost_s=float(sum(float(row.get("perf/step_s", 0.0)) for row in run.abandoned_rows)),
        tokens_per_s=_median(column(metrics, "perf/tokens_per_s")),
        mfu=_median(column(metrics, "perf/mfu")),
        critical_batch=_last(column(metrics, "train/noise_scale")),
        memory_gib=_largest(column(metrics, "perf/memory_gib")),
        skipped=len(run.ledger.skips()),
        read_again=sum(a.reason == "rollback" and a.checkpoint == "in place" for a in run.attempts),
        rollbacks=sum(a.reason == "rollback" and a.checkpoint != "in place" for a in run.attempts),
        lr_events=len(run.ledger.of_kind("lr_event")),
        resumes=sum(attempt.reason == "resume" for attempt in run.attempts),
        excluded=tuple(item.document for item in run.ledger.exclusions),
        checkpoint=checkpoints[-1].name if checkpoints else "",
        state_digest=_digest(run),
        domains=domains(run, metrics),
        roles=role_figures(metrics),
        samples=_samples(run),
        facts=facts,
        how_to_continue=_how_to_continue(run, status),
    )


def _goal(run: Run, facts: RunFacts | None) -> int:
    """The run's last step: as its clock decided, as it was worked out at the start, or as the config says."""
    by_steps = run.config.get("bound", {"kind": "steps"})["kind"] == "steps"
    configured = int(run.config.get("steps", 0)) if by_steps else 0
    return run.ledger.horizon or configured or (facts.steps if facts else 0)


def column(metrics: Columns, name: str) -> Any:
    """A metric's array; NaN throughout where the run never wrote it."""
    return metrics[name] if name in metrics else np.full(len(metrics["step"]), np.nan)


def domain_names(metrics: Mapping[str, Any]) -> list[str]:
    """Domains that were evaluated, in the order of their first row."""
    found = [name.split("/")[1] for name in metrics if name.startswith("eval/") and name.endswith("/bits_per_byte")]
    return list(dict.fromkeys(found))


def domains(run: Run, metrics: Columns) -> tuple[Domain, ...]:
    """Held-out figures of every domain beside the compressors': of all its text at the end of the run, until then of the cadence's rows."""
    sticks = {e["domain"]: Yardstick.read(e) for e in run.events if e["kind"] == Yardstick.kind}
    finish = run.ledger.finish or {}
    whole: dict[str, float] = finish.get("bits_per_byte", {})
    found = []
    for name in dict.fromkeys([*domain_names(metrics), *whole]):
        bits, loss = column(metrics, f"eval/{name}/bits_per_byte"), column(metrics, f"eval/{name}/loss")
        places = np.flatnonzero(~np.isnan(bits))
        if not len(places) and name not in whole:
            continue
        last, stick = places[-1] if len(places) else -1, sticks.get(name)
        found.append(
            Domain(
                name=name,
                step=int(finish["step"] if whole else metrics["step"][last]),
                loss=float(finish["loss"][name] if whole else loss[last]),
                bits_per_byte=float(whole[name] if whole else bits[last]),
                first_bits_per_byte=float(bits[places[0]]) if len(places) else math.nan,
                zlib_bits_per_byte=stick.zlib_bits_per_byte if stick else math.nan,
                xz_bits_per_byte=stick.xz_bits_per_byte if stick else math.nan,
            )
        )
    return tuple(found)


def _samples(run: Run) -> tuple[Sample, ...]:
    newest = {event["domain"]: Sample.read(event) for event in run.events if event["kind"] == Sample.kind}
    return tuple(newest.values())


def _digest(run: Run) -> str:
    if run.ledger.finish:
        return str(run.ledger.finish["digest"])
    checkpoints = run.ledger.surviving_checkpoints()
    return checkpoints[-1].digest if checkpoints else ""


def _how_to_continue(run: Run, status: Status) -> str:
    if status.state == "finished":
        bound = "" if run.config.get("bound", {"kind": "steps"})["kind"] == "steps" else " --set bound.kind=steps"
        longer = f"{bound} --set steps={2 * status.step}"
        return f"surefoot fork {shlex.quote(str(run.folder))} --at {status.step}{longer}"
    argv = run.environment.get("argv")
    if not isinstance(argv, list) or not argv:
        return ""
    rest = [str(word) for word in argv[1:] if word not in ("--fresh", "--")]
    if run.ledger.halt:
        steps = ", ".join(str(c.step) for c in run.ledger.surviving_checkpoints()) or "none"
        return f"surefoot fork {shlex.quote(str(run.folder))} --at STEP --set optim.lr=LOWER   (checkpoints at steps: {steps})"
    ranks = int(run.environment.get("world_size", 1))
    launcher = [] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks), "-m", "surefoot.cli.main", "--"]
    return shlex.join([*(launcher or ["surefoot"]), *rest])


def _wall_s(run: Run) -> float:
    """From each start or resume to the last sign of life before the next."""
    signs = [row["time"] for row in run.ledger.rows] + [event["time"] for event in run.events]
    signs.append(run.heartbeat.get("time", 0.0))
    starts = [attempt.time for attempt in run.attempts if attempt.reason != "rollback"]
    ends = [max(t for t in signs if t < end) for end in starts[1:]] + [max(signs)]
    return float(sum(end - start for start, end in zip(starts, ends, strict=True))) if starts else 0.0


def _median(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _last(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else math.nan


def _largest(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else math.nan


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    return [_json(item) for item in value] if isinstance(value, list | tuple) else value
