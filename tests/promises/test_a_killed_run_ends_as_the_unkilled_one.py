"""Promises 2, 8 and 12 under SIGKILL: a handful of kills here, a hundred behind `make proof`."""

from pathlib import Path

from surefoot.proof.kill import run_cell, table

PROOF = Path(__file__).parents[2] / "docs" / "proof"


def test_a_run_killed_at_random_times_ends_as_the_unkilled_one(tmp_path: Path) -> None:
    cell = run_cell(seed=12345, num_kills=6, folder=tmp_path)
    assert cell.kills == 6
    assert cell.same, cell.problems


def test_the_published_kill_table_is_the_one_its_result_files_give() -> None:
    assert (PROOF / "KILL.md").read_text() == table(PROOF)
    assert "NO" not in table(PROOF).split("commit")[1]
