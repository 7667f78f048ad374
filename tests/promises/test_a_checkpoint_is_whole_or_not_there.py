"""Promise 8: a checkpoint is either whole or not there; a damaged one is refused and the previous good one is used."""

from pathlib import Path

import pytest

from surefoot.config.run import RunConfig
from surefoot.monitor.compare import compare
from surefoot.monitor.run import Run
from surefoot.proof.rehearsal import Script, rehearse


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["flipped byte", "missing file", "truncated", "no manifest"])
def test_a_damaged_checkpoint_is_refused_aloud_and_the_previous_good_one_used(
    config: RunConfig, tmp_path: Path, damage: str
) -> None:
    whole = rehearse(config, tmp_path / "whole")
    rehearse(config, tmp_path / "run", Script(stop_after=17))
    newest = Run(tmp_path / "run").ledger.surviving_checkpoints()[-1]
    folder = tmp_path / "run" / "checkpoints" / newest.name
    shard = next(folder.glob("*.distcp"))
    match damage:
        case "flipped byte":
            flip_a_byte(shard)
        case "missing file":
            shard.unlink()
        case "truncated":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "no manifest":
            (folder / "manifest.json").unlink()
    end = rehearse(config, tmp_path / "run")
    assert newest.name not in end.opening
    assert "step-000015" in end.opening
    assert any(newest.name in warning and "refused" in warning for warning in end.warnings)
    assert end.digests == whole.digests
    assert compare(Run(tmp_path / "whole"), Run(tmp_path / "run")).same


def test_a_whole_checkpoint_that_a_crash_left_without_its_ledger_row_is_used(config: RunConfig, tmp_path: Path) -> None:
    whole = rehearse(config, tmp_path / "whole")
    rehearse(config, tmp_path / "run", Script(stop_after=17))
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    last = max(
        at
        for at, line in enumerate(lines)
        if '"checkpoint","' in line.replace(" ", "") or '"kind":"checkpoint"' in line
    )
    ledger.write_text("".join(lines[:last]))
    end = rehearse(config, tmp_path / "run")
    assert "step 18" in end.opening
    assert end.digests == whole.digests
