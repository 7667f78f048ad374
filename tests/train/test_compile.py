"""torch.compile per block, in place, is a choice that changes speed and not the model."""

from collections.abc import Callable

import pytest
import torch

from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.parallel.apply import compiles
from surefoot.parallel.mesh import EnvironmentFault, World
from surefoot.train.setup import set_up
from surefoot.train.step import train_step
from tolerances import COMPILED

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_train_as_eager_ones_and_keep_their_names(
    config: RunConfig, vary: Callable[..., RunConfig], loader: Loader
) -> None:
    losses = {}
    for choice in ("off", "on"):
        setup, state = set_up(vary(config, **{"parallel.compile": choice}), ALONE)
        losses[choice] = [train_step(state, loader.batch(i), setup).metrics["train/loss"] for i in range(3)]
        assert not any("_orig_mod" in name for name in state.parameters)
    assert losses["on"] == pytest.approx(losses["off"], rel=COMPILED[torch.float32])


def test_without_a_compiler_auto_is_off_and_on_is_refused_with_the_remedy(
    config: RunConfig, vary: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not compiles(vary(config, **{"parallel.compile": "auto"}).parallel)
    with pytest.raises(EnvironmentFault, match=r"no C\+\+ compiler .*apt-get install g\+\+"):
        compiles(vary(config, **{"parallel.compile": "on"}).parallel)
