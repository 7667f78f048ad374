"""Promises 2, 8 and 12 under SIGKILL: a handful of kills here, a hundred behind `make proof`."""

import json
from pathlib import Path

import pytest

from surefoot.proof.kill import run_cell, table

PROOF = Path(__file__).parents[2] / "docs" / "proof"


@pytest.mark.parametrize("seed", [12344, 12345], ids=["saves waited for", "saves in the background"])
def test_a_run_killed_at_random_times_ends_as_the_unkilled_one(tmp_path: Path, seed: int) -> None:
    cell = run_cell(seed=seed, num_kills=4, folder=tmp_path)
    assert cell.kills == 4
    assert cell.same, cell.problems


def test_the_published_kill_table_is_the_one_its_result_files_give() -> None:
    assert (PROOF / "KILL.md").read_text() == table(PROOF)
    cells = [json.loads(path.read_text()) for path in PROOF.glob("kill-*.json")]
    assert all(cell["same"] for cell in cells)
    assert sum(cell["kills"] for cell in cells) >= 100
    assert 3 * sum(cell["in_save"] for cell in cells) >= sum(cell["kills"] for cell in cells)
    assert all(sum(cell[place] for cell in cells) > 0 for place in ("in_ledger", "in_rollback"))
