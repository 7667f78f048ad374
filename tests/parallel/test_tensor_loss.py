"""The loss over a vocabulary that lies on several ranks against the one over a whole vocabulary."""

import pytest
import torch
from torch import Tensor

from surefoot.model.loss import IGNORE, LossSums, next_token_loss
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.tensor_loss import VocabularyLoss
from surefoot.parallel.tensor_tokens import TensorRanks
from tolerances import BF16_KERNEL, FP32_KERNEL, FP64_KERNEL

Z = 3e-3
BOUNDS = {torch.float64: FP64_KERNEL, torch.float32: FP32_KERNEL, torch.bfloat16: BF16_KERNEL}
Found = tuple[LossSums, Tensor, Tensor]


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states (2, 36, 16), a vocabulary of 52, targets of which every fifth is ignored, where the hidden state is NaN."""
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 36, 16, generator=draw, dtype=torch.float64).to(dtype)
    weight = torch.randn(52, 16, generator=draw, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    targets = torch.randint(0, 52, (2, 36), generator=draw)
    targets[:, ::5] = IGNORE
    hidden[:, ::5] = float("nan")
    return hidden, weight, targets


def on_ranks(rank: int, world: int, dtype: torch.dtype, chunk: int, broken: tuple[int, int] | None = None) -> Found:
    hidden, weight, targets = problem(dtype)
    if broken is not None:
        weight[broken] = float("nan")
    hidden, weight = hidden.chunk(world, 1)[rank].clone().requires_grad_(), weight.chunk(world)[rank].requires_grad_()
    ranks = TensorRanks(torch.distributed.group.WORLD.group_name, world, rank)
    sums = VocabularyLoss(ranks)(hidden, weight, targets, z_loss=Z, chunk_tokens=chunk)
    (3 * sums.objective).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return LossSums(*(x.detach() for x in sums)), hidden.grad, weight.grad


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("world", "chunk"), [(2, 7), (4, 1000)])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_vocabulary_over_ranks_gives_the_loss_and_gradients_of_a_whole_one(
    dtype: torch.dtype, world: int, chunk: int
) -> None:
    hidden, weight, targets = problem(dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    whole = next_token_loss(hidden, weight, targets, z_loss=Z, chunk_tokens=9)
    (3 * whole.objective).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    found = run_ranks(world, on_ranks, dtype, chunk)
    for sums, _, _ in found:
        assert max(relative(a, b.detach()) for a, b in zip(sums, whole, strict=True)) < BOUNDS[dtype]
        assert all(torch.equal(a, b) for a, b in zip(sums, found[0][0], strict=True))
    assert relative(torch.cat([grad for _, grad, _ in found], 1), hidden.grad) < BOUNDS[dtype]
    assert relative(torch.cat([grad for _, _, grad in found]), weight.grad) < BOUNDS[dtype]


def test_a_broken_row_of_the_vocabulary_breaks_the_loss_on_every_rank() -> None:
    """A maximum over ranks may lose it."""
    for broken in ((3, 5), (40, 5)):
        found = run_ranks(2, on_ranks, torch.float32, 16, broken)
        predicts = problem(torch.float32)[2] != IGNORE
        for sums, hidden_grad, _ in found:
            assert torch.equal(sums.token_losses_BT.isnan(), predicts)
            assert sums.objective.isnan()
            assert sums.ce_sum.isnan()
            assert hidden_grad.isnan().any()
