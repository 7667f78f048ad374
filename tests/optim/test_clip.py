"""One global norm, exact under every layout."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from surefoot.optim.clip import clip_scale, nonfinite_counts, squared_norm_share
from surefoot.parallel.fork_launch import run_ranks


def with_gradient(grad: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def test_the_norm_is_that_of_all_gradients_together() -> None:
    grads = [torch.randn(5, 3), torch.randn(4), torch.randn(2, 2, 2)]
    share, broken, _ = squared_norm_share([with_gradient(g) for g in grads], first_replica=True)
    expected = sum(float((g.double() ** 2).sum()) for g in grads)
    assert float(share) == pytest.approx(expected, rel=1e-6)
    assert float(broken) == 0


def test_a_replica_that_is_not_the_first_adds_nothing_but_says_when_it_is_broken() -> None:
    share, broken, _ = squared_norm_share([with_gradient(torch.tensor([1.0, math.nan]))], first_replica=False)
    assert (float(share), float(broken)) == (0.0, 1.0)
    assert squared_norm_share([with_gradient(torch.ones(3))], first_replica=False)[0] == 0


def test_no_gradient_at_all_is_a_norm_of_zero() -> None:
    assert squared_norm_share([nn.Parameter(torch.ones(2))], first_replica=True)[0] == 0


@pytest.mark.parametrize(
    ("norm", "clip", "scale"),
    [
        (0.5, 1.0, 1.0),
        (4.0, 1.0, 4.0),
        (4.0, 0.0, 1.0),
        (3.0, 2.0, 1.5),
        (4.0, math.inf, 1.0),
        (math.nan, math.inf, 1.0),
        (math.nan, 0.0, 1.0),
    ],
)
def test_gradients_are_divided_by_what_brings_them_under_the_limit(norm: float, clip: float, scale: float) -> None:
    assert float(clip_scale(torch.tensor(norm), clip)) == scale


def shares_of_sharded_gradients(rank: int, world: int) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    sharded = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Replicate(), Shard(0)]))
    sharded.grad = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    return float(squared_norm_share([sharded], first_replica=rank == 0)[0])


def test_an_element_that_several_ranks_hold_counts_once() -> None:
    shares = run_ranks(4, shares_of_sharded_gradients)
    assert sum(shares) == pytest.approx(sum(i * i for i in range(12)))


def test_groups_share_the_norm_and_a_nan_stays_in_its_own() -> None:
    grads = [torch.full((4,), 1.0), torch.full((2,), 3.0), torch.full((5,), 2.0), torch.ones(7)]
    parameters = [with_gradient(g) for g in grads]
    parameters[3].grad = None
    share = squared_norm_share(parameters, first_replica=True, groups=(0, 1, 0, 2), num_groups=3)
    assert share.by_group.tolist() == pytest.approx([24.0, 18.0, 0.0], rel=1e-6)
    assert float(share.total) == pytest.approx(42.0, rel=1e-6)
    grads[1][0] = math.nan
    share = squared_norm_share(parameters, first_replica=True, groups=(0, 1, 0, 2), num_groups=3)
    assert share.by_group.tolist() == pytest.approx([24.0, math.nan, 0.0], rel=1e-6, nan_ok=True)
    assert squared_norm_share(parameters, first_replica=False, groups=(0, 1, 0, 2), num_groups=3).by_group.sum() == 0


def test_without_any_gradient_every_group_is_zero() -> None:
    share = squared_norm_share([nn.Parameter(torch.ones(2))], first_replica=True, groups=(1,), num_groups=2)
    assert share.by_group.tolist() == [0.0, 0.0]


def test_elements_that_are_not_finite_are_counted_per_parameter() -> None:
    grads = [torch.zeros(3), torch.tensor([math.nan, 1.0, math.inf, -math.inf]), torch.tensor([[math.nan]])]
    parameters = [with_gradient(g) for g in grads] + [nn.Parameter(torch.ones(2))]
    counted, held = nonfinite_counts(parameters, first_replica=True)
    assert counted.tolist() == held.tolist() == [0.0, 3.0, 1.0, 0.0]
    counted, held = nonfinite_counts(parameters, first_replica=False)
    assert (counted.sum(), held.tolist()) == (0.0, [0.0, 3.0, 1.0, 0.0])
