"""``surefoot drill`` from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli import drill as command
from surefoot.cli.main import main
from surefoot.proof.drill_quick import FROM_BATCH


def test_an_unknown_fault_is_named_with_its_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["drill", "--faults", "random_token", "--out", str(tmp_path)]) == 2
    assert "nearest: 'random_tokens'" in capsys.readouterr().err


def test_seeds_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["drill", "--seeds", "0,one", "--out", str(tmp_path)]) == 2
    assert "'one' is not a whole number" in capsys.readouterr().err


def test_a_folder_without_results_has_no_score(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["drill", "--score-only", "--out", str(tmp_path)]) == 2
    assert "holds no pair" in capsys.readouterr().err


def test_the_help_answers_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--help"]) == 0
    assert "--quick" in capsys.readouterr().out


def some_cells(folder: Path) -> None:
    from surefoot.proof.drill_cells import task_name

    for fault, loss in (("", 2.0), ("nan_gradient", None)):
        for guarded in (False, True):
            plain: dict[str, Any] = {
                "name": task_name(fault, 1.0, 0, guarded), "fault": fault, "share": 1.0, "seed": 0, "guarded": guarded, "skips": [], "refused": [],
                "base": "B", "commit": "c", "torch": "t", "steps": 9, "dose": {"onset": 4, "length": 1}, "seconds": 1.0, "ending": "done",
                "finite": loss is not None or guarded, "loss": 2.0 if guarded else loss, "consumed": 9, "wasted": 0, "detected": guarded,
                "delay": 0, "first_kind": "nonfinite", "causes": ["hardware"], "actions": ["skip"], "false_alarms": 0, "events": [],
                "curve": "3 2 1",
            }  # fmt: skip
            (folder / f"{plain['name']}.json").write_text(json.dumps(plain))


def test_the_score_of_what_is_there_is_printed_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some_cells(tmp_path)
    assert main(["drill", "--score-only", "--out", str(tmp_path), "--markdown", str(tmp_path / "drill.md")]) == 0
    out = capsys.readouterr().out
    assert "NaN in one gradient" in out
    assert "not finite" in out
    assert (tmp_path / "drill.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "drill.md").read_text().startswith("# The drill")
    assert main(["drill", "--score-only", "--json", "--out", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["harmful"], facts["detected"], facts["causes_right"]) == (1, 1, 1)


def quick_result() -> dict[str, Any]:
    def run(version: str, loss: float, skipped: list[int]) -> dict[str, Any]:
        suspect = {"document": "00000000000000aa", "domain": "prose", "text": "ŭăò" * 30}
        event = {
            "batch_index": FROM_BATCH,
            "action": "skip",
            "cause": "data",
            "text": f"batch {FROM_BATCH}: far too high",
            "after_onset": True,
            "suspects": [],
        }
        return {
            "version": version, "document": "00000000000000aa", "file": "bad.txt", "bytes": 6000, "spoils": 4, "domain": "prose", "loss": loss,
            "ending": "done", "batches": list(range(200)), "losses": [2.5] * 200, "skipped": skipped, "blank": [],
            "events": [event] if skipped else [], "suspects": [suspect] if skipped else [],
        }  # fmt: skip

    return {
        "clean": run("clean", 2.0, []),
        "unguarded": run("unguarded", 2.1, []),
        "guarded": run("guarded", 2.001, [FROM_BATCH, FROM_BATCH + 1]),
    }


def test_the_quick_drill_says_which_document_did_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.proof.drill_quick.run_quick", lambda out, say: quick_result())
    assert command.main(["--quick", "--out", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "document 00000000000000aa (prose), which begins 'ŭăò" in out
    assert "2.1000 nats per byte (+5.00 %)" in out
    assert "no documents left out, 2 of the 4 batches that hold it lost; cause named: data" in out
    page = (tmp_path / "drill.html").read_text()
    assert page.count("<svg") == 2
    assert "costs this run 5.0 % of its held-out loss" in page


def test_the_quick_drill_says_that_the_document_was_left_out_and_what_that_is_worth() -> None:
    from surefoot.proof.drill_quick_page import quick_page, text_summary

    result = quick_result()
    event = result["guarded"]["events"][0] | {"action": "exclude", "suspects": ["00000000000000aa"]}
    result["guarded"] |= {"events": [event], "skipped": [], "loss": 2.0}
    assert "1 document left out, none of the 4 batches that hold it lost" in text_summary(result, 200)
    assert "ends where the run without it ends, to the last digit" in quick_page(result)
    result["guarded"]["loss"] = 2.0001
    assert "to the last digit" not in quick_page(result)


def test_the_quick_drill_says_what_the_guard_did_before_the_document_came() -> None:
    from surefoot.proof.drill_quick_page import text_summary

    result = quick_result()
    assert "too early" not in text_summary(result)
    early = {
        "batch_index": 9,
        "action": "lr_event",
        "cause": "optimiser",
        "text": "batch 9: far too soon",
        "after_onset": False,
    }
    result["guarded"]["events"].insert(0, early)
    assert "1 other actions before the document came, the first: batch 9: far too soon" in text_summary(result, 200)


def test_the_quick_drill_is_honest_when_the_guard_saw_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = quick_result()
    result["guarded"] |= {"skipped": [], "events": [], "suspects": []}
    monkeypatch.setattr("surefoot.proof.drill_quick.run_quick", lambda out, say: result)
    assert command.main(["--quick", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "saw nothing" in out
    assert "no document" in out
    assert "The guard did not act on the bad document" in (tmp_path / "drill.html").read_text()
