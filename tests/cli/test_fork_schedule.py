"""A decay is a branch: forked from any checkpoint, its rates the closed form, its parent untouched."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.cli.fork import main, too_short
from surefoot.config.codec import from_toml
from surefoot.config.errors import ConfigError
from surefoot.config.optim import WSD, Cosine
from surefoot.config.run import ByFlops, ByHours, ByTokens, RunConfig
from surefoot.monitor.run import Run
from surefoot.optim.schedule import lr_at
from surefoot.parallel.mesh import World
from surefoot.proof.rehearsal import rehearse
from surefoot.train.setup import set_up

ALONE = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)
Vary = Callable[..., RunConfig]


@pytest.fixture
def stable(config: RunConfig, vary: Vary) -> RunConfig:
    """24 steps, a checkpoint every 5; the decay is of the last two."""
    return vary(config, **{"optim.schedule": WSD(decay_steps=2)})


def test_a_decay_branch_starts_from_any_checkpoint(
    stable: RunConfig, vary: Vary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = vary(stable, **{"checkpoint.keep_last": 9})
    whole = rehearse(config, tmp_path / "run")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
    for at, steps, length, shape in ((10, 16, 6, "linear"), (20, 24, 3, "one_minus_sqrt")):
        name = f"branch-{at}"
        words = [f"optim.schedule.decay_steps={length}", f"steps={steps}", f"optim.schedule.shape={shape}"]
        sets = [word for item in words for word in ("--set", item)]
        assert main([str(tmp_path / "run"), "--at", str(at), *sets, "--run", str(tmp_path / name)]) == 0
        branch, forked = Run(tmp_path / name), from_toml(RunConfig, tmp_path / name / "config.toml")
        assert [row["batch_index"] for row in branch.rows] == list(range(at, steps))
        rates = [row["train/lr"] for row in branch.rows]
        assert rates == [lr_at(step, forked.optim, steps) for step in range(at, steps)]
        still = steps - length - at
        assert rates[:still] == [config.optim.lr] * still
        falls = {"linear": lambda p: 1 - p, "one_minus_sqrt": lambda p: 1 - p**0.5}[shape]
        form = [config.optim.lr * falls((n + 1) / length) for n in range(length)]
        assert rates[still:] == pytest.approx(form, abs=1e-15)
        joined = [row["train/lr"] for row in branch.joined_rows[:at]]
        assert joined == [row["train/lr"] for row in Run(tmp_path / "run").rows[:at]]
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert after == before
    assert Run(tmp_path / "run").ledger.finish is not None
    assert whole.step == 24


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ({"steps": 10}, "steps=10: the fork starts at step 10; give it more with --set steps=N"),
        (
            {"bound": ByTokens(tokens=2000.0)},
            "bound.kind='tokens' is 8 steps: the fork starts at step 10; give it more with --set bound.tokens=N",
        ),
        (
            {"steps": 14, "optim.schedule": WSD(decay_steps=6)},
            "optim.schedule.decay_steps=6: the decay of a run of 14 steps begins at step 8, before the fork does, at step 10, so that its "
            "rate would jump; --set optim.schedule.decay_steps=4 begins it there",
        ),
        (
            {"steps": 12, "optim.schedule": WSD(decay_fraction=0.25)},
            "optim.schedule.decay_fraction=0.25: the decay of a run of 12 steps begins at step 9, before the fork does, at step 10, so that "
            "its rate would jump; --set optim.schedule.decay_steps=2 begins it there",
        ),
        ({"steps": 14, "optim.schedule": WSD(decay_steps=4)}, None),
        ({"bound": ByTokens(tokens=14 * 256.0), "optim.schedule": WSD(decay_steps=4)}, None),
        ({"bound": ByHours(hours=1.0)}, None),
        ({"steps": 14, "optim.schedule": Cosine()}, None),
    ],
)
def test_a_branch_whose_decay_comes_too_early_is_refused(
    stable: RunConfig, vary: Vary, sets: dict[str, object], problem: str | None
) -> None:
    assert too_short(vary(stable, **sets), stable, 10, 0) == problem


def test_the_decay_that_is_under_way_goes_on_in_a_fork_with_other_data(stable: RunConfig, vary: Vary) -> None:
    assert too_short(vary(stable, **{"data.val_fraction": 0.2}), stable, 23, 0) is None
    assert too_short(vary(stable, **{"optim.lr": 1e-3}), stable, 23, 0) is not None
    timed = vary(stable, bound=ByHours(hours=1.0))
    assert too_short(stable, timed, 23, 24) is None
    assert too_short(stable, timed, 23, 30) is not None


def test_flops_are_counted_without_a_built_model(stable: RunConfig, vary: Vary) -> None:
    setup, _ = set_up(stable, ALONE)
    bound = ByFlops(flops=setup.flops_per_token * 256 * 7.5)
    assert "bound.kind='flops' is 8 steps" in str(too_short(vary(stable, bound=bound), stable, 10, 0))


def test_a_decay_longer_than_the_run_is_refused_before_anything_is_opened(stable: RunConfig, tmp_path: Path) -> None:
    rehearse(stable, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"decay_steps=99 is longer than the run: steps=24; at most 24"):
        main(
            [
                str(tmp_path / "run"),
                "--at",
                "20",
                "--set",
                "optim.schedule.decay_steps=99",
                "--run",
                str(tmp_path / "x"),
            ]
        )
    assert not (tmp_path / "x").exists()
