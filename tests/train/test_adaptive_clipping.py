"""Adaptive clipping inside runs: what it remembers is skipped, resumed, rolled back and shared over ranks like the weights."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot.config.optim import AdaGC, GlobalNorm, ZClip
from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.guard.limits import Limits
from surefoot.parallel.digest import digest_tensors
from surefoot.parallel.fork_launch import run_ranks
from surefoot.parallel.mesh import World
from surefoot.proof.faults import with_nan_gradients
from surefoot.proof.rehearsal import Script, rehearse, rehearse_on_rank
from surefoot.train.setup import set_up
from surefoot.train.step import train_step
from tolerances import FP64_RANKS

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
BOTH = [ZClip(warmup_steps=3, z_threshold=0.5), AdaGC(warmup_steps=4, ratio=1.01)]
Vary = Callable[..., RunConfig]


@pytest.fixture(params=BOTH, ids=lambda clipping: str(clipping.kind))
def clipped(request: pytest.FixtureRequest, config: RunConfig, vary: Vary) -> RunConfig:
    """A run whose clipping acts in most of its steps."""
    return vary(
        config, steps=18, **{"optim.clipping": request.param, "optim.clip_norm": 0.0, "parallel.precision": "fp64"}
    )


@pytest.mark.parametrize("gated", [True, False])
def test_a_nan_leaves_what_clipping_remembers_to_the_bit(
    clipped: RunConfig, vary: Vary, loader: Loader, gated: bool
) -> None:
    setup, state = set_up(vary(clipped, **{"optim.gated": gated}), ALONE)
    setup = with_nan_gradients(setup, state, {0, 6})
    for index in range(6):
        train_step(state, loader.batch(index), setup)
    before = digest_tensors(state.tensors())
    assert any(name.startswith("clip/") and float(t) > 0 for name, t in state.tensors().items())
    assert train_step(state, loader.batch(6), setup).skipped
    assert digest_tensors(state.tensors()) == before
    assert float(state.tensors()["clip/steps"]) == state.step == 5


def test_a_resumed_and_a_rolled_back_run_end_as_the_uninterrupted_one(clipped: RunConfig, tmp_path: Path) -> None:
    whole = rehearse(clipped, tmp_path / "whole")
    rehearse(clipped, tmp_path / "run", Script(stop_after=12))
    assert rehearse(clipped, tmp_path / "run").digests == whole.digests
    for to_batch in (9, 1):  # from memory or disk, and from the initial weights
        script = Script(rollback_after=14, rollback_to=to_batch)
        assert rehearse(clipped, tmp_path / f"back-{to_batch}", script).digests == whole.digests


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_clip_as_one(clipped: RunConfig, vary: Vary, tmp_path: Path, layout: str) -> None:
    one = rehearse(clipped, tmp_path / "one")
    config = vary(clipped, **{"parallel.data_parallel": layout})
    two = run_ranks(2, rehearse_on_rank, config, tmp_path / "two")[0]
    assert one.tensors.keys() == two.tensors.keys()
    for name, tensor in one.tensors.items():
        assert np.linalg.norm(tensor - two.tensors[name]) <= FP64_RANKS * np.linalg.norm(tensor), name


def test_it_acts_only_when_its_warm_up_is_over(clipped: RunConfig, vary: Vary, loader: Loader) -> None:
    """Without a cap the first steps are the plain run's, to the bit, and the later ones are not."""
    plain = vary(clipped, **{"optim.clipping": GlobalNorm()})
    differ = []
    states = []
    for config in (clipped, plain):
        setup, state = set_up(config, ALONE)
        for index in range(8):
            train_step(state, loader.batch(index), setup)
            if config is clipped:
                states.append(digest_tensors({n: t for n, t in state.tensors().items() if not n.startswith("clip/")}))
            else:
                differ.append(digest_tensors(state.tensors()) != states[index])
    assert differ[:3] == [False] * 3
    assert differ[-1]


def test_the_guards_own_limit_still_caps_what_is_left(clipped: RunConfig, loader: Loader) -> None:
    setup, state = set_up(clipped, ALONE)
    for index in range(6):
        train_step(state, loader.batch(index), setup)
    limited = train_step(state, loader.batch(6), setup, limits=Limits(clip_norm=0.01))
    assert limited.signals.clipped_harder
    squares = sum(float(p.grad.square().sum()) for p in state.parameters.values() if p.grad is not None)
    assert math.sqrt(squares) == pytest.approx(0.01, rel=1e-6)
