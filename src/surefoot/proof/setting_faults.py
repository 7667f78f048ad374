"""Faults that are settings: the run has them from its first step to its last."""

import dataclasses

from surefoot.config.model import GroupedQueryAttention
from surefoot.config.optim import AdamW
from surefoot.config.run import RunConfig
from surefoot.proof.faults import Dose


def _optim(config: RunConfig, *, lr: float = 1.0, **changes: object) -> RunConfig:
    optim = dataclasses.replace(config.optim, lr=config.optim.lr * lr, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(config, optim=optim)


def _without_qk_norm(config: RunConfig) -> RunConfig:
    attention = config.model.attention
    assert isinstance(attention, GroupedQueryAttention)
    model = dataclasses.replace(config.model, attention=dataclasses.replace(attention, qk_norm=False))
    return dataclasses.replace(config, model=model)


def high_rate(config: RunConfig, dose: Dose) -> RunConfig:
    """The peak rate times the magnitude, and no QK-norm to hold the attention logits."""
    return _without_qk_norm(_optim(config, lr=dose.magnitude))


def no_warmup(config: RunConfig, dose: Dose) -> RunConfig:
    """A warm-up of one step to the peak rate times the magnitude."""
    return _optim(config, lr=dose.magnitude, warmup_steps=1)


def long_memory(config: RunConfig, dose: Dose) -> RunConfig:
    """A second moment that forgets slowly, with nothing under its root, at the peak rate times the magnitude."""
    assert isinstance(config.optim.optimizer, AdamW)
    settings = dataclasses.replace(config.optim.optimizer, beta2=0.999, eps=1e-15)
    return _optim(config, lr=dose.magnitude, optimizer=settings)


def low_precision(config: RunConfig, dose: Dose) -> RunConfig:
    """bf16, where a product can overflow that fp32 would hold."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, precision="bf16"))
