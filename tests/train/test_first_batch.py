"""The step-0 proof refuses a batch that is not what it should be, and doubts a loss outside its band."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.config.model import GroupedQueryAttention, InitConfig, ModelConfig, SwiGLU
from surefoot.config.run import RunConfig
from surefoot.data.errors import DataError
from surefoot.data.loader import Loader
from surefoot.parallel.mesh import World
from surefoot.proof.rehearsal import rehearse
from surefoot.train.first_batch import doubt_initial_loss, initial_loss_band, prove_first_batch
from surefoot.train.setup import set_up
from surefoot.train.step import train_step

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


def test_the_real_first_batch_is_accepted(loader: Loader) -> None:
    prove_first_batch(loader.batch(0), loader, (), ALONE)


def test_targets_that_leak_their_input_are_refused(loader: Loader) -> None:
    batch = loader.batch(0)
    leaked = dataclasses.replace(batch, targets_BT=np.where(batch.targets_BT >= 0, batch.tokens_BT, -100))
    with pytest.raises(DataError, match=r"not the next token.*Nothing was trained on it"):
        prove_first_batch(leaked, loader, (), ALONE)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("width", "std"), [(32, 0.02), (256, 0.02), (64, 0.1)])
def test_the_loss_of_drawn_weights_is_in_its_band(tied: bool, width: int, std: float) -> None:
    model = ModelConfig(
        vocab_size=300,
        d_model=width,
        num_layers=2,
        attention=GroupedQueryAttention(num_heads=2, num_kv_heads=1, d_head=width // 2),
        feed_forward=SwiGLU(d_ff=2 * width),
        tie_embeddings=tied,
        init=InitConfig(std=std),
    )
    from surefoot.model.parametrization import initialise
    from surefoot.model.transformer import Transformer

    network = Transformer(model, torch.float32)
    initialise(network, model, seed=1)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 300, (4, 65), generator=draw)
    positions = torch.arange(64).expand(4, 64)
    with torch.no_grad():
        sums = network(tokens[:, :-1].contiguous(), positions, None, tokens[:, 1:].contiguous())
    loss = float(sums.ce_sum) / 256
    low, high = initial_loss_band(model)
    assert low <= loss <= high
    assert doubt_initial_loss({"train/loss": loss}, model) == ""
    assert high - low < 1.2 + std * std * width / 2 + tied * width * std


def test_a_loss_outside_the_band_is_said_in_a_running_run(
    config: RunConfig, vary: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.train.first_batch.SLACK", -3.0)
    end = rehearse(vary(config, steps=2, **{"optim.warmup_steps": 1}), tmp_path / "run")
    assert any("untrained weights" in warning and "ln V = 5.549" in warning for warning in end.warnings)


def test_a_loss_that_is_not_finite_is_the_guards_business(config: RunConfig) -> None:
    assert doubt_initial_loss({"train/loss": math.nan}, config.model) == ""


def test_the_first_loss_of_the_rehearsal_is_near_ln_v(config: RunConfig, loader: Loader) -> None:
    setup, state = set_up(config, ALONE)
    loss = train_step(state, loader.batch(0), setup).metrics["train/loss"]
    assert loss == pytest.approx(math.log(257), abs=0.1)
