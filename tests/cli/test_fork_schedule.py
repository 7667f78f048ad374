"""A decay is a branch: forked from any checkpoint, its rates the closed form, its parent untouched."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.cli.fork import another_function, main, too_short
from surefoot.config.codec import from_toml
from surefoot.config.errors import ConfigError
from surefoot.config.model import CompleteP, MuP
from surefoot.config.optim import WSD, Cosine
from surefoot.config.run import ByFlops, ByHours, ByMoney, BySteps, ByTokens, RunConfig
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


def test_a_fork_that_its_clock_ends_does_not_begin_in_its_parents_decay(stable: RunConfig, vary: Vary) -> None:
    decaying = vary(stable, **{"optim.schedule": WSD(decay_steps=12)})
    timed = vary(decaying, bound=ByHours(hours=0.5))
    assert too_short(timed, decaying, 12, 0) is None
    assert too_short(timed, decaying, 13, 0) == (
        "bound.hours=0.5: the parent's decay began at step 12, before the fork does, at step 13, and the fork's begins when its clock says "
        "so: until then its rate would jump back to the peak; fork --at step 12 or before, or let that decay go on: --set bound.kind=steps "
        "--set steps=24"
    )
    # over: nothing is left to go on
    assert str(too_short(timed, decaying, 24, 0)).endswith("fork --at step 12 or before")
    paid = vary(decaying, bound=ByMoney(money=3.0, price_per_hour=2.0))
    assert str(too_short(paid, decaying, 13, 0)).startswith("bound.money=3: ")


def test_the_decay_that_a_clock_decided_is_the_one_that_counts(stable: RunConfig, vary: Vary) -> None:
    timed = vary(stable, bound=ByHours(hours=0.5), **{"optim.schedule": WSD(decay_fraction=0.5)})
    assert too_short(timed, timed, 90, 0) is None  # not decided yet
    assert too_short(timed, timed, 90, 100, 10.0) is None
    assert str(too_short(timed, timed, 91, 100, 10.0)).endswith(
        "fork --at step 90 or before, or let that decay go on: --set bound.kind=steps --set steps=100 --set optim.schedule.decay_steps=10"
    )
    on = vary(timed, bound=BySteps(), steps=100, **{"optim.schedule": WSD(decay_steps=10)})
    assert too_short(on, timed, 91, 100, 10.0) is None
    assert too_short(vary(on, steps=101), timed, 95, 100, 10.0) is not None
    assert too_short(vary(on, **{"optim.schedule": WSD(decay_fraction=0.5)}), timed, 91, 100, 10.0) is not None
    assert too_short(vary(on, **{"optim.lr": 1e-3}), timed, 91, 100, 10.0) is not None


def test_a_fork_whose_weights_would_be_another_function_is_refused(
    config: RunConfig, vary: Vary, tmp_path: Path
) -> None:
    rehearse(vary(config, steps=6), tmp_path / "run")
    words = [str(tmp_path / "run"), "--at", "5", "--run", str(tmp_path / "x"), "--set", "steps=12"]
    wrong = (
        r"model.logit_multiplier=0.5: the forward's multipliers would change \(logits 1 to 0.5\), and the parent's weights would be another "
        r"function; fork with the parent's model.logit_multiplier=1.0, or train anew"
    )
    with pytest.raises(ConfigError, match=wrong):
        main([*words, "--set", "model.logit_multiplier=0.5"])
    assert not (tmp_path / "x").exists()
    # the base of a size that is no longer that of the run
    scaled = vary(config, **{"model.parametrization": MuP(base_d_model=8, base_d_head=32)})
    text = str(another_function(scaled, config))
    assert text.startswith(
        'model.parametrization.kind="mup", model.parametrization.base_d_model=8, model.parametrization.base_d_head=32: '
    )
    assert "(logits 1 to 0.25, attention 1 to 2)" in text
    assert 'fork with the parent\'s model.parametrization.kind="standard", or' in text
    assert another_function(vary(scaled, **{"optim.lr": 1e-3}), scaled) is None
    deep = vary(config, **{"model.parametrization": CompleteP(base_d_model=32, base_num_layers=2, alpha=1.0)})
    assert another_function(deep, config) is None  # at its base it is the standard one
    assert "(residual 1 to 0.5)" in str(another_function(vary(deep, **{"model.num_layers": 4}), deep))
    # another width takes over no matrix
    assert another_function(vary(scaled, **{"model.d_model": 64}), scaled) is None
