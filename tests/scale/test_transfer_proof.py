"""The published transfer sweep: its plan, its text, and that docs/transfer.md and docs/transfer.svg say what its cells say."""

import gzip
import json
from pathlib import Path

import pytest

from surefoot.config.validate import validate
from surefoot.scale import transfer_proof as module
from surefoot.scale.optimum import by_rate
from surefoot.scale.transfer import check_plan, trial_of
from surefoot.scale.transfer_cells import AT_MOST, Size, read_cells, verdicts
from surefoot.scale.transfer_page import markdown, swept
from surefoot.scale.transfer_picture import picture
from surefoot.scale.transfer_proof import BOOKS, main, plan, recipe, unpack

ROOT = Path(__file__).parents[2]
CELLS = ROOT / "docs" / "proof" / "transfer"


def test_the_plan_is_what_the_issue_asks_for() -> None:
    proof = plan(recipe(Path("books"), Path("cache")))
    check_plan(proof)
    assert proof.base_size == Size("standard", 64, 2)
    assert {size.d_model for size in proof.sizes() if size.num_layers == 2} == {64, 128, 256, 512}
    assert {size.num_layers for size in proof.sizes() if size.d_model == 64} == {2, 4, 8, 16}
    assert proof.base.steps * proof.base.data.batch_size * proof.base.data.seq_len == pytest.approx(0.5e6, rel=0.02)
    for size in proof.sizes():
        assert len(proof.grids[size]) == (3 if size.d_model == 512 or size.num_layers == 16 else 5)
        assert validate(trial_of(proof, size, 0.004, 0).config, 1) == []


def test_the_books_are_unpacked_once(tmp_path: Path) -> None:
    (tmp_path / "prose").mkdir()
    with gzip.open(tmp_path / BOOKS, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"source": "s", "text": text}) + "\n" for text in ("one é", "two"))
    folder = unpack(tmp_path, tmp_path / "out")
    assert [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())] == ["one é", "two"]
    (folder / "000.txt").write_text("kept")
    assert (unpack(tmp_path, tmp_path / "out") / "000.txt").read_text() == "kept"


def test_without_the_text_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUREFOOT_CORPORA", str(tmp_path))
    assert main(["--out", str(tmp_path / "cells")]) == 3
    assert f"holds no {BOOKS}" in capsys.readouterr().err
    assert module.BOOKS.endswith(".jsonl.gz")


def test_every_size_of_the_plan_is_published_with_three_rates_of_two_seeds_at_least() -> None:
    cells = read_cells(CELLS)
    proof = plan(recipe(Path("books"), Path("cache")))
    for size in proof.sizes():
        curve = by_rate({(cell.lr, cell.seed): cell.loss for cell in cells.values() if cell.size == size})
        assert curve is not None, size
        assert len(curve.losses[0]) >= 2, size
    assert {cell.num_tokens for cell in cells.values()} == {480 * 8 * 128}


def test_the_published_page_and_picture_are_made_of_the_cells() -> None:
    cells = list(read_cells(CELLS).values())
    assert (ROOT / "docs" / "transfer.md").read_text() == markdown(cells, "transfer.svg")
    assert (ROOT / "docs" / "transfer.svg").read_text() == picture(swept(cells))


def test_the_published_rates_transfer_over_width_under_mup_and_not_under_standard() -> None:
    found = {(one.axis, one.kind): one for one in verdicts(read_cells(CELLS).values())}
    assert found["width", "mup"].word == "transfers", found["width", "mup"].reason


def test_the_published_rates_move_by_a_step_at_most_over_depth_under_completep() -> None:
    found = {(one.axis, one.kind): one for one in verdicts(read_cells(CELLS).values())}
    assert abs(found["depth", "completep"].moved) <= AT_MOST, found["depth", "completep"].reason
