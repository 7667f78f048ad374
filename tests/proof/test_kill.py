"""The kill test's own eyes: what they must see in a run that did not end as the unkilled one."""

import random
import shutil
from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.data.loader import Loader
from surefoot.monitor.run import Run
from surefoot.proof import kill
from surefoot.proof.kill import AIMS, PLACES, choose_aim, differences, run_cell
from surefoot.proof.rehearsal import Script, rehearse

ROWS = Path("attempts") / "0001" / "metrics.jsonl"


@pytest.fixture
def pair(config: RunConfig, tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of one run."""
    rehearse(config, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    return tmp_path / "one", tmp_path / "other"


def rewrite(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    path.write_text("".join(lines))


def without(path: Path, line: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:line] + lines[line + 1 :]))


def test_equal_runs_do_not_differ(pair: tuple[Path, Path], loader: Loader) -> None:
    assert differences(*pair, loader) == []


def test_one_changed_loss_is_seen(pair: tuple[Path, Path], loader: Loader) -> None:
    loss = Run(pair[1]).rows[7]["train/loss"]
    rewrite(pair[1] / ROWS, 7, f'"train/loss":{loss}', f'"train/loss":{loss + 1e-9}')
    problems = differences(*pair, loader)
    assert len(problems) == 1
    assert "rows differ" in problems[0]
    assert "train/loss" in problems[0]


def test_another_end_is_seen_though_every_row_is_the_same(
    config: RunConfig, loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse(config, tmp_path / "one")
    monkeypatch.setattr("surefoot.train.finishing.combine", lambda digests: "0123456789abcdef")
    rehearse(config, tmp_path / "other")
    problems = differences(tmp_path / "one", tmp_path / "other", loader)
    assert len(problems) == 1
    assert "the end differs" in problems[0]


def test_a_run_that_did_not_end_is_seen(config: RunConfig, loader: Loader, tmp_path: Path) -> None:
    rehearse(config, tmp_path / "one")
    rehearse(config, tmp_path / "other", Script(stop_after=21))
    assert any("the end differs" in problem for problem in differences(tmp_path / "one", tmp_path / "other", loader))


def test_a_batch_that_neither_run_consumed_is_seen(pair: tuple[Path, Path], loader: Loader) -> None:
    for folder in pair:
        without(folder / ROWS, 5)
    problems = differences(*pair, loader)
    assert any("batch 5 was never consumed" in problem for problem in problems)
    assert not any("rows differ" in problem for problem in problems)


def test_what_is_found_in_a_killed_run_is_in_the_result_of_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill, "differences", lambda unkilled, killed, loader: [f"{killed.name}: planted"])
    cell = run_cell(seed=4, num_kills=1, folder=tmp_path)
    assert not cell.same
    assert cell.problems == tuple(f"killed-{number}: planted" for number in range(1, cell.runs + 1))


def test_a_third_of_the_kills_come_at_any_time_and_most_others_in_a_save() -> None:
    draw = random.Random(0)
    aims = [choose_aim(draw, 2.0) for _ in range(3000)]
    anywhere = [aim for aim in aims if not aim.place]
    assert 900 < len(anywhere) < 1100
    assert 0 <= min(a.delay_s for a in anywhere) < 0.1 < 1.9 < max(a.delay_s for a in anywhere) <= 2.0
    counts = {place: sum(aim.place == place for aim in aims) for place in PLACES}
    assert counts["save"] > counts["ledger"] + counts["rollback"]
    assert min(counts.values()) > 200
    assert all(0 <= aim.delay_s <= AIMS[aim.place] and aim.times >= 1 for aim in aims if aim.place)
