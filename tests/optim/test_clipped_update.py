"""The clipping scale reaches the gradients with all digits of their own precision: Adam's weights hide a wrong scale, its moments do not."""

import pytest
import torch
from torch import nn

from surefoot.config.optim import AdamW, OptimConfig
from surefoot.optim.adam import FusedAdam
from surefoot.optim.optimizer import Setting, Update
from tolerances import CLIPPED_MOMENTS


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), list(CLIPPED_MOMENTS.items()))
def test_moments_are_those_of_the_divided_gradients(dtype: torch.dtype, tolerance: float, gated: bool) -> None:
    """A few roundings of the dtype; a scale of 10/3 in fp32 is wrong by 2e-8 in fp64."""
    config, scale = OptimConfig(), torch.tensor(10.0 / 3.0, dtype=torch.float64)
    parameter = nn.Parameter(torch.ones(64, dtype=dtype))
    gradient = torch.linspace(-2.0, 3.0, 64, dtype=dtype)
    parameter.grad = gradient.clone()
    assert isinstance(config.optimizer, AdamW)
    setting = Setting(role="hidden", lr=1.0, weight_decay=0.1, eps=1e-8)
    rule = FusedAdam({"w": parameter}, {"w": setting}, config.optimizer)
    rule.apply(Update(lr=1e-2, scale=scale, skip=torch.tensor(False), gated=gated))
    moments = rule.tensors()
    clipped = gradient.double() / scale
    for key, beta, expected in (
        ("exp_avg", config.optimizer.beta1, clipped),
        ("exp_avg_sq", config.optimizer.beta2, clipped.square()),
    ):
        error = moments[f"{key}/w"].double() - (1 - beta) * expected
        assert torch.linalg.norm(error) / torch.linalg.norm((1 - beta) * expected) < tolerance, key
