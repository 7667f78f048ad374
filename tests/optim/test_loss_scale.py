"""The loss scale: halved by overflows, doubled by their absence, and no say in what is a fault."""

import math
from collections.abc import Callable

import pytest
import torch

from surefoot.config.parallel import LossScaleConfig
from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.optim.loss_scale import LossScale
from surefoot.parallel.mesh import World
from surefoot.train.setup import set_up
from surefoot.train.step import split
from tolerances import UNSCALED_FP16

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
CONFIG = LossScaleConfig(initial=1024.0, growth_every=3, smallest=256.0)


def test_an_overflow_halves_it_down_to_the_smallest_where_it_is_none_any_more() -> None:
    scale = LossScale.starting(CONFIG)
    assert [scale.settle(math.inf, 2.0, applied=False) for _ in range(4)] == [True, True, False, False]
    assert (scale.value, scale.overflows) == (256.0, 2)


def test_so_many_applied_updates_without_one_double_it_before_the_next_batch() -> None:
    scale = LossScale.starting(CONFIG)
    for applied in (True, False, True):
        assert not scale.settle(1.0, 2.0, applied=applied)
        scale.grow()
    assert scale.value == 1024.0
    scale.settle(1.0, 2.0, applied=True)
    assert scale.value == 1024.0
    scale.grow()
    assert (scale.value, scale.clean) == (2048.0, 0)
    scale.settle(1.0, 2.0, applied=True)
    scale.settle(math.nan, 2.0, applied=False)
    assert (scale.value, scale.clean) == (1024.0, 0)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_itself_is_no_overflow(loss: float) -> None:
    scale = LossScale.starting(CONFIG)
    assert not scale.settle(math.nan, loss, applied=False)
    assert scale.value == 1024.0


def test_the_device_sees_what_the_host_sees() -> None:
    for value in (1024.0, 256.0):
        for norm in (1.0, math.inf, math.nan):
            for loss in (2.0, math.nan):
                scale = LossScale(config=CONFIG, value=value)
                seen = scale.overflow(torch.tensor(norm), torch.tensor(loss))
                assert bool(seen) == scale.settle(norm, loss, applied=False)


def test_off_it_is_one_and_nothing_overflows() -> None:
    scale = LossScale()
    assert not scale.overflow(torch.tensor(math.inf), torch.tensor(1.0))
    assert not scale.settle(math.inf, 1.0, applied=False)
    assert scale.to_dict() == {}
    assert scale.value == 1.0


def test_what_is_saved_comes_back_and_a_run_without_one_starts_anew() -> None:
    scale = LossScale.starting(CONFIG)
    scale.settle(math.inf, 1.0, applied=False)
    scale.settle(1.0, 1.0, applied=True)
    other = LossScale.starting(CONFIG)
    other.restore(scale.to_dict())
    assert other == scale
    other.restore({})
    assert other == LossScale.starting(CONFIG)


def test_gradients_are_unscaled_before_anyone_reads_them(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader
) -> None:
    found = []
    for initial in (1024.0, 65536.0):
        scaled = vary(config, **{"parallel.precision": "fp16", "parallel.loss_scale": LossScaleConfig(initial=initial)})
        setup, state = set_up(scaled, ALONE)
        batch = loader.batch(0)
        setup.forward_backward(split(batch, setup), batch.num_targets)
        found.append({name: p.grad.clone() for name, p in state.parameters.items() if p.grad is not None})
    setup, state = set_up(config, ALONE)
    setup.forward_backward(split(batch, setup), batch.num_targets)
    for name, parameter in state.parameters.items():
        assert parameter.grad is not None
        for grads in found:
            distance = torch.linalg.norm(grads[name] - parameter.grad) / torch.linalg.norm(parameter.grad)
            assert distance < UNSCALED_FP16, name
