"""Transfer sweeps: which runs make one, how a grid grows, what is said of their optima; a small real sweep, whole and resumed."""

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import main
from surefoot.config.codec import to_toml
from surefoot.config.errors import ConfigError
from surefoot.config.model import CompleteP, MuP, Standard
from surefoot.config.run import RunConfig
from surefoot.monitor.run import Run
from surefoot.scale import transfer as module
from surefoot.scale.transfer import Plan, around, check_plan, run_plan, trial_of
from surefoot.scale.transfer_cells import Cell, Size, cell_name, families, read_cells, verdicts, write_cell
from surefoot.scale.transfer_page import headline, markdown, page, rows, swept
from surefoot.scale.transfer_picture import picture
from surefoot.scale.trials import Trial, TrialResult

Vary = Callable[..., RunConfig]
BASE = Size("standard", 32, 2)


@pytest.fixture
def plan(config: RunConfig, vary: Vary) -> Plan:
    base = vary(config, steps=3, **{"eval.final_rows": 2})
    return Plan(base=base, widths=(32, 64, 128), lrs=around(0.004, 1), seeds=(0, 1), command="surefoot transfer")


def cell(size: Size, lr: float, seed: int, loss: float, **other: Any) -> Cell:
    return Cell(
        kind=size.kind, d_model=size.d_model, num_layers=size.num_layers, base_d_model=32, base_num_layers=2, lr=lr,
        seed=seed, loss=loss, num_params=24 * size.d_model**2 * size.num_layers, num_tokens=512, batch_tokens=256, seconds=1.5,
        command="surefoot transfer", commit="0123456789abcdef", torch="2",
        **({"ending": "done", "reason": ""} | other),
    )  # fmt: skip


def bowls(
    best: Callable[[Size], float], sizes: Sequence[Size], rates: Sequence[float], noise: float = 0.0
) -> list[Cell]:
    """Parabolas around each size's best rate, three seeds."""
    draw = random.Random(3)
    return [
        cell(size, lr, seed, 2.0 + 0.05 * math.log2(lr / best(size)) ** 2 + draw.gauss(0.0, noise) + 0.1 * seed)
        for size in sizes
        for lr in rates
        for seed in (0, 1, 2)
    ]


WIDE = [BASE, *(Size(kind, width, 2) for kind in ("mup", "standard") for width in (64, 128, 256))]
RATES = around(0.001, 4)


def by_width(exponent: float, control: float) -> Callable[[Size], float]:
    return lambda size: 0.004 * (size.d_model / 32) ** -(control if size.kind == "standard" else exponent)


def test_the_base_is_run_once_for_all_parametrizations(plan: Plan) -> None:
    plan = dataclasses.replace(plan, depths=(2, 4))
    assert plan.sizes() == (
        BASE,
        Size("completep", 32, 4),
        Size("standard", 32, 4),
        Size("mup", 64, 2),
        Size("standard", 64, 2),
        Size("mup", 128, 2),
        Size("standard", 128, 2),
    )
    assert Size("standard", 64, 2) not in dataclasses.replace(plan, control=False).sizes()


def test_a_trial_changes_size_rate_seed_and_parametrization_and_the_guard_only_watches(plan: Plan) -> None:
    wide = trial_of(plan, Size("mup", 128, 2), 0.002, 1)
    assert wide.name == "mup-d128-L2-lr0.002-s1"
    assert wide.config.model.parametrization == MuP(base_d_model=32)
    assert (wide.config.model.d_model, wide.config.model.attention.num_heads) == (128, 16)  # type: ignore[union-attr]
    assert (wide.config.optim.lr, wide.config.seed, wide.config.guard.policy) == (0.002, 1, "observe")
    assert (wide.config.steps, wide.config.data) == (plan.base.steps, plan.base.data)
    deep = trial_of(plan, Size("completep", 32, 8), 0.002, 1)
    assert deep.config.model.parametrization == CompleteP(base_d_model=32, base_num_layers=2)
    assert deep.config.model.num_layers == 8
    assert isinstance(trial_of(plan, BASE, 0.1, 0).config.model.parametrization, Standard)


def result_of(name: str, loss: float) -> TrialResult:
    return TrialResult(
        name=name,
        fingerprint="",
        data_fingerprint="",
        ending="done",
        reason="",
        loss=loss,
        domains={},
        initial_loss=5.5,
        train_loss=2.0,
        steps=3,
        seconds=1.0,
        num_params=7,
    )


class Bowl:
    """Trials whose loss is a parabola in the rate: what is asked of ``run_trials``, in order."""

    def __init__(self, best: Callable[[str], float]) -> None:
        self.best, self.asked = best, list[list[str]]()

    def __call__(
        self, trials: Sequence[Trial], folder: Path, *, on_done: Callable[[TrialResult], None], **other: Any
    ) -> list[TrialResult]:
        self.asked.append([trial.name for trial in trials])
        for trial in trials:
            on_done(result_of(trial.name, 2.0 + 0.1 * math.log2(trial.config.optim.lr / self.best(trial.name)) ** 2))
        return []


def test_one_seed_of_everything_comes_first_and_an_edge_that_is_best_is_passed(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bowl = Bowl(lambda name: 0.0005 if name.startswith("standard-d64") else 0.004)
    monkeypatch.setattr(module, "run_trials", bowl)
    plan = dataclasses.replace(plan, widths=(32, 64))
    heard: list[Cell] = []
    cells = run_plan(plan, tmp_path, known={}, jobs=2, on_cell=heard.append)
    assert len(bowl.asked[0]) == 9
    assert all(name.endswith("-s0") for name in bowl.asked[0])
    assert bowl.asked[1:4] == [
        ["standard-d64-L2-lr0.001-s0"],
        ["standard-d64-L2-lr0.0005-s0"],
        ["standard-d64-L2-lr0.00025-s0"],
    ]
    assert len(bowl.asked[4]) == 12
    assert all(name.endswith("-s1") for name in bowl.asked[4])
    assert len(bowl.asked) == 5
    assert sorted(cells) == sorted(name for names in bowl.asked for name in names)
    assert [one.name for one in heard] == [name for names in bowl.asked for name in names]


def test_a_grid_grows_no_further_than_it_may_and_what_is_known_is_not_run(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bowl = Bowl(lambda name: 0.2)
    monkeypatch.setattr(module, "run_trials", bowl)
    plan = dataclasses.replace(plan, widths=(32, 64), seeds=(0,), extend=2)
    cells = run_plan(plan, tmp_path, known={}, jobs=1, on_cell=lambda one: None)
    assert max(one.lr for one in cells.values()) == 0.032
    again = Bowl(lambda name: 0.2)
    monkeypatch.setattr(module, "run_trials", again)
    assert run_plan(plan, tmp_path, known=cells, jobs=1, on_cell=lambda one: None) == cells
    assert again.asked == []


def test_a_failed_run_is_told_and_leaves_its_grid_alone(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bowl = Bowl(lambda name: 0.0001)

    def failing(trials: Sequence[Trial], folder: Path, **other: Any) -> list[TrialResult]:
        told = other.pop("on_done")

        def done(result: TrialResult) -> None:
            died = result.name.startswith("mup-d64")
            told(dataclasses.replace(result, ending="failed", reason="the process died") if died else result)

        return bowl(trials, folder, on_done=done, **other)

    monkeypatch.setattr(module, "run_trials", failing)
    plan = dataclasses.replace(plan, widths=(32, 64), seeds=(0,), extend=1)
    lost: list[str] = []
    cells = run_plan(
        plan, tmp_path, known={}, jobs=1, on_cell=lambda one: None, on_failure=lambda result: lost.append(result.name)
    )
    assert lost == [cell_name(Size("mup", 64, 2), lr, 0) for lr in plan.lrs]
    assert {one.size for one in cells.values()} == {BASE, Size("standard", 64, 2)}
    assert len(cells) == 8


def test_a_rate_that_holds_while_the_control_moves_transfers() -> None:
    [found] = verdicts(bowls(by_width(0.1, 1.0), WIDE, RATES, noise=0.001))
    assert (found.axis, found.kind, found.word) == ("width", "mup", "transfers")
    assert found.moved == pytest.approx(-0.3, abs=0.1)
    assert found.control_moved == pytest.approx(-3.0, abs=0.1)
    assert "factor-of-two steps at width 256; under standard by -3.0" in found.reason


def test_a_rate_that_moves_is_said_to_move() -> None:
    [found] = verdicts(bowls(by_width(1.0, 1.0), WIDE, RATES))
    assert found.word == "moves"
    assert found.moved == pytest.approx(-3.0)


def test_without_a_moving_control_nothing_is_proven() -> None:
    [found] = verdicts(bowls(by_width(0.0, 0.4), WIDE, RATES))
    assert found.word == "inconclusive"
    assert "less than two: this protocol does not tell parametrizations apart" in found.reason
    [alone] = verdicts([one for one in bowls(by_width(0.0, 1.0), WIDE, RATES) if one.kind == "mup" or one.size == BASE])
    assert (alone.word, alone.control_moved) == ("inconclusive", None)
    assert "there is no control" in alone.reason


def test_an_optimum_at_an_edge_decides_nothing_where_its_bound_leaves_it_open() -> None:
    cells = bowls(by_width(0.0, 1.0), WIDE, RATES)
    short = [one for one in cells if one.size != Size("mup", 256, 2) or one.lr <= 0.004]
    [found] = verdicts(short)
    assert found.word == "inconclusive"
    assert "at width 256 the highest rate is the best: the grid must go on" in found.reason
    # of the control, that it moved by at least so much is enough
    cut = [one for one in cells if one.size != Size("standard", 256, 2) or one.lr >= 0.001]
    [found] = verdicts(cut)
    assert found.word == "transfers"
    assert "under standard by at most -2.00" in found.reason
    # and that it moved by no more than so much is not
    cut = [one for one in cells if one.size != Size("standard", 256, 2) or one.lr <= 0.00025]
    assert verdicts(cut)[0].word == "inconclusive"


def test_a_blunt_optimum_decides_nothing() -> None:
    [found] = verdicts(bowls(by_width(0.0, 1.0), WIDE, RATES, noise=0.1))
    assert found.word == "inconclusive"


def test_an_optimum_that_perhaps_moves_by_more_than_a_step_decides_nothing() -> None:
    cells = [one for one in bowls(by_width(0.0, 1.0), WIDE, RATES) if one.size != Size("mup", 256, 2)]
    for seed, moved in enumerate((-0.8, -1.1, -1.4)):
        best = 0.004 * 2.0**moved
        cells += [cell(Size("mup", 256, 2), lr, seed, 2.0 + 0.05 * math.log2(lr / best) ** 2) for lr in RATES]
    [found] = verdicts(cells)
    assert found.word == "inconclusive"
    assert found.moved == pytest.approx(-1.1, abs=0.01)
    assert "its interval reaches below one step: more seeds would decide" in found.reason


def test_depth_is_judged_by_itself_and_shares_the_base() -> None:
    deep = [BASE, *(Size(kind, 32, depth) for kind in ("completep", "standard") for depth in (4, 8, 16))]
    cells = bowls(lambda size: 0.004 * (2 / size.num_layers if size.kind == "standard" else 1.0), deep, RATES)
    both = [*cells, *(one for one in bowls(by_width(0.0, 1.0), WIDE, RATES) if one.size != BASE)]
    assert [(one.axis, one.kind, one.word) for one in verdicts(both)] == [
        ("width", "mup", "transfers"),
        ("depth", "completep", "transfers"),
    ]
    held = families(both, "depth")
    assert [[row.size for row in family.rows] for family in held] == [[2, 4, 8, 16], [2, 4, 8, 16]]
    assert held[0].rows[0].curve == held[1].rows[0].curve


def test_the_table_says_what_the_small_ones_rate_costs_the_large_one() -> None:
    cells = bowls(by_width(0.0, 1.0), WIDE, RATES)
    cells[0] = cell(BASE, RATES[0], 0, 5.5, ending="diverged", reason="training loss not finite")
    table = rows(swept(cells))
    wide = next(row for row in table if row[:2] == ("standard", "width 256"))
    # three steps too high: 0.05 nats times nine
    assert wide[3:] == (
        "0.0005", "0.0005 to 0.0005 (0.00 steps)", "2.1000", "-3.00 (-3.00 to -3.00)", "+0.4500", "27", "0",
    )  # fmt: skip
    assert table[0][-1] == "1"
    text = markdown(cells, "transfer.svg")
    assert f"from the {len(cells)} result files" in text
    assert "mup over width: transfers. The best rate moves by" in text
    assert "Commits 0123456789a, torch 2" in text
    drawn = picture(swept(cells))
    # a line per size and one per parametrization; a circle per run and one per optimum
    assert drawn.count("<polyline") == 8 + 2
    assert drawn.count("<circle") == 8 * 27 + 8
    whole = page(cells, title="a <b>", command="surefoot transfer tiny")
    assert "a &lt;b&gt;" in whole
    assert "https://" not in whole
    assert headline(verdicts(cells))[0].startswith("mup over width: transfers.")


def test_cells_come_back_as_they_were_written(tmp_path: Path) -> None:
    cells = bowls(by_width(0.0, 1.0), WIDE[:2], RATES)
    for one in cells:
        write_cell(tmp_path, one)
    (tmp_path / "else-s0.json").write_text("{}")
    assert read_cells(tmp_path) == {one.name: one for one in cells}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"widths": (32,)}, "no size but the recipe's own is asked for"),
        ({"lrs": (0.1, 0.2)}, "learning rates 0.1, 0.2: three different ones above 0 at least"),
        ({"seeds": (1, 1)}, "seeds 1, 1: one at least, none twice"),
        ({"widths": (32, 40)}, "d_model=40 gives no whole"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(plan: Plan, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_plan(dataclasses.replace(plan, **changes))


def test_a_recipe_that_is_parametrized_already_has_no_base(plan: Plan, vary: Vary) -> None:
    with pytest.raises(ConfigError, match="leave it standard"):
        check_plan(dataclasses.replace(plan, base=vary(plan.base, **{"model.parametrization": MuP(base_d_model=16)})))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--widths", "64,wide"], "--widths 64,wide: 'wide' is not a number"),
        (["--lrs", "0.1,-1,0.2"], "-1 must be above 0"),
        (["--lrs", "nan"], "nan must be above 0"),
        (["--seeds", "0"], "--seeds 0: at least 1"),
        ([], "give --widths, --depths or both"),
    ],
)
def test_a_wrong_command_line_is_answered(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "tiny", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_small_sweep_runs_prints_and_goes_on(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.toml").write_text(to_toml(plan.base))
    words = ["transfer", str(tmp_path / "base.toml"), "--widths", "64", "--lrs", "1e-3,3e-3,9e-3", "--seeds", "1"]
    words += ["--extend", "0", "--no-control", "--jobs", "2", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    told = capsys.readouterr()
    assert told.err.count("mup-d64-L2-lr") == 3
    assert "mup over width: inconclusive" in told.out
    assert (tmp_path / "out" / "transfer.html").read_text().startswith("<!doctype html>")
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [run["loss"] for run in facts["runs"]] == [
        run["loss"] for run in json.loads((tmp_path / "out" / "transfer.json").read_text())["runs"]
    ]
    assert [size["size"] for size in facts["sizes"]] == [32, 64]
    assert facts["verdicts"][0]["kind"] == "mup"
    assert len(Run(tmp_path / "out" / "mup-d64-L2-lr0.001-s7").attempts) == 1
