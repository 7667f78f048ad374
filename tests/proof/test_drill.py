"""The drill keeps its own score honestly: what counts as harmful, seen, rightly named and cured, and that nothing is run twice."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from surefoot.monitor.step_report import StepReport
from surefoot.proof import drill
from surefoot.proof.alarm_rates import alarm_rows, rate
from surefoot.proof.curves import Curve, chart
from surefoot.proof.drill import Task, base_config, run_cell
from surefoot.proof.drill_cells import controls, grid, task_name
from surefoot.proof.drill_page import drill_page
from surefoot.proof.drill_quick import UnshuffledDocument
from surefoot.proof.drill_score import Score, score
from surefoot.proof.drill_table import markdown, misses, rows
from surefoot.proof.exact_intervals import count_interval, share_interval
from surefoot.proof.false_alarms import run_segment
from surefoot.proof.fault_catalogue import CATALOGUE
from surefoot.proof.resumable import run_missing
from surefoot.proof.witness import Witness
from tolerances import INTERVAL_DIGITS

ROOT = Path(__file__).parents[2]


def cell(fault: str, seed: int, guarded: bool, loss: float | None, **more: Any) -> dict[str, Any]:
    name = task_name(fault, more.get("share", 1.0), seed, guarded)
    plain = {
        "name": name, "fault": fault, "share": 1.0, "seed": seed, "guarded": guarded, "skips": [], "refused": [], "base": "B",
        "commit": "c", "torch": "t", "steps": 100, "dose": {"onset": 40 if fault else 101, "length": 1}, "seconds": 1.0,
        "ending": "done", "finite": loss is not None, "loss": loss, "consumed": 100, "wasted": 0, "detected": False, "delay": None,
        "first_kind": "", "causes": [], "actions": [], "false_alarms": 0, "events": [], "curve": "3.0 2.5 nan 2.1",
    }  # fmt: skip
    return plain | more


def noise(seed: int, loss: float) -> dict[str, Any]:
    return cell("", seed, False, loss, name=f"noise-1-s{seed}", skips=[50])


def seen(cause: str, delay: int = 0, action: str = "skip") -> dict[str, Any]:
    return {
        "detected": True,
        "delay": delay,
        "first_kind": "loss_spike",
        "causes": [cause] if cause else [],
        "actions": [action],
    }


def cells() -> list[dict[str, Any]]:
    """Two seeds, clean at 2.0 and 3.0, noise of 0.2 %: what is above clean by more than 0.6 % is harmed."""
    found = [cell("", seed, guarded, 2.0 + seed) for seed in (0, 1) for guarded in (False, True)]
    found += [noise(0, 2.0 * 1.002), noise(1, 3.0 * 0.998)]
    found += [cell("random_tokens", 0, False, 2.1), cell("random_tokens", 1, False, 3.3)]
    found += [
        cell("random_tokens", 0, True, 2.001, **seen("data", 0), refused=[40], consumed=101),
        cell("random_tokens", 1, True, 3.002, **seen("unknown", 4), refused=[40, 41], consumed=102),
    ]
    found += [cell("nan_gradient", 0, False, None), cell("nan_gradient", 1, False, None)]
    found += [cell("nan_gradient", 0, True, 2.0, **seen("hardware", 2)), cell("nan_gradient", 1, True, 3.2)]
    found += [cell("update_twice", seed, False, (2.0 + seed) * 1.005) for seed in (0, 1)]
    found += [cell("update_twice", seed, True, 2.0 + seed, **seen("data", 9)) for seed in (0, 1)]
    return found


@pytest.fixture
def found() -> Score:
    return score(cells())


def line(found: Score, name: str) -> Any:
    return next(item for item in found.lines if item.fault.name == name)


def test_harmful_is_not_finite_or_three_standard_deviations_above_the_same_seed(found: Score) -> None:
    assert found.noise == pytest.approx(0.002)
    assert [len(line(found, name).harmful) for name in ("random_tokens", "nan_gradient", "update_twice")] == [2, 2, 0]
    above = [c | {"loss": 2.0 * 1.0061} if c["name"] == "update_twice-full-s0-unguarded" else c for c in cells()]
    assert len(line(score(above), "update_twice").harmful) == 1


def test_the_rates_count_harmful_faults_alone(found: Score) -> None:
    assert (len(found.harmful), len(found.detected), found.right) == (4, 3, 2)
    assert found.fast_delay == 2


def test_unknown_is_a_wrong_cause_unless_another_is_named_later(found: Score) -> None:
    pairs = line(found, "random_tokens").pairs
    assert [pair.named for pair in pairs] == ["data", "unknown"]
    later = [c | {"causes": ["unknown", "data"]} if c["causes"] == ["unknown"] else c for c in cells()]
    assert [pair.named for pair in line(score(later), "random_tokens").pairs] == ["data", "data"]


def test_what_was_not_seen_or_misnamed_is_listed_one_by_one(found: Score) -> None:
    assert misses(found) == [
        "random_tokens (full, seed 1): called unknown, is data",
        "nan_gradient (full, seed 1): not seen",
    ]


def test_the_confusion_matrix_has_every_pair(found: Score) -> None:
    table = found.confusion(found.harmful)
    assert table["data"] == {"data": 1, "unknown": 1}
    assert table["hardware"] == {"hardware": 1, "not seen": 1}


def test_a_cure_ends_near_clean_or_near_its_control(found: Score) -> None:
    assert line(found, "random_tokens").cured
    assert not line(found, "nan_gradient").cured
    far = [c | {"loss": c["loss"] * 1.008} if c["name"] == "random_tokens-full-s0-guarded" else c for c in cells()]
    far = [c | {"loss": c["loss"] * 1.008} if c["name"] == "random_tokens-full-s1-guarded" else c for c in far]
    assert not line(score(far), "random_tokens").cured
    control = [
        cell("", s, False, (2.0 + s) * 1.006, name=f"control-random_tokens-full-s{s}-guarded", skips=[40])
        for s in (0, 1)
    ]
    assert line(score(far + control), "random_tokens").cured


def test_halted_runs_and_lost_ones_are_no_cure() -> None:
    lost = [c | {"finite": False, "loss": None} if c["name"] == "random_tokens-full-s0-guarded" else c for c in cells()]
    found = line(score(lost), "random_tokens")
    assert math.isinf(found.guarded)
    assert not found.cured


def test_healthy_twins_are_compared_to_the_printed_digit(found: Score) -> None:
    assert (found.clean_same, found.clean_pairs) == (2, 2)
    moved = [c | {"curve": "3.0"} if c["name"] == "clean-s0-guarded" else c for c in cells()]
    assert score(moved).clean_same == 1


def test_waste_is_what_was_consumed_beyond_the_steps(found: Score) -> None:
    assert line(found, "random_tokens").wasted == 1.5


def test_calibration_runs_are_not_in_the_score() -> None:
    stray = [c | {"base": "A", "name": f"calibration-{c['name']}"} for c in cells()]
    assert score(stray).lines == ()
    assert len(score(stray, "A").lines) == 3


# Tables, pages, pictures


def write(folder: Path, found: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    for item in found:
        (folder / f"{item['name']}.json").write_text(json.dumps(item))


def test_the_table_has_a_row_per_fault_and_says_what_was_lost(found: Score) -> None:
    table = {row[0]: row for row in rows(found)}
    assert set(table) == {"random tokens", "NaN in one gradient", "an update applied twice"}
    assert table["NaN in one gradient"][8] == "not finite"
    assert table["an update applied twice"][2:4] == ("0/2", "(2/2)")


def test_the_page_and_the_markdown_stand_on_their_own(tmp_path: Path) -> None:
    write(tmp_path, cells())
    page = drill_page(tmp_path)
    assert "<script src" not in page
    assert "http" not in page
    assert page.count("<svg") == 3
    text = markdown(tmp_path)
    assert "75.0 % (3 of 4; 95 % interval" in text
    assert "nan_gradient (full, seed 1): not seen" in text


def test_a_curve_breaks_where_it_is_not_finite_and_crosses_what_was_refused() -> None:
    svg = chart([Curve(name="a", look="guarded", batches=range(7), losses=[3, 2, math.nan, 2, 1, 9, 1], refused=[5])])
    assert svg.count("<polyline") == 2
    assert svg.count('<path class="refused"') == 1


RESULTS = ROOT / "docs" / "proof" / "drill"


@pytest.mark.skipif(not any(RESULTS.glob("*.json")), reason="the drill has not been run yet")
def test_docs_drill_is_the_table_of_the_result_files_and_no_cell_is_missing() -> None:
    assert (ROOT / "docs" / "drill.md").read_text() == markdown(RESULTS)
    have = {path.stem for path in RESULTS.glob("*.json")}
    wanted = {task.name for task in grid((0, 1, 2, 3, 4), [fault.name for fault in CATALOGUE])}
    assert wanted <= have
    read = [json.loads((RESULTS / f"{name}.json").read_text()) for name in sorted(wanted)]
    assert {task.name for task in controls(read)} <= have
    for item in read:
        assert all(item[key] not in (None, "") for key in ("command", "commit", "fingerprint", "seed", "dose"))


# Intervals


def test_exact_intervals_are_those_of_the_books() -> None:
    assert share_interval(8, 10) == pytest.approx((0.44390, 0.97479), abs=INTERVAL_DIGITS)
    assert share_interval(0, 30)[1] == pytest.approx(1 - 0.025 ** (1 / 30))
    assert share_interval(30, 30)[0] == pytest.approx(0.025 ** (1 / 30))
    assert share_interval(0, 0) == (0.0, 1.0)
    assert count_interval(0) == pytest.approx((0.0, -math.log(0.025)))
    assert count_interval(10) == pytest.approx((4.79539, 18.39036), abs=INTERVAL_DIGITS)
    assert count_interval(1) == pytest.approx((0.02532, 5.57164), abs=INTERVAL_DIGITS)


def test_false_alarms_are_counted_per_detector_and_notes_apart() -> None:
    segments = [
        {
            "kind": "turns",
            "steps": 50_000,
            "findings": {"loss_spike alarm": 1, "throughput note": 7},
            "actions": {"skip": 1},
        },
        {"kind": "stops", "steps": 50_000, "findings": {"loss_spike warning": 2}, "actions": {}},
    ]
    table = {row[0]: row for row in alarm_rows(segments)}
    assert table["loss_spike"][1:4] == ("1", "2", "0")
    assert table["throughput"][1:4] == ("0", "0", "7")
    assert table["all detectors"][4] == "3.00 (0.62 to 8.77)" == rate(3, 100_000)
    assert table["actions: 1 skip"][4].startswith("1.00 ")


# Running


def test_every_cell_has_one_name_and_guarded_and_unguarded_share_their_dose() -> None:
    tasks = grid((0, 1), [fault.name for fault in CATALOGUE])
    assert len({task.name for task in tasks}) == len(tasks)
    faults = [task for task in tasks if task.fault]
    assert sum(task.guarded for task in faults) * 2 == len(faults)
    for task in faults:
        twin = dataclasses.replace(task, guarded=not task.guarded)
        config, dose = drill.cell_config(task, Path())
        other, same = drill.cell_config(twin, Path())
        assert dose == same
        assert dataclasses.replace(config, guard=other.guard) == other


def test_a_control_skips_what_the_guarded_run_skipped() -> None:
    skipping = [c for c in cells() if c["name"] == "random_tokens-full-s1-guarded"]
    assert controls(skipping) == [Task(name="control-random_tokens-full-s1-guarded", seed=1, skips=(40, 41))]
    assert controls([c for c in cells() if c["fault"] == "update_twice"]) == []


def test_calibration_and_evaluation_are_other_models_and_seeds() -> None:
    a, b = (base_config(base, 0, Path()) for base in ("A", "B"))  # type: ignore[arg-type]
    assert a.model.d_model != b.model.d_model
    assert a.model.num_layers != b.model.num_layers
    assert a.data.batch_size != b.data.batch_size


def job(number: int, folder: Path) -> Mapping[str, Any]:
    (folder / f"ran-{number}").touch()
    if number == 3:
        raise ValueError("on purpose")
    return {"number": number}


def test_finished_parts_are_not_run_again_and_a_failure_stops_no_other(tmp_path: Path) -> None:
    from functools import partial

    out = tmp_path / "out"
    out.mkdir()
    (out / "part-1.json").write_text("{}")
    jobs = {f"part-{number}": partial(job, number, tmp_path) for number in (1, 2, 3)}
    told: list[str] = []
    problems = run_missing(jobs, out, workers=1, say=told.append, describe=lambda result: str(result["number"]))
    assert problems == ["part-3: ValueError: on purpose"]
    assert not (tmp_path / "ran-1").exists()
    assert json.loads((out / "part-2.json").read_text()) == {"number": 2}
    assert sorted(path.name for path in out.iterdir()) == ["part-1.json", "part-2.json"]


@pytest.fixture
def small_base(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal's run of seconds as the drill's base."""

    def base(name: str, seed: int, cache: Path, *, guarded: bool = True) -> Any:
        guard = dataclasses.replace(config.guard, policy="guarded" if guarded else "observe")
        return dataclasses.replace(config, seed=seed, guard=guard)

    monkeypatch.setattr(drill, "base_config", base)


@pytest.mark.usefixtures("small_base")
def test_a_cell_runs_to_its_end_and_tells_what_the_guard_did(tmp_path: Path) -> None:
    guarded = run_cell(Task(name="x", fault="nan_gradient", guarded=True), tmp_path, "test")
    onset = guarded["dose"]["onset"]
    assert (guarded["ending"], guarded["refused"], guarded["detected"], guarded["delay"]) == ("done", [onset], True, 0)
    assert guarded["consumed"] == guarded["steps"] + 1
    assert len(guarded["curve"].split()) == guarded["consumed"]
    unguarded = run_cell(Task(name="x", fault="nan_gradient"), tmp_path, "test")
    assert (unguarded["finite"], unguarded["loss"], unguarded["ending"]) == (False, None, "stopped")
    json.dumps([guarded, unguarded], allow_nan=False)


@pytest.mark.usefixtures("small_base")
def test_a_control_is_told_apart_from_a_clean_run(tmp_path: Path) -> None:
    control = run_cell(Task(name="noise-1-s0", skips=(5,)), tmp_path, "test")
    assert (control["consumed"], control["refused"]) == (control["steps"] + 1, [])
    clean = cell("", 0, False, 9.0)
    assert score([clean, json.loads(json.dumps(control))]).noise_runs == 1


@pytest.mark.usefixtures("small_base")
def test_a_cell_with_a_fault_at_resume_stops_and_goes_on(tmp_path: Path) -> None:
    clean = run_cell(Task(name="x"), tmp_path, "test")
    lost = run_cell(Task(name="x", fault="step_count_lost"), tmp_path, "test")
    onset = lost["dose"]["onset"]
    one, other = clean["curve"].split(), lost["curve"].split()
    assert one[: onset + 1] == other[: onset + 1]
    assert one != other
    assert len(other) == len(one)


def test_a_healthy_run_of_every_kind_comes_to_its_end(
    corpus: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    monkeypatch.setattr("surefoot.proof.false_alarms.base_config", lambda *args: config)
    for kind in ("turns", "stops", "epochs"):
        segment = run_segment(kind, 1, 40, tmp_path, "test")
        assert (segment["ending"], segment["steps"]) == ("done", 40)
        assert segment["batches"] >= 40


def test_what_is_taken_back_is_not_in_the_surviving_curve() -> None:
    witness = Witness(0)
    for batch in (0, 1, 2, 1, 2, 3):
        metrics = {"train/loss": float(len(witness.reports)), "train/num_targets": 8.0}
        witness.step(
            StepReport(
                batch_index=batch,
                step=0,
                tokens=0,
                skipped=False,
                cause="",
                metrics=metrics,
                sample_digest="",
                excluded=(),
                state_digest="",
            )
        )
    assert [row.loss for row in witness.surviving().values()] == [0.0, 3.0, 4.0, 5.0]


def test_a_finding_in_a_replayed_batch_before_the_onset_is_after_the_fault() -> None:
    witness = Witness(5)
    witness.notify(
        "verdict", {"batch_index": 3, "action": "proceed", "findings": [{"kind": "loss_spike", "severity": "alarm"}]}
    )
    witness.step(
        StepReport(
            batch_index=6,
            step=6,
            tokens=0,
            skipped=False,
            cause="",
            metrics={},
            sample_digest="",
            excluded=(),
            state_digest="",
        )
    )
    witness.notify("verdict", {"batch_index": 3, "action": "rollback", "diagnosis": {"cause": "data"}})
    assert [(event.after_onset, event.serious) for event in witness.events] == [(False, True), (True, True)]


def test_a_finding_in_the_first_batch_of_the_fault_is_no_false_alarm() -> None:
    witness = Witness(5)
    for batch in (4, 5):
        witness.notify("skip", {"batch_index": batch, "cause": "too high"})
    assert [event.after_onset for event in witness.events] == [False, True]


def test_what_is_said_long_after_a_fault_is_no_detection_of_it() -> None:
    dose = drill.Dose(onset=5, length=2, magnitude=0.0)
    for batch, detected in ((7 + drill.AFTERMATH - 1, True), (7 + drill.AFTERMATH, False)):
        witness = Witness(dose.onset)
        witness.notify("skip", {"batch_index": batch, "cause": "too high", "diagnosis": {"cause": "data"}})
        found = drill.seen(witness, dose, Task(name="x", fault="random_tokens", guarded=True))
        assert (found["detected"], found["causes"]) == (detected, ["data"] * detected)
        assert found["false_alarms"] == 0


def test_a_slow_source_is_seen_by_a_note_and_no_other_fault_is() -> None:
    dose = drill.Dose(onset=0, length=2, magnitude=0.0)
    witness = Witness(0)
    witness.notify("note", {"text": "At batch 3: slow."})
    for fault in ("slow_source", "random_tokens"):
        assert drill.seen(witness, dose, Task(name="x", fault=fault))["detected"] == (fault == "slow_source")


def test_an_unshuffled_document_changes_the_order_and_no_row(loader: Any) -> None:
    source, _, row = loader.sample_ids(9)[0].tolist()
    document = loader.row_documents(source, row)[0].document
    moved = UnshuffledDocument(loader, document, 4)
    batches = range(loader.mixture.num_rows[0] // 2)
    before = sorted(tuple(r) for b in batches for r in loader.sample_ids(b).tolist())
    after = sorted(tuple(r) for b in batches for r in moved.sample_ids(b).tolist())
    assert len(set(after)) == len(after)
    assert len(set(before) ^ set(after)) <= 2 * 8
    held = [
        b
        for b in batches
        if any(
            document in {s.document for s in loader.row_documents(r[0], r[2])}
            for r in moved.sample_ids(b).tolist()
            if r[1] == 0
        )
    ]
    assert min(held) == 4
    assert held == list(range(4, 4 + len(held)))


# Promise 3, over the catalogue


@pytest.mark.skipif(not any(RESULTS.glob("*.json")), reason="the drill has not been run yet")
def test_every_published_fault_that_skipping_cures_ends_as_the_run_that_skipped_the_same_healthy_batches() -> None:
    """To the printed digit, where all that the fault touched was refused and nothing else was done. ``inf_loss`` runs in another precision than
    its control."""
    kinds = set()
    for path in sorted(RESULTS.glob("control-*.json")):
        control = json.loads(path.read_text())
        guarded = json.loads((RESULTS / path.name.removeprefix("control-")).read_text())
        onset, length = guarded["dose"]["onset"], guarded["dose"]["length"]
        touched = set(range(onset, onset + length))
        if guarded["fault"] != "inf_loss" and guarded["actions"] == ["skip"] and touched <= set(guarded["refused"]):
            assert guarded["loss"] == control["loss"], path.name
            kinds.add(guarded["fault"])
    assert {"shifted_labels", "target_leak", "random_tokens", "nan_gradient", "repeated_bytes"} <= kinds
