"""Rules between what ends a run, its schedule, its ramps, and what is measured on a cadence."""

from collections.abc import Iterator

from surefoot.config.data import DataConfig
from surefoot.config.optim import WSD, Constant, InverseSqrt, OptimConfig, Power
from surefoot.config.rule import Rule, nearest_divisors, nearest_multiples
from surefoot.config.run import ByFlops, ByHours, ByMoney, BySteps, ByTokens, LogConfig


def schedule_rules(
    optim: OptimConfig, steps: int, bound: BySteps | ByTokens | ByFlops | ByHours | ByMoney
) -> Iterator[Rule]:
    """A decay fits into its run, and a run whose end is not known beforehand has a schedule that can wait for it."""
    schedule, key = optim.schedule, "optim.schedule.decay_steps"
    if isinstance(bound, BySteps) and isinstance(schedule, WSD) and schedule.decay_steps > steps:
        yield Rule(
            (key, "steps"), f"{key}={schedule.decay_steps} is longer than the run: steps={steps}; at most {steps}"
        )
    if not isinstance(bound, ByHours | ByMoney) or isinstance(schedule, Constant | InverseSqrt | Power):
        return
    if not isinstance(schedule, WSD):
        text = f"optim.schedule.kind={schedule.kind!r} needs the last step from the start, which bound.kind={bound.kind!r} decides on the way"
        keys = ("optim.schedule.kind", "bound.kind")
        yield Rule(keys, f"{text}; use optim.schedule.kind='wsd', or bound.kind 'steps', 'tokens' or 'flops'")
    elif schedule.decay_fraction == 1 and not schedule.decay_steps:
        key = "optim.schedule.decay_fraction"
        text = f"{key}={schedule.decay_fraction} decays from the first step, before bound.kind={bound.kind!r} can say how steeply"
        yield Rule((key, "bound.kind"), f"{text}; below 1, such as 0.2")


def ramp_rules(optim: OptimConfig, data: DataConfig) -> Iterator[Rule]:
    """The rate follows a ramp only where there is one."""
    if optim.ramp_lr != "none" and not data.batch_stages:
        text = f"optim.ramp_lr={optim.ramp_lr!r} has no effect without data.batch_stages"
        yield Rule(("optim.ramp_lr", "data.batch_stages"), f"{text}; set it to 'none', or give stages")


def length_rules(data: DataConfig) -> Iterator[Rule]:
    """Stages of the length ramp are in order, and their pieces fill a row."""
    for n, stage in enumerate(data.length_stages):
        key = f"data.length_stages.{n}"
        if n and stage.start_batch <= data.length_stages[n - 1].start_batch:
            text = f"{key}.start_batch={stage.start_batch} must be above the stage before"
            yield Rule((f"{key}.start_batch",), f"{text}, {data.length_stages[n - 1].start_batch}")
        if stage.seq_len < 1 or data.seq_len % stage.seq_len:
            near = ", ".join(map(str, nearest_divisors(data.seq_len, stage.seq_len)))
            text = f"{key}.seq_len={stage.seq_len} does not divide data.seq_len={data.seq_len}, whose rows are cut into pieces of it"
            yield Rule((f"{key}.seq_len", "data.seq_len"), f"{text}; nearest: {near}")


def noise_rules(data: DataConfig, log: LogConfig, world_size: int = 1) -> Iterator[Rule]:
    """Every piece of a batch whose noise is measured has as many rows, on every rank."""
    if not log.noise_every or log.noise_pieces < 1:
        return
    key, unit = "log.noise_pieces", log.noise_pieces * world_size
    for size_key, size in batch_sizes(data):
        if size % unit:
            ranks = f" over {world_size} ranks" if world_size > 1 else ""
            rows = size // world_size
            if rows == 0:  # another rule says so
                continue
            pieces = ", ".join(str(n) for n in nearest_divisors(rows, log.noise_pieces) if n > 1)
            text = f"{key}={log.noise_pieces} does not divide the {rows} rows of {size_key}={size}{ranks}"
            ways = f"pieces that do: {pieces}; " if pieces else ""
            yield Rule((key, size_key), f"{text}; {ways}nearest {size_key}: {nearest_multiples(size, unit)}")


def batch_sizes(data: DataConfig) -> list[tuple[str, int]]:
    """Key and rows of every batch size that the run uses."""
    sizes = [(f"data.batch_stages.{n}.batch_size", stage.batch_size) for n, stage in enumerate(data.batch_stages)]
    return [("data.batch_size", data.batch_size), *sizes]
