"""The chunked loss against the plain one, and what it promises about ignored tokens and precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.model.loss import IGNORE, LossSums, next_token_loss
from tolerances import BF16_KERNEL, FP32_KERNEL, FP64_KERNEL

Z = 3e-3


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Objective, cross-entropy sum and squared normaliser sum from all logits at once."""
    logits = (hidden @ weight.t()).flatten(0, 1)
    valid = targets.flatten() != IGNORE
    ce = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    z = logits.logsumexp(-1)[valid].square().sum()
    return ce + Z * z, ce, z


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 37, 16, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(53, 16, generator=draw, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    targets = torch.randint(0, 53, (2, 37), generator=draw)
    targets[:, ::5] = IGNORE
    return hidden, weight.requires_grad_(), targets


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("chunk", [1, 7, 74, 1000])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, FP64_KERNEL), (torch.float32, FP32_KERNEL), (torch.bfloat16, BF16_KERNEL)],
)
def test_losses_and_gradients_equal_the_unchunked_ones(dtype: torch.dtype, bound: float, chunk: int) -> None:
    hidden, weight, targets = problem(dtype)
    sums = next_token_loss(hidden, weight, targets, z_loss=Z, chunk_tokens=chunk)
    (sums.objective * 0.37).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    objective, ce, z = plain(*exact, targets)
    (objective * 0.37).backward()
    for ours, theirs in ((sums.objective, objective), (sums.ce_sum, ce), (sums.z_sum, z)):
        assert relative(ours, theirs) <= bound
    for ours, theirs in ((hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert relative(ours, theirs) <= bound


def test_its_gradient_is_the_derivative_of_its_value() -> None:
    hidden, weight, targets = problem()
    hidden = hidden.detach()[:, :7, :5].requires_grad_()
    weight = weight.detach()[:11, :5].requires_grad_()
    targets = torch.where(targets == IGNORE, IGNORE, targets % 11)[:, :7]
    assert torch.autograd.gradcheck(
        lambda h, w: next_token_loss(h, w, targets, z_loss=Z, chunk_tokens=4).objective, (hidden, weight)
    )


def test_the_statistics_are_those_of_the_logits() -> None:
    hidden, weight, targets = problem()
    sums = next_token_loss(hidden, weight, targets, z_loss=Z, chunk_tokens=10)
    logits = hidden @ weight.t()
    lse = torch.where(targets != IGNORE, logits.logsumexp(-1), 0)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none").view(2, 37)
    assert relative(sums.token_losses_BT, each) <= FP64_KERNEL
    assert sums.token_losses_BT[targets == IGNORE].eq(0).all()
    assert relative(sums.lse_sum, lse.sum()) <= FP64_KERNEL
    assert relative(sums.lse_max, logits.logsumexp(-1)[targets != IGNORE].max()) <= FP64_KERNEL
    assert [field for field in LossSums._fields if getattr(sums, field).requires_grad] == ["objective"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_an_ignored_token_contributes_nothing_whatever_its_hidden_state_holds(
    dtype: torch.dtype, poison: float
) -> None:
    results = []
    for value in (0.5, poison):
        hidden, weight, targets = problem(dtype)
        spoiled = torch.where(
            (targets == IGNORE)[..., None], torch.tensor(value, dtype=dtype), hidden.detach()
        ).requires_grad_()
        sums = next_token_loss(spoiled, weight, targets, z_loss=Z, chunk_tokens=10)
        sums.objective.backward()
        assert spoiled.grad is not None
        assert spoiled.grad[targets == IGNORE].eq(0).all()
        results.append([*sums, spoiled.grad, weight.grad])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def test_a_nan_in_a_token_that_counts_is_seen() -> None:
    hidden, weight, targets = problem(torch.float32)
    spoiled = hidden.detach().clone()
    spoiled[0, 1, 3] = float("nan")
    assert next_token_loss(spoiled, weight, targets, z_loss=0.0, chunk_tokens=10).objective.isnan()


def test_without_targets_every_sum_is_zero_and_no_gradient_is_nan() -> None:
    hidden, weight, targets = problem(torch.float32)
    sums = next_token_loss(hidden, weight, torch.full_like(targets, IGNORE), z_loss=Z, chunk_tokens=10)
    sums.objective.backward()
    assert [float(x.detach()) for x in (sums.objective, sums.ce_sum, sums.z_sum, sums.lse_sum)] == [0, 0, 0, 0]
    assert sums.lse_max == float("-inf")
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.eq(0).all()
    assert weight.grad.eq(0).all()


def test_evaluation_gives_the_same_numbers_and_does_no_gradient_work(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    trained = next_token_loss(hidden, weight, targets, z_loss=Z, chunk_tokens=10)
    shapes = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **kw: (shapes.append(b.shape), mm(a, b, **kw))[1])
    with torch.no_grad():
        evaluated = next_token_loss(hidden, weight, targets, z_loss=Z, chunk_tokens=10)
    assert set(shapes) == {(16, 53)}, "only hidden x weight^T"
    assert all(a.detach().equal(b) for a, b in zip(trained, evaluated, strict=True))


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    hidden = torch.tensor([[[300.0, 0.0], [0.0, -300.0]]], requires_grad=True)
    weight = torch.tensor([[10.0, 0.0], [0.0, 10.0], [-10.0, -10.0]], requires_grad=True)
    sums = next_token_loss(hidden, weight, torch.tensor([[0, 1]]), z_loss=0.0, chunk_tokens=8)
    sums.objective.backward()
    assert sums.token_losses_BT.tolist() == [[0.0, 6000.0]]
    assert torch.isfinite(torch.cat([hidden.grad.flatten(), weight.grad.flatten()])).all()


def test_the_backward_can_run_twice_over_one_forward() -> None:
    hidden, weight, targets = problem()
    objective = next_token_loss(hidden, weight, targets, z_loss=Z, chunk_tokens=10).objective
    first = torch.autograd.grad(objective, weight, retain_graph=True)[0]
    second = torch.autograd.grad(2 * objective, weight)[0]
    assert second.equal(2 * first)
