"""Sweeps: what is varied, every mistake at once, and what the results are said to show."""

import json
import math
import shlex
from html import escape
from pathlib import Path

import pytest

from surefoot.cli.train_args import parse_train_args
from surefoot.config.codec import resolve
from surefoot.config.errors import ConfigError
from surefoot.config.fingerprint import fingerprint
from surefoot.recipes.tiny import tiny
from surefoot.scale.loss_charts import Axis, Dot, Series, loss_chart
from surefoot.scale.sweep import Sweep, to_facts
from surefoot.scale.sweep_axes import (
    Axis as Varied,
)
from surefoot.scale.sweep_axes import (
    Combination,
    combine,
    common_fingerprint,
    common_flags,
    flags_of,
    read_axes,
    settings_of,
    short_names,
    split_values,
)
from surefoot.scale.sweep_page import best_command, sweep_page
from surefoot.scale.sweep_score import Score, score
from surefoot.scale.sweep_table import leaf_rows, setting_heads, setting_rows
from surefoot.scale.trials import TrialResult
from tolerances import ARITHMETIC


def grid(*words: str, seeds: int = 1) -> list[Combination]:
    axes = read_axes(words, drawn=False)
    return combine(tiny(), [], [], axes, settings_of(axes, 0, 0), seeds)


def problems(words: list[str], *, drawn: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        read_axes(words, drawn=drawn)
    return str(caught.value)


def test_a_grid_is_every_value_with_every_other_and_every_seed() -> None:
    found = grid("optim.lr=1e-3,1e-2", "model.attention.qk_norm=true,false", seeds=2)
    assert [each.name for each in found][:3] == [
        "lr=0.001,qk_norm=true,seed=0",
        "lr=0.001,qk_norm=true,seed=1",
        "lr=0.001,qk_norm=false,seed=0",
    ]
    assert len({fingerprint(each.config) for each in found}) == len(found) == 8
    last = found[-1]
    assert (last.config.optim.lr, last.config.seed) == (1e-2, 1)
    assert last.values == {"optim.lr": 1e-2, "model.attention.qk_norm": False}


def test_ranges_are_spaced_evenly_on_their_scale() -> None:
    (log, linear, whole) = read_axes(["a=log:1e-4..1e-1:4", "b=linear:0..0.3:4", "c=int:1..8:3"], drawn=False)
    assert log.values == ("0.0001", "0.001", "0.01", "0.1")
    assert linear.values == ("0", "0.1", "0.2", "0.3")
    assert whole.values == ("1", "4", "8")


def test_draws_stay_inside_their_ranges_and_more_of_them_keep_the_first() -> None:
    axes = read_axes(
        ["optim.lr=log:1e-4..1e-1", "model.num_layers=int:1..4", "optim.decay=decoupled,independent"], drawn=True
    )
    few, many = settings_of(axes, 10, 3), settings_of(axes, 60, 3)
    assert many[:10] == few
    assert settings_of(axes, 10, 4) != few
    rates = [float(lr) for lr, _, _ in many]
    assert all(1e-4 <= lr <= 1e-1 for lr in rates)
    assert 10 < sum(lr < 10**-2.5 for lr in rates) < 50, "even on a logarithmic scale"
    assert {layers for _, layers, _ in many} == {"1", "2", "3", "4"}
    assert {kind for _, _, kind in many} == {"decoupled", "independent"}


def test_a_wrong_range_or_list_says_what_would_be_right() -> None:
    text = problems(
        [
            "optim.lr=log:0..1:3",
            "a",
            "b=1,,2",
            "c=int:1.5..2:3",
            "d=log:1e-4..1e-1",
            "e=linear:2..1:3",
            "f=1,1",
            "g=log:x..1:3",
        ]
    )
    for told in (
        "--vary optim.lr=log:0..1:3: a logarithmic range begins above 0, not at 0",
        "--vary a: give it as KEY=A,B,C, such as optim.lr=1e-3,3e-3,1e-2",
        "--vary b=1,,2: a value is empty",
        "the ends of an int range are whole numbers",
        "--vary d=log:1e-4..1e-1: a grid needs the number of points (2 or more): log:1e-4..1e-1:5; or draw with --random N",
        "the range begins at 2 and ends at 1; the lower end comes first",
        "--vary f=1,1: a value is given twice",
        "a range is log:LOW..HIGH, linear:LOW..HIGH or int:LOW..HIGH",
    ):
        assert told in text
    assert "leave out :5" in problems(["optim.lr=log:1e-4..1e-1:5"], drawn=True)
    assert "nothing to vary; give --vary KEY=A,B,C" in problems([])
    assert "--vary a: given twice" in problems(["a=1,2", "a=3"])


def test_every_mistake_of_every_combination_is_told_once() -> None:
    axes = read_axes(["optim.lrr=1e-3,1e-2", "model.attention.num_heads=6,5"], drawn=False)
    with pytest.raises(ConfigError) as caught:
        combine(tiny(), [], ["--stps", "3"], axes, settings_of(axes, 0, 0), 1)
    told = caught.value.problems
    assert "--optim.lrr: optim.lrr is not a setting; nearest: optim.lr (a number, default 0.003)" in told
    assert "--stps: stps is not a setting; nearest: steps (a whole number, required)" in told
    (heads,) = [text for text in told if "num_heads=5" in text]
    assert heads.endswith("(with lrr=1e-3, num_heads=5 and 1 more)")
    assert len(told) == 3


def test_a_varied_seed_and_a_number_of_seeds_contradict_each_other() -> None:
    assert [each.seed for each in grid("seed=3,4")] == [3, 4]
    with pytest.raises(ConfigError, match="seeds are given by --seeds N"):
        grid("seed=3,4", seeds=2)


def test_values_with_commas_of_their_own_stay_whole() -> None:
    assert split_values('[1,2],{a = "x,]"},c') == ("[1,2]", '{a = "x,]"}', "c")
    found = grid("data.mixture_stages=[],[{start_row=4,weights=[1.0,2.0]}]")
    assert [len(each.config.data.mixture_stages) for each in found] == [0, 1]


def test_values_that_look_alike_in_a_name_do_not_share_a_folder() -> None:
    found = grid("data.cache_dir=a b,a_b", "optim.optimizer.weight_decay=0.1,0.2")
    assert len({each.name for each in found}) == 4


NEAR = (0.0012345671, 0.0012345672)


def test_values_alike_to_six_digits_share_neither_name_nor_flags_nor_place_in_a_table() -> None:
    found = grid(f"optim.lr={NEAR[0]},{NEAR[1]},0.001")
    assert [each.name.startswith("lr=0.00123457,seed=0-") for each in found] == [True, True, False]
    assert len({each.name for each in found}) == 3
    assert grid(f"optim.lr={NEAR[1]}")[0].name == found[1].name, "whatever it is tried with"
    assert [flags_of(each.values) for each in found][:2] == [f"--optim.lr {lr!r}" for lr in NEAR]
    scored = score(found, {each.name: result(each.name, 2.0 + n) for n, each in enumerate(found)})
    assert [(leaf.text, leaf.mean) for leaf in scored.leaf("optim.lr")] == [
        ("0.001", 4.0),
        ("0.0012345671", 2.0),
        ("0.0012345672", 3.0),
    ]


def test_sweeps_of_one_recipe_are_told_apart_by_what_all_their_runs_have(tmp_path: Path) -> None:
    over = tmp_path / "over.toml"
    over.write_text("steps = 40\n")
    alone = common_fingerprint(tiny(), [], [])
    assert alone == fingerprint(tiny())
    in_file, as_flag = common_fingerprint(tiny(), [over], []), common_fingerprint(tiny(), [], ["--steps", "40"])
    assert alone != in_file == as_flag
    # flags that are a mistake without what is varied
    wider = [common_fingerprint(tiny(), [], ["--model.d_model", width]) for width in ("66", "66", "67")]
    assert wider[0] == wider[1] != wider[2]
    written = common_fingerprint(tiny(), [over], ["--model.d_model=66"])
    over.write_text("steps = 41\n")
    assert written != common_fingerprint(tiny(), [over], ["--model.d_model=66"])


def test_the_best_is_told_with_what_all_runs_have(tmp_path: Path) -> None:
    over = tmp_path / "over it.toml"
    over.write_text("steps = 40\n")
    flags = ["--optim.warmup_steps", "3", "--data.cache_dir=it's"]
    axes = read_axes(["optim.lr=0.00123456789"], drawn=False)
    combinations = combine(tiny(), [over], flags, axes, settings_of(axes, 0, 0), 1)
    found = score(combinations, {each.name: result(each.name, 1.0) for each in combinations})
    assert found.best is not None
    common = common_flags([over], flags)
    sweep = Sweep(recipe="tiny", combinations=combinations, folder=tmp_path, command="surefoot sweep", common=common)
    told = best_command(found.best, "tiny", common)
    assert to_facts(sweep, found)["best"]["flags"] == told.removeprefix("surefoot train tiny ")
    assert escape(told) in sweep_page(found, title="Sweep", recipe="tiny", command="c", common=common)
    assert parse_train_args(shlex.split(told)[2:]).config == combinations[0].config


def test_names_are_as_short_as_tells_them_apart() -> None:
    assert short_names(["optim.lr", "optim.roles.norm.lr", "steps"]) == ["optim.lr", "norm.lr", "steps"]


def test_flags_read_back_as_the_same_config() -> None:
    for each in grid("optim.lr=1e-5,0.00123", "data.cache_dir=it is,b", "optim.optimizer.kind=muon"):
        assert resolve(tiny(), [], shlex.split(flags_of(each.values))) == each.config


def result(name: str, loss: float, ending: str = "done", reason: str = "") -> TrialResult:
    return TrialResult(
        name=name,
        fingerprint="f",
        data_fingerprint="d",
        ending=ending,  # type: ignore[arg-type]
        reason=reason,
        loss=loss,
        domains={"x": loss},
        initial_loss=5.5,
        train_loss=loss,
        steps=9,
        seconds=1.0,
        num_params=10,
    )


def swept(losses: dict[tuple[str, str], list[float]]) -> tuple[list[Combination], Score]:
    """Two settings by two seeds; a loss of nan diverged."""
    rates, norms = ({key[n]: None for key in losses} for n in (0, 1))
    combinations = grid(f"optim.lr={','.join(rates)}", f"model.attention.qk_norm={','.join(norms)}", seeds=2)
    results = {}
    for each in combinations:
        loss = losses[str(each.values["optim.lr"]), str(each.values["model.attention.qk_norm"]).lower()][each.seed]
        bad = math.isnan(loss)
        results[each.name] = result(each.name, loss, "diverged" if bad else "done", "went up" if bad else "")
    return combinations, score(combinations, results)


LOSSES = {
    ("0.001", "true"): [2.0, 2.2],
    ("0.001", "false"): [2.1, 2.5],
    ("0.01", "true"): [1.0, 1.1],
    ("0.01", "false"): [0.5, math.nan],
    ("0.1", "true"): [3.0, 3.0],
    ("0.1", "false"): [math.nan, math.nan],
}


def test_the_best_is_the_lowest_mean_whose_seeds_all_came_to_an_end() -> None:
    _, found = swept(LOSSES)
    assert found.best is not None
    assert found.best.values == {"optim.lr": 0.01, "model.attention.qk_norm": True}
    spread = found.best.spread
    assert (spread.mean, spread.low, spread.high, spread.count) == (1.05, 1.0, 1.1, 2)
    assert abs(spread.std - 0.05 * math.sqrt(2)) < ARITHMETIC
    assert found.remarks() == []


def test_loss_against_a_leaf_is_of_its_best_setting_and_counts_what_diverged() -> None:
    _, found = swept(LOSSES)
    small, middle, large = found.leaf("optim.lr")
    assert [value.text for value in (small, middle, large)] == ["0.001", "0.01", "0.1"]
    assert middle.best is found.best
    assert small.best is not None
    assert small.best.spread.mean == 2.1
    assert abs(middle.mean - 2.6 / 3) < ARITHMETIC
    assert [value.diverged for value in (small, middle, large)] == [0, 1, 2]
    rows = leaf_rows(found.leaf("model.attention.qk_norm"), found.best)
    assert rows[0] == ["true *", "1.0500", "1.0000..1.1000", "0.0707", "2.0500", "6", "-"]
    assert rows[1][-1] == "3"


def test_diverged_runs_stay_in_the_table_with_their_reason() -> None:
    _, found = swept(LOSSES)
    rows = setting_rows(found)
    assert setting_heads(found) == ["lr", "qk_norm", "mean loss", "min..max", "std", "seeds", "ended"]
    assert rows[0] == ["0.01", "true", "1.0500", "1.0000..1.1000", "0.0707", "2", "done"]
    assert ["0.01", "false", "0.5000", "-", "-", "2", "1 diverged: went up"] in rows
    assert ["0.1", "false", "-", "-", "-", "2", "2 diverged: went up"] in rows


def test_a_best_at_the_edge_or_within_the_spread_is_said_to_be() -> None:
    (edge,) = swept({**LOSSES, ("0.1", "true"): [0.2, 0.3]})[1].remarks()
    assert edge == "the best optim.lr is the largest that was tried: the optimum may lie beyond it"
    (close,) = swept({**LOSSES, ("0.01", "false"): [1.0, 1.15]})[1].remarks()
    assert close.startswith("the next best is as good within the spread over seeds")
    single = grid("optim.lr=0.1,0.2,0.3")
    results = {each.name: result(each.name, abs(each.config.optim.lr - 0.2)) for each in single}
    (one,) = score(single, results).remarks()
    assert one.startswith("one seed each")
    assert score(single, {}).remarks() == ["no setting came to its end with all its seeds"]


def test_facts_and_page_hold_every_run(tmp_path: Path) -> None:
    combinations, found = swept(LOSSES)
    sweep = Sweep(recipe="tiny", combinations=combinations, folder=tmp_path, command="surefoot sweep tiny --vary <x>")
    facts = json.loads(json.dumps(to_facts(sweep, found), allow_nan=False))
    assert facts["best"]["flags"] == "--optim.lr 0.01 --model.attention.qk_norm true"
    assert [len(setting["runs"]) for setting in facts["settings"]] == [2] * 6
    assert facts["settings"][-1]["runs"][0]["reason"] == "went up"
    assert facts["settings"][-1]["loss"] is None
    assert [value["diverged"] for value in facts["leaves"]["optim.lr"]] == [0, 1, 2]
    page = sweep_page(found, title="Sweep", recipe="tiny", command=sweep.command)
    assert "surefoot train tiny --optim.lr 0.01 --model.attention.qk_norm true" in page
    assert "surefoot sweep tiny --vary &lt;x&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<circle") == 2 * 9
    assert page.count("l8 8m0 -8l-8 8") == 2 * 3


def test_a_chart_puts_values_where_they_belong() -> None:
    axis = Axis(label="lr", scale="log", ticks=[(0.01, "0.01"), (0.1, "0.1"), (1.0, "1")])
    dots = [Dot(x=0.01, y=1.0), Dot(x=0.1, y=2.0), Dot(x=1.0, y=99.0, diverged=True)]
    picture = loss_chart([Series(name="a", dots=dots, line=[(0.01, 1.0), (0.1, 2.0)])], axis, title="t")
    places = [float(part.split('"')[0]) for part in picture.split('<circle cx="')[1:]]
    heights = [float(part.split('"')[0]) for part in picture.split(' cy="')[1:]]
    cross = float(picture.split('<path d="M')[1].split(" ")[0]) + 4
    assert abs((cross - places[1]) - (places[1] - places[0])) < 0.11, "one decade is as wide as another"
    assert heights[0] > heights[1]
    assert "99" not in picture


def test_axes_are_told_apart_by_their_keys() -> None:
    assert read_axes(["--optim.lr=1,2"], drawn=False) == [Varied(key="optim.lr", values=("1", "2"))]
