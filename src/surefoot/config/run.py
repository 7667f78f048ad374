"""A run is its config: everything that decides what is computed, in one frozen value."""

from dataclasses import dataclass
from typing import Literal

from surefoot.config.data import DataConfig
from surefoot.config.guard import GuardConfig
from surefoot.config.model import ModelConfig
from surefoot.config.optim import OptimConfig
from surefoot.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state goes to disk and what is kept of it."""

    every: int = 200
    """Steps between checkpoints; 0 is only at the end and on a signal."""
    keep_last: int = 2
    """Newest checkpoints kept; besides, up to three certified ones, each further back, for rollbacks."""
    keep_every: int = 0
    """Checkpoints at multiples of this many steps are kept for good; 0 is none."""
    asynchronous: bool = True
    """Write in the background while training goes on."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out loss per domain."""

    every: int = 100
    """Steps between evaluations; 0 is only at the end."""
    rows: int = 64
    """Rows per domain on the cadence, spread over its held-out text; 0 is all."""
    final_rows: int = 0
    """Rows per domain at the end of the run; 0 is all."""
    batch_size: int = 16
    """Rows per forward."""


@dataclass(frozen=True, kw_only=True)
class BySteps:
    """The run ends at ``steps``."""

    kind: Literal["steps"] = "steps"


@dataclass(frozen=True, kw_only=True)
class ByTokens:
    """The run ends with the first batch that brings it to so many tokens; ``steps`` is worked out."""

    kind: Literal["tokens"] = "tokens"
    tokens: float
    """Tokens of all batches, blanked ones included."""


@dataclass(frozen=True, kw_only=True)
class ByFlops:
    """The run ends with so many model FLOPs (forward and backward, causal half of attention); ``steps`` is worked out."""

    kind: Literal["flops"] = "flops"
    flops: float
    """Floating-point operations, multiply and add counted apart."""


@dataclass(frozen=True, kw_only=True)
class ByHours:
    """The run ends after so many hours of training, over all attempts, its decay landed; needs the schedule ``wsd``."""

    kind: Literal["hours"] = "hours"
    hours: float
    """On rank 0's clock while the loop runs."""


@dataclass(frozen=True, kw_only=True)
class ByMoney:
    """The run ends when it has cost so much, its decay landed; needs the schedule ``wsd``."""

    kind: Literal["money"] = "money"
    money: float
    """In any currency."""
    price_per_hour: float
    """Of all machines of the run together, in the same."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written down besides every step's row."""

    print_every: int = 10
    """Steps between lines in a log; a terminal shows a live line instead."""
    digest_every: int = 0
    """Steps between state digests in the rows; 0 is only at checkpoints."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Other places that get the rows; each needs its extra installed."""
    noise_every: int = 0
    """Steps between measurements of the gradient noise scale, each a further pass over its batch; 0 is never."""
    noise_pieces: int = 4
    """Pieces of the batch whose gradients are compared with the whole one's."""
    sample_tokens: int = 96
    """Tokens of the continuation shown per domain at the end; 0 is none."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One pretraining run."""

    recipe: str
    """Name of the recipe this came from."""
    steps: int
    """Applied updates at which the run ends, unless ``bound`` says otherwise."""
    bound: BySteps | ByTokens | ByFlops | ByHours | ByMoney = BySteps()
    """What ends the run, and where its schedule lands."""
    seed: int = 0
    """Of initialisation, order of data and every other draw."""
    determinism: Literal["strict", "fast"] = "strict"
    """strict: two runs give the same bits; fast: whatever kernel is quickest."""
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
