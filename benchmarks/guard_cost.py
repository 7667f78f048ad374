"""What watching costs: all signals of every step, and a probe of the inside on its cadence, against a step without them.

    python benchmarks/guard_cost.py [--rounds 8] [--threads 2] [--precision fp32] [--json FILE]

10M parameters, 8,192 tokens a step, one rank. Targets: signals under 1 % of a step, probes under 2 % at the default cadence. A whole step takes
seconds and varies by more than the signals cost, so each is measured twice: whole steps with and without signals, which take turns
(median of the ratio of neighbours), and the same two with the forward and backward already done, whose difference is set against the whole
step. The bare step is the shortest one that trains: global norm, clipping, update, loss, log-normalisers.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from surefoot.config.model import ModelConfig
from surefoot.data.loader import Batch
from surefoot.guard.guard import GuardState, judge, limits
from surefoot.guard.record import Record
from surefoot.model.count import num_params
from surefoot.model.loss import LossSums
from surefoot.optim.clip import clip_scale, squared_norm_share
from surefoot.optim.optimizer import Update
from surefoot.optim.schedule import lr_at
from surefoot.parallel.digest import combine, digest_tensors
from surefoot.parallel.forward_backward import MicroBatch
from surefoot.parallel.mesh import World
from surefoot.parallel.reduce import max_over_ranks, sum_over_ranks
from surefoot.train.probes import take_probe
from surefoot.train.setup import Setup, set_up
from surefoot.train.state import TrainState
from surefoot.train.step import split, train_step
from train_step import SIZES, fixed_batch, model_config, run_config

ROWS, SEQ_LEN, DOCUMENT = 32, 256, 64
WORLD = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


def batch_of_documents(vocab_size: int) -> Batch:
    """8,192 tokens in documents of 64; the last token of each predicts nothing."""
    parts = [fixed_batch(vocab_size) for _ in range(ROWS // 8)]
    tokens = np.concatenate([part.tokens_BT for part in parts])
    targets = np.concatenate([part.targets_BT for part in parts])
    targets[:, DOCUMENT - 1 :: DOCUMENT] = -100
    places = np.tile(np.arange(SEQ_LEN, dtype=np.int32), (ROWS, 1))
    return dataclasses.replace(
        parts[0],
        tokens_BT=tokens,
        targets_BT=targets,
        documents_BT=places // DOCUMENT,
        positions_BT=places % DOCUMENT,
        samples_B3=np.zeros((ROWS, 3), dtype=np.int64),
        num_targets=int((targets != -100).sum()),
    )


def bare_step(state: TrainState, batch: Batch, setup: Setup) -> float:
    """A step that trains and reports its loss, and looks at nothing else."""
    config, world = setup.config, setup.world
    lr = lr_at(state.step, config.optim, config.steps)
    num_targets = round(sum_over_ranks([batch.num_targets, batch.num_excluded], world).tolist()[0])
    state.optimizer.zero_grad(set_to_none=True)
    sums = setup.forward_backward(split(batch, setup), num_targets)
    share = squared_norm_share(state.parameters.values(), first_replica=True)
    parts = torch.stack([torch.stack([s.ce_sum, s.z_sum, s.lse_sum]).double() for s in sums]).sum(0)
    total = sum_over_ranks([share.total, parts, share.broken], world)
    top = max_over_ranks([torch.stack([s.lse_max for s in sums]).max()], world)
    norm = torch.where(total[4] > 0, math.nan, total[0].sqrt())
    skip = ~(torch.isfinite(norm) & torch.isfinite(total[1]))
    state.optimizer.apply(Update(lr=lr, scale=clip_scale(norm, config.optim.clip_norm), skip=skip))
    loss, _, skipped = torch.stack([total[1], top[0], skip.double()]).tolist()
    state.step += not skipped
    return loss / num_targets


class Done:
    """A forward and backward that was made once: the same sums and gradients every time."""

    def __init__(self, state: TrainState, setup: Setup, batch: Batch) -> None:
        state.optimizer.zero_grad(set_to_none=True)
        self.parameters = list(state.parameters.values())
        self.sums = setup.forward_backward(split(batch, setup), batch.num_targets)
        self.grads = [p.grad for p in self.parameters]

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> list[LossSums]:
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        return self.sums


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def turns(one: Callable[[], object], other: Callable[[], object], rounds: int) -> list[tuple[float, float]]:
    """Times of two variants that take turns, the first to go changing every round."""
    one(), other()
    times = []
    for index in range(rounds):
        if index % 2:
            b, a = seconds(other), seconds(one)
        else:
            a, b = seconds(one), seconds(other)
        times.append((a, b))
    return times


def measured(model: ModelConfig, precision: str, rounds: int) -> dict[str, float]:
    config = run_config(model, precision, "off")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=SEQ_LEN, batch_size=ROWS))
    batch = batch_of_documents(model.vocab_size)
    (setup, watched), (bare_setup, bare) = set_up(config, WORLD), set_up(config, WORLD)
    pairs = turns(lambda: train_step(watched, batch, setup), lambda: bare_step(bare, batch, bare_setup), rounds)
    assert combine(digest_tensors(watched.tensors())) == combine(digest_tensors(bare.tensors())), "not the same run"
    whole = statistics.median(b for _, b in pairs)

    done = dataclasses.replace(setup, forward_backward=Done(watched, setup, batch))
    bare_done = dataclasses.replace(bare_setup, forward_backward=Done(bare, bare_setup, batch))
    rest = turns(lambda: train_step(watched, batch, done), lambda: bare_step(bare, batch, bare_done), 40)
    signals = statistics.median(a - b for a, b in rest)

    guard = GuardState()
    signal = train_step(watched, batch, done).signals
    judging = []
    for index in range(100):
        seen = dataclasses.replace(signal, batch_index=index, step=index + 1, optimizer_steps=index + 1)
        begun = time.perf_counter()
        limits(guard, config.guard)
        guard = judge(guard, seen, config.guard, Record()).state
        judging.append(time.perf_counter() - begun)

    [few] = split(batch, setup)
    rows = MicroBatch(*(None if part is None else part[: config.guard.probe_rows] for part in few))
    probe = min(seconds(lambda: take_probe(watched, setup, rows, 1e-4)) for _ in range(6))
    return {
        "parameters": float(num_params(model).total),
        "step_s": whole,
        "ratio_of_whole_steps": statistics.median(a / b for a, b in pairs),
        "signals_s": signals,
        "signals_share": signals / whole,
        "judge_s": statistics.median(judging[50:]),
        "judge_share": statistics.median(judging[50:]) / whole,
        "probe_s": probe,
        "probe_share": probe / (whole * config.guard.probe_every),
        "probe_every": float(config.guard.probe_every),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="10m", choices=list(SIZES))
    parser.add_argument("--precision", default="fp32", choices=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = measured(model_config(SIZES[args.size]), args.precision, args.rounds)
    print(
        f"{found['parameters'] / 1e6:.2f}M parameters, {ROWS * SEQ_LEN:,} tokens a step, {args.precision}, {args.threads} threads"
    )
    print(f"  a bare step                 {found['step_s'] * 1e3:10.1f} ms")
    print(f"  whole steps, with / without {found['ratio_of_whole_steps']:10.4f}")
    print(
        f"  signals                     {found['signals_s'] * 1e3:10.2f} ms   {found['signals_share']:8.3%}   (target 1 %)"
    )
    print(f"  limits and verdict          {found['judge_s'] * 1e3:10.2f} ms   {found['judge_share']:8.3%}")
    print(
        f"  a probe                     {found['probe_s'] * 1e3:10.2f} ms   {found['probe_share']:8.3%}   "
        f"every {found['probe_every']:.0f} steps (target 2 %)"
    )
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "precision": args.precision, **found}, indent=1))


if __name__ == "__main__":
    main()
