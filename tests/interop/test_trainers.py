"""The guard inside loops that are not ours: one call, and the bad batch was never there."""

import copy
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Rollback
from surefoot.interop.trainers import GuardHalted, LoopGuard
from surefoot.monitor.ledger_file import read_ledger
from surefoot.parallel.fork_launch import run_ranks

NUM = 60
NAN, SPIKE = 35, 48


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(*, bad: bool, rank: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A straight line with noise; batch NAN has a NaN in it, batch SPIKE is not of this line."""
    generator = torch.Generator().manual_seed(11 + rank)
    made = []
    for at in range(NUM):
        x = torch.randn(64, 8, generator=generator)
        y = x.sum(1, keepdim=True) + 0.5 * torch.randn(64, 1, generator=generator)
        if at == NAN:
            x[5, 2] = math.nan
        if at == SPIKE:
            y += 40.0
        if bad or at not in (NAN, SPIKE):
            made.append((x, y))
    return made


def loop(net: nn.Module, data: list[Any], guard: LoopGuard | None, *, average: bool = False) -> list[bool]:
    """A plain loop: AdamW, a warm-up that counts updates, clipping to 1."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    answers, step = [], 0
    for x, y in data:
        loss = (net(x) - y).square().mean()
        loss.backward()
        if average:
            for p in net.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 10)
        if guard is None or guard.allows(loss, norm):
            optimizer.step()
            step += 1
            answers.append(True)
        else:
            answers.append(False)
        optimizer.zero_grad()
    return answers


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_guarded_loop_ends_as_the_one_that_never_saw_the_bad_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guarded, clean = model(), model()
    with caplog.at_level(logging.INFO, "surefoot.guard"), LoopGuard(folder=tmp_path) as guard:
        answers = loop(guarded, batches(bad=True), guard)
    loop(clean, batches(bad=False), None)
    assert [at for at, allowed in enumerate(answers) if not allowed] == [NAN, SPIKE]
    assert same_bits(guarded, clean)
    assert (guard.step, guard.batch_index) == (NUM - 2, NUM)
    rows = [row for row in read_ledger(tmp_path / "ledger.jsonl").rows if row["kind"] == "skip"]
    assert [row["batch_index"] for row in rows] == [NAN, SPIKE]
    assert rows[1]["findings"][0]["kind"] in ("loss_spike", "gradient_spike")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said[0].startswith(f"Skipped the update of batch {NAN}: ")
    assert "The weights are as they were before it." in said[1]


def test_observing_refuses_nothing() -> None:
    answers = loop(model(), batches(bad=True), LoopGuard(GuardConfig(policy="observe")))
    assert all(answers)


def test_a_resumed_loop_guards_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """What a guard remembers goes through JSON; the ledger with it, where no folder keeps it."""
    data = batches(bad=True)
    whole, parts = LoopGuard(), LoopGuard()
    loop(model(), data, whole)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for at, (x, y) in enumerate(data):
        if at == 40:
            saved = json.loads(json.dumps(parts.state_dict()))
            parts = LoopGuard()
            parts.load_state_dict(saved)
        loss = (net(x) - y).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (parts.step + 1) / 10)
        if parts.allows(loss, norm):
            optimizer.step()
        optimizer.zero_grad()
    assert parts.state == whole.state
    assert parts.ledger.record == whole.ledger.record
    assert [attempt.reason for attempt in parts.ledger.attempts] == ["start", "resume"]


def test_a_run_of_nans_halts_with_a_diagnosis() -> None:
    guard = LoopGuard(GuardConfig(max_consecutive_skips=3))
    assert not guard.allows(math.nan, 1.0)
    assert not guard.allows(3.0, math.inf)
    with pytest.raises(GuardHalted, match="3 skipped steps in a row"):
        guard.allows(math.nan, math.nan)
    assert guard.ledger.halt is not None


def slow_rise(guard: LoopGuard, steps: int = 400) -> int:
    """Calls until the guard asks to go back; the loss creeps up after step 150."""
    for at in range(steps):
        wobble = 0.01 * math.sin(1.7 * at)
        loss = 3.0 + 2.0 * math.exp(-at / 20) + wobble + max(0.0, 0.01 * (at - 150))
        guard.allows(loss, 1.0 + wobble)
        if guard.ledger.record.rollbacks:
            return at
    raise AssertionError("nothing was asked for")


def test_a_slow_rise_asks_for_an_earlier_state_and_goes_on_from_it() -> None:
    asked: list[Rollback] = []
    kept: dict[int, Mapping[str, Any]] = {}

    def restore(rollback: Rollback) -> Mapping[str, Any] | None:
        asked.append(rollback)
        return kept[max(at for at in kept if at <= rollback.to_batch)]

    guard = LoopGuard(restore=restore)
    for at in range(400):
        if at % 25 == 0:
            kept[at] = copy.deepcopy(guard.state_dict())
        wobble = 0.01 * math.sin(1.7 * at)
        allowed = guard.allows(3.0 + 2.0 * math.exp(-at / 20) + wobble + max(0.0, 0.01 * (at - 150)), 1.0 + wobble)
        if asked:
            break
    assert not allowed
    assert guard.batch_index <= asked[0].to_batch <= 150
    assert guard.batch_index % 25 == 0
    assert guard.ledger.attempts[-1].reason == "rollback"
    assert guard.ledger.record.rollbacks[0].restored == guard.batch_index
    assert guard.allows(3.0, 1.0)


def test_a_restore_that_is_too_late_is_refused() -> None:
    guard = LoopGuard(restore=lambda rollback: guard.state_dict())
    with pytest.raises(ValueError, match=r"restore gave back a state at batch \d+, asked for was one at or before \d+"):
        slow_rise(guard)


def test_without_a_way_back_it_is_said_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    guard = LoopGuard()
    with caplog.at_level(logging.WARNING, "surefoot.guard"):
        slow_rise(guard)
    assert any(record.getMessage().startswith("Rolling back: ") for record in caplog.records)
    assert any(record.getMessage().startswith("There is no state to go back to") for record in caplog.records)
    level = guard.state.detectors.loss.center
    assert all(guard.allows(level + 0.01 * math.sin(1.7 * at), 1.0) for at in range(300))
    assert len(guard.ledger.record.rollbacks) == 1


def test_a_norm_that_stands_out_is_clipped_harder_only_where_the_gradients_are_given() -> None:
    for given in (True, False):
        parameter = nn.Parameter(torch.zeros(4))
        guard = LoopGuard(parameters=[parameter] if given else [], max_norm=10.0)
        for at in range(120):
            guard.allows(3.0 + 0.01 * math.sin(at), 1.0 + 0.02 * math.cos(3 * at))
        parameter.grad = torch.full((4,), 3.5)  # norm 7: beyond the clipping limit, below refusal
        assert guard.allows(3.0, 7.0)
        assert (float(parameter.grad.norm()) < 6.9) is given


def test_evaluations_are_judged_and_change_nothing() -> None:
    guard = LoopGuard()
    for _ in range(30):
        guard.allows(3.0, 1.0)
    guard.evaluated({"prose": 3.1})
    guard.evaluated({"prose": 3.0})
    assert guard.allows(3.0, 1.0)


def guarded_rank(rank: int, world: int, folder: str) -> tuple[list[bool], list[torch.Tensor], int]:
    data = batches(bad=True, rank=rank)
    clean = batches(bad=False, rank=rank)
    if rank == 1:  # both faults are on rank 0 alone
        replacements = iter(batches(bad=False, rank=5))
        data = [next(replacements) if at in (NAN, SPIKE) else pair for at, pair in enumerate(data)]
    guarded, never = model(), model()
    guard = LoopGuard(folder=folder)
    answers = loop(guarded, data, guard, average=True)
    loop(never, clean, None, average=True)
    guard.close()
    return answers, [p.detach() for p in (*guarded.parameters(), *never.parameters())], len(guard.ledger.rows)


def test_ranks_answer_as_one_when_only_one_of_them_saw_the_fault(tmp_path: Path) -> None:
    (one, weights, rows), (other, _, rows_there) = run_ranks(2, guarded_rank, str(tmp_path))
    assert one == other
    assert [at for at, allowed in enumerate(one) if not allowed] == [NAN, SPIKE]
    half = len(weights) // 2
    assert all(torch.equal(a, b) for a, b in zip(weights[:half], weights[half:], strict=True))
    assert rows == rows_there == len(read_ledger(tmp_path / "ledger.jsonl").rows)


def numbers_of_one_rank(rank: int, world: int) -> list[bool]:
    """Every number that only one of the ranks sees, the gradient norm being as always."""
    guard = LoopGuard()
    for at in range(60):
        guard.allows(3.0 + 0.01 * math.sin(at), 1.0 + 0.01 * math.cos(at), document_loss_max=4.0 + 0.1 * math.sin(at))
    calls = [
        {"loss": (9.0, 3.0)[rank]},
        {"loss": (3.0, math.nan)[rank]},
        {"document_loss_max": (4.0, 30.0)[rank]},
        {"document_loss_max": (math.inf, 4.0)[rank]},
        {"gradient_norm": (1.0, math.nan)[rank]},
        {"loss": (3.1, 9.0)[rank], "num_targets": (10_000, 1)[rank]},
        {"loss": (3.0, math.nan)[rank], "num_targets": (8, 0)[rank]},
    ]
    usual = {"loss": 3.0, "gradient_norm": 1.0, "document_loss_max": 4.0}
    return [guard.allows(**(usual | call)) for call in calls]


def test_what_one_rank_sees_all_ranks_act_on() -> None:
    one, other = run_ranks(2, numbers_of_one_rank)
    assert one == other == [False] * 5 + [True, True]
