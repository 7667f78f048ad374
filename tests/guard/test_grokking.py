"""A model that memorises and, long after, groks: nothing of that is an alarm."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.config.guard import GuardConfig
from surefoot.guard.actions import Proceed
from surefoot.guard.guard import GuardState, judge, judge_evaluation, limits
from surefoot.guard.record import Record
from surefoot.guard.signals import EvalSignals, StepSignals

P, D_MODEL, D_FF, STEPS, EVAL_EVERY = 43, 64, 128, 1000, 25
TRAIN_SHARE, LR, WEIGHT_DECAY = 0.6, 3e-3, 2.0


def curves() -> tuple[list[tuple[float, float]], list[float]]:
    """Addition modulo 43 from 60 % of all pairs: (training loss, gradient norm) of every step, test loss of every 25th."""
    torch.manual_seed(1)
    a, b = torch.cartesian_prod(torch.arange(P), torch.arange(P)).T
    inputs, targets = torch.stack((a, b + P), 1), (a + b) % P
    order = torch.randperm(P * P)
    train, test = order[: int(TRAIN_SHARE * P * P)], order[int(TRAIN_SHARE * P * P) :]
    embedding = nn.Embedding(2 * P, D_MODEL)
    head = nn.Sequential(nn.Linear(D_MODEL, D_FF), nn.ReLU(), nn.Linear(D_FF, P))
    parameters = [*embedding.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.98))
    steps, held_out = [], []
    for n in range(STEPS):
        loss = F.cross_entropy(head(embedding(inputs[train]).sum(1)), targets[train])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        steps.append((loss.item(), norm.item()))
        optimizer.step()
        if n % EVAL_EVERY == 0:
            with torch.no_grad():
                held_out.append(F.cross_entropy(head(embedding(inputs[test]).sum(1)), targets[test]).item())
    return steps, held_out


def test_memorising_and_grokking_raise_no_alarm_and_no_action() -> None:
    steps, held_out = curves()
    config, record, state = GuardConfig(), Record(), GuardState()
    said = []
    for n, (loss, norm) in enumerate(steps):
        limit = limits(state, config)
        signals = StepSignals(
            batch_index=n,
            step=n + 1,
            loss=loss,
            gradient_norm=norm,
            num_targets=1000,
            lr=LR,
            clipped_harder=norm > limit.clip_norm,
        )
        assert loss <= limit.loss
        assert norm <= limit.gradient_norm
        verdict = judge(state, signals, config, record, total_steps=STEPS)
        assert verdict.action == Proceed()
        said += verdict.findings
        state = verdict.state
        if n % EVAL_EVERY == 0:
            losses = (("sums", held_out[n // EVAL_EVERY]),)
            verdict = judge_evaluation(state, EvalSignals(step=n + 1, losses=losses), config)
            said += verdict.findings
            state = verdict.state
    assert [finding for finding in said if finding.severity == "alarm"] == []
    assert {finding.kind for finding in said} <= {"validation", "too_good"}
    # It was a real one: memorised while the test loss was worse than guessing, then understood.
    memorised = next(n for n, (loss, _) in enumerate(steps) if loss < 0.3)
    assert memorised < 250
    assert held_out[memorised // EVAL_EVERY] > 1.3 * math.log(P)
    assert held_out[-1] < math.log(P) / 4
