"""Precision policies in whole steps and whole runs: clipping, overflows that are no faults, resume to the bit, sampling."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from surefoot.config.guard import GuardConfig
from surefoot.config.parallel import LossScaleConfig
from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.guard.actions import Proceed
from surefoot.guard.guard import GuardState, Verdict, judge
from surefoot.guard.limits import Limits
from surefoot.guard.record import Record
from surefoot.guard.signals import StepSignals
from surefoot.model.loss import LossSums
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.forward_backward import ForwardBackward, MicroBatch
from surefoot.parallel.mesh import World
from surefoot.parallel.precision import POLICIES
from surefoot.proof.rehearsal import Rehearsed, Script, rehearse, rehearse_on_rank
from surefoot.train.investigate import one_pass, widened
from surefoot.train.restored import open_model
from surefoot.train.setup import set_up
from surefoot.train.step import train_step
from tolerances import PRECISION_CLIPPED

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
TOO_LARGE = 2.0**32
"""A scale at which gradients of the small model overflow for a dozen batches, until it is 2^20."""
Vary = Callable[..., RunConfig]


class TimesAThousand:
    """The objective, and all that follows from it, a thousand times as large."""

    def __init__(self, inner: ForwardBackward) -> None:
        self.inner = inner

    def __call__(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> list[LossSums]:
        return self.inner(micro_batches, num_targets / 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", list(POLICIES))
def test_a_gradient_a_thousand_times_too_large_leaves_with_the_largest_norm_allowed(
    config: RunConfig, vary: Vary, loader: Loader, precision: str
) -> None:
    config = vary(config, **{"parallel.precision": precision, "optim.clip_norm": 0.5})
    if precision == "fp16":
        config = vary(config, **{"parallel.loss_scale": LossScaleConfig(initial=16.0)})
    setup, state = set_up(config, ALONE)
    setup = dataclasses.replace(setup, forward_backward=TimesAThousand(setup.forward_backward))
    outcome = train_step(state, loader.batch(0), setup)
    assert outcome.signals.gradient_norm > 500
    assert not outcome.skipped
    moments = torch.stack([torch.linalg.norm(state.tensors()[f"exp_avg/{n}"].double()) for n in state.parameters])
    left = float(torch.linalg.norm(moments)) / (1 - config.optim.optimizer.beta1)
    assert left == pytest.approx(0.5, rel=PRECISION_CLIPPED[precision])


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16", "fp8"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    config: RunConfig, vary: Vary, tmp_path: Path, precision: str
) -> None:
    """Through a rollback, and in fp16 through overflows and growth of the scale before and after the stop."""
    config = vary(config, steps=12, **{"parallel.precision": precision})
    if precision == "fp16":
        config = vary(config, **{"parallel.loss_scale": LossScaleConfig(initial=2.0**24, growth_every=2)})
    script = Script(rollback_after=11, rollback_to=8)
    one = rehearse(config, tmp_path / "one", script)
    rehearse(config, tmp_path / "two", dataclasses.replace(script, stop_after=7))
    two = rehearse(config, tmp_path / "two", script)
    assert "continuing" in two.opening.lower()
    assert one.digests == two.digests
    assert compare(Run(tmp_path / "one"), Run(tmp_path / "two")).same
    overflows = [row.get("train/overflows", 0.0) for row in Run(tmp_path / "one").joined_rows]
    assert (overflows[-1] > overflows[7] > 0) == (precision == "fp16")


def overflowing(config: RunConfig, vary: Vary, **settings: float) -> RunConfig:
    scale = LossScaleConfig(**({"initial": TOO_LARGE} | settings))
    guard = dataclasses.replace(config.guard, max_consecutive_skips=2, max_data_skips=2)
    return vary(config, guard=guard, **{"parallel.precision": "fp16", "parallel.loss_scale": scale})


def kinds(folder: Path) -> set[str]:
    return {row["kind"] for row in Run(folder).ledger.rows}


def test_overflows_at_the_start_spend_nothing_of_the_guard_and_are_counted_and_said(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    done = rehearse(overflowing(config, vary), tmp_path / "run")
    rows = Run(tmp_path / "run").joined_rows
    skipped = [row for row in rows if row["train/skipped"]]
    assert done.reason == "done"
    assert done.step == config.steps
    assert done.batch_index == config.steps + len(skipped)
    assert len(skipped) > 8
    assert rows[-1]["train/overflows"] == len(skipped)
    assert [row["train/overflows"] for row in skipped] == list(range(1, len(skipped) + 1))
    assert rows[-1]["train/loss_scale"] == TOO_LARGE / 2 ** len(skipped)
    assert {row["cause"] for row in skipped} == {"fp16 overflow: the loss scale was halved"}
    assert not {"skip", "verdict"} & kinds(tmp_path / "run")
    assert done.guard["consecutive_skips"] == 0
    notes = [event["text"] for event in Run(tmp_path / "run").events if "fp16 overflow" in event.get("text", "")]
    assert [note.split("overflow number ")[1].split(".")[0] for note in notes] == ["1", "2", "4", "8"]
    assert f"scaled by {TOO_LARGE / 2:g} from here on" in notes[0]


def test_the_guard_neither_remembers_nor_answers_an_overflow() -> None:
    state = GuardState(consecutive_skips=1, healthy_batches=5)
    seen = StepSignals(batch_index=7, step=6, loss=2.0, gradient_norm=math.inf, num_targets=100, applied=False)
    verdict = judge(state, dataclasses.replace(seen, overflowed=True), GuardConfig(), Record())
    assert verdict == Verdict(state=state, action=Proceed())
    assert judge(state, seen, GuardConfig(), Record()).state.consecutive_skips == 2


def test_a_guard_that_only_watches_does_not_let_an_overflow_through(
    config: RunConfig, vary: Vary, loader: Loader
) -> None:
    setup, state = set_up(overflowing(config, vary), ALONE)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    outcome = train_step(state, loader.batch(0), setup, limits=Limits(refuse_nonfinite=False))
    assert outcome.skipped
    assert outcome.signals.overflowed
    assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors().items())


def test_at_the_smallest_scale_an_overflow_is_a_fault_like_any_other(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    ended = rehearse(overflowing(config, vary, smallest=TOO_LARGE), tmp_path / "run")
    assert ended.reason == "halted"
    assert ended.step == 0
    assert {"skip", "verdict"} <= kinds(tmp_path / "run")


def test_a_batch_whose_loss_is_broken_is_a_fault_at_once_and_leaves_the_scale_alone(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    config = vary(config, **{"parallel.precision": "fp16"})
    done = rehearse(config, tmp_path / "run", Script(nan_activation_batches=(6,)))
    assert done.reason == "done"
    assert "skip" in kinds(tmp_path / "run") or "attempt" in kinds(tmp_path / "run")
    rows = Run(tmp_path / "run").joined_rows
    assert {row["train/overflows"] for row in rows} == {0.0}
    assert {row["train/loss_scale"] for row in rows} == {65536.0}
    assert any(row["kind"] == "skip" and row["batch_index"] == 6 for row in Run(tmp_path / "run").ledger.rows)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_ranks_that_hold_different_gradients_decide_alike(
    config: RunConfig, vary: Vary, tmp_path: Path, layout: str
) -> None:
    """The gradient is broken on one rank only, after the reduction."""
    config = vary(config, steps=10, **{"parallel.precision": "fp16", "parallel.data_parallel": layout})
    ranks: list[Rehearsed] = run_ranks(2, rehearse_on_rank, config, tmp_path / "run", Script(nan_batches=(4,)))
    assert [rank.reason for rank in ranks] == ["done", "done"]
    assert ranks[0].digests == ranks[1].digests
    rows = Run(tmp_path / "run").joined_rows
    assert [row["train/overflows"] for row in rows] == [0.0] * 4 + [1.0] * 7
    assert rows[-1]["train/loss_scale"] == 32768.0


@pytest.mark.parametrize("precision", ["fp16", "fp8", "bf16_pure"])
def test_a_pass_in_full_precision_rounds_no_operand(
    config: RunConfig, vary: Vary, loader: Loader, precision: str
) -> None:
    """The weights are the same numbers, so the loss is that of fp32, to a rounding of the weights in bf16_pure."""
    losses = {}
    for name in (precision, "fp32"):
        setup, state = set_up(vary(config, **{"parallel.precision": name}), ALONE)
        with widened(state):
            losses[name] = one_pass(state, loader.batch(0), setup)
        low = one_pass(state, loader.batch(0), setup)
        assert (low == losses[name]) == (name == "fp32")
    if precision == "bf16_pure":
        assert losses[precision][0] == pytest.approx(losses["fp32"][0], rel=1e-3)
    else:
        assert losses[precision][0] == losses["fp32"][0]


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16", "fp8"])
def test_a_checkpoint_of_any_precision_goes_on_talking(
    config: RunConfig, vary: Vary, tmp_path: Path, precision: str
) -> None:
    config = vary(config, steps=4, guard=GuardConfig(snapshots=0), **{"parallel.precision": precision})
    rehearse(config, tmp_path / "run")
    model = open_model(tmp_path / "run")
    assert {p.dtype for p in model.model.parameters()} == {POLICIES[precision].weights}  # type: ignore[index]
    text = model.continue_text("calm 3. the ", 8, temperature=0.0, top_k=0, seed=0)
    assert text == model.continue_text("calm 3. the ", 8, temperature=0.0, top_k=0, seed=0)
    assert Run(tmp_path / "run").joined_rows[-1]["train/loss"] < 6
