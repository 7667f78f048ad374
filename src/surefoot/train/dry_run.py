"""A config tried without data and without writing: one step on random tokens, and what the real run would take."""

import time
from dataclasses import dataclass

import numpy as np

from surefoot.config.run import RunConfig
from surefoot.data.loader import Batch
from surefoot.model.count import activation_bytes, flops, num_params, state_bytes
from surefoot.model.parts import custom_count
from surefoot.parallel.mesh import World
from surefoot.parallel.precision import policy_of
from surefoot.train.budget import bound_seconds, total_until
from surefoot.train.rows import memory_gib
from surefoot.train.setup import Setup, set_up
from surefoot.train.snapshot import GIB, check_budget
from surefoot.train.step import train_step


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    num_params: int
    embedding_params: int
    flops_per_token: float
    """Forward and backward, causal half of attention; the figure behind MFU."""
    flops_per_token_full_attention: float
    tokens_per_step: int
    """Of the first batch."""
    steps: int
    """Updates at which the run ends; by the second step's time where hours or money bound it."""
    total_tokens: int
    total_flops: float
    state_gib: float
    """Weights, gradients and moments of one unsharded rank."""
    activation_gib: float
    """What a micro-batch keeps for its backward, by formula."""
    snapshot_gib: float
    """Copies of the state kept in memory as rollback targets."""
    step_s: float
    """Wall time of the second of two steps on random tokens."""
    loss: float
    """Of untrained weights on random tokens, nats per token."""
    peak_memory_gib: float
    """Of this process so far."""
    estimated_s: float
    """step_s times the steps: without evaluation and checkpoints."""


def dry_run(config: RunConfig, world: World) -> DryRun:
    """Build the model and take two steps on random tokens. ``config.parallel.precision`` must be resolved.

    Raises what ``set_up`` raises; EnvironmentFault when the snapshots are over their budget.
    """
    setup, state = set_up(config, world)
    snapshot_gib = check_budget(state.tensors(), config.guard.snapshots, config.guard.snapshot_budget_gib, world)
    batch = random_batch(setup)
    train_step(state, batch, setup)
    begun = time.perf_counter()
    outcome = train_step(state, batch, setup)
    seconds = time.perf_counter() - begun
    bound_s = bound_seconds(config)
    steps = max(round(bound_s / seconds), 1) if bound_s else setup.num_steps
    custom = custom_count(state.model, config.data.seq_len)
    count = num_params(config.model, custom)
    per_token = flops(config.model, config.data.seq_len, custom)
    tokens = config.data.batch_size * config.data.seq_len
    rows = config.parallel.micro_batch_size or config.data.batch_size // world.data_size
    policy = policy_of(config.parallel)
    element, weight = policy.compute.itemsize, policy.weights.itemsize
    moment = 2 if config.optim.moments == "bf16" else max(4, weight)
    return DryRun(
        num_params=count.total,
        embedding_params=count.embedding,
        flops_per_token=per_token.causal,
        flops_per_token_full_attention=per_token.full,
        tokens_per_step=tokens,
        steps=steps,
        total_tokens=round(total_until(config.data, steps, lambda _: 1.0)),
        total_flops=total_until(config.data, steps, setup.flops_at.__getitem__),
        state_gib=state_bytes(config.model, custom, element_bytes=(weight + moment) // 2) / GIB,
        activation_gib=activation_bytes(config.model, rows, config.data.seq_len, element) / GIB,
        snapshot_gib=snapshot_gib,
        step_s=seconds,
        loss=outcome.signals.loss,
        peak_memory_gib=memory_gib(world.device),
        estimated_s=seconds * steps,
    )


def random_batch(setup: Setup) -> Batch:
    """This rank's rows of random tokens, two documents a row."""
    data, world = setup.config.data, setup.world
    rows = data.batch_size // world.data_size
    draw = np.random.default_rng(world.data_rank)
    stream = draw.integers(0, setup.config.model.vocab_size, (rows, data.seq_len + 1))
    half = data.seq_len // 2
    first = np.arange(data.seq_len) < half
    positions = np.where(first, np.arange(data.seq_len), np.arange(data.seq_len) - half)
    return Batch(
        batch_index=0,
        tokens_BT=np.ascontiguousarray(stream[:, :-1]),
        targets_BT=np.ascontiguousarray(stream[:, 1:]),
        documents_BT=np.tile(np.where(first, 0, 1).astype(np.int32), (rows, 1)),
        positions_BT=np.tile(positions.astype(np.int32), (rows, 1)),
        samples_B3=np.zeros((data.batch_size, 3), dtype=np.int64),
        digest="",
        num_targets=rows * data.seq_len,
        num_excluded=0,
        excluded=(),
    )
