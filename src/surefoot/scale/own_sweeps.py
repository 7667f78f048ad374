"""What the user's own sweeps measured: the best learning rate of every size, from sweep.json and transfer.json. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.config.errors import ConfigError
from surefoot.monitor.durable import StoreError, read_json
from surefoot.monitor.run import Run as RunFolder

SAME = 0.1
"""Relative difference of parameters, or of tokens, up to which a measurement counts as of the same run."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The best rate found for one size."""

    place: str
    """The file it comes from."""
    num_params: int
    num_tokens: float
    batch_tokens: float
    lr: float
    low: float
    high: float
    """Interval of the rate, where there is one; otherwise the neighbours tried on each side (equal to lr where none was)."""
    loss: float
    """Held-out, nats per token, mean over seeds."""
    how: str
    """What kind of figure the rate is."""

    def same_size(self, num_params: float) -> bool:
        return abs(self.num_params / num_params - 1.0) <= SAME

    def same_length(self, num_tokens: float) -> bool:
        return abs(self.num_tokens / num_tokens - 1.0) <= SAME


def measured_in(folder: Path) -> list[Measured]:
    """One figure per size. Raises ConfigError where the folder holds no sweep, or one that learning rates can't be read from."""
    sweep, transfer = read_json(folder / "sweep.json"), read_json(folder / "transfer.json")
    if not sweep and not transfer:
        raise ConfigError([f"--sweep {folder}: holds neither sweep.json nor transfer.json; give the --out of a sweep"])
    found = [*_of_sweep(folder, sweep), *_of_transfer(folder, transfer)]
    if not found:
        raise ConfigError([f"--sweep {folder}: no run of it came to a good end yet"])
    return sorted(found, key=lambda one: (one.num_params, one.num_tokens))


def _of_sweep(folder: Path, facts: Mapping[str, Any]) -> Iterator[Measured]:
    """The setting with the lowest mean loss of every size, whatever else was varied."""
    best: dict[int, tuple[float, dict[str, Any]]] = {}
    tried: dict[int, set[float]] = {}
    for setting in facts.get("settings", ()):
        done = [run for run in setting["runs"] if run["ending"] == "done"]
        if not done or len(done) < len(setting["runs"]):
            continue
        config = _config(folder / done[0]["name"])
        num_params, loss = int(done[0]["num_params"]), float(setting["loss"])
        tried.setdefault(num_params, set()).add(float(config["optim"]["lr"]))
        if num_params not in best or loss < best[num_params][0]:
            best[num_params] = (loss, config | {"applied": done[0]["steps"]})
    for num_params, (loss, config) in best.items():
        lr = float(config["optim"]["lr"])
        below = max((each for each in tried[num_params] if each < lr), default=lr)
        above = min((each for each in tried[num_params] if each > lr), default=lr)
        batch = float(config["data"]["batch_size"] * config["data"]["seq_len"])
        at_edge = len(tried[num_params]) > 1 and (below == lr or above == lr)
        yield Measured(
            place=str(folder / "sweep.json"),
            num_params=num_params,
            num_tokens=batch * config["applied"],
            batch_tokens=batch,
            lr=lr,
            low=below,
            high=above,
            loss=loss,
            how="best run" if len(tried[num_params]) > 1 and not at_edge else "best run, at the edge of what was tried",
        )


def _config(run: Path) -> dict[str, Any]:
    try:
        return dict(RunFolder(run).config)
    except StoreError as error:
        raise ConfigError([f"{run}: its config is needed to know the rate, and cannot be read: {error}"]) from error


def _of_transfer(folder: Path, facts: Mapping[str, Any]) -> Iterator[Measured]:
    """The fitted optimum of every size under its parametrization; ``standard`` speaks for the base."""
    runs = facts.get("runs", ())
    for size in facts.get("sizes", ()):
        best = size["optimum"]
        cell = next(run for run in runs if run["num_params"] == size["num_params"])
        yield Measured(
            place=str(folder / "transfer.json"),
            num_params=size["num_params"],
            num_tokens=float(cell["num_tokens"]),
            batch_tokens=float(cell["batch_tokens"]),
            lr=best["lr"],
            low=best["low"],
            high=best["high"],
            loss=best["loss"],
            how=f"fitted optimum under {size['parametrization']}"
            + ("" if best["edge"] == "none" else ", at the edge of what was tried"),
        )
