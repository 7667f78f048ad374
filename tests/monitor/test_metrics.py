"""The metric table and the step's report."""

import dataclasses

import pytest

from surefoot.monitor.metrics import METRICS, UnknownMetricError, find, table
from surefoot.monitor.step_report import StepReport


def test_every_metric_has_a_section_a_unit_and_one_line_of_meaning() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.name.split("/")[0] in ("train", "data", "perf", "eval", "checkpoint", "guard", "inside")
        assert metric.unit
        assert len(metric.meaning.split()) >= 4
        assert "\n" not in metric.meaning
    assert table().count("\n") == len(METRICS) + 1


def test_a_domain_stands_for_any_one_name() -> None:
    assert find("eval/prose/bits_per_byte").unit == "bits/byte"
    assert find("eval/web-2024.en/loss").name == "eval/<domain>/loss"
    with pytest.raises(UnknownMetricError):
        find("eval/a/b/loss")


def test_a_role_and_a_layer_stand_for_any_one_name_too() -> None:
    assert find("train/gradient_norm/hidden").name == "train/gradient_norm/<role>"
    assert find("inside/layer_11/activation_max").name == "inside/layer_<layer>/activation_max"
    assert find("train/gradient_norm").name == "train/gradient_norm"


def test_a_metric_that_is_not_in_the_table_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownMetricError) as info:
        find("train/grad_norm")
    assert str(info.value) == (
        "metric 'train/grad_norm' is not in the table; the nearest is 'train/gradient_norm'; "
        "add a line with unit and meaning to monitor/metrics.py"
    )


def test_a_report_cannot_be_changed_by_who_watches_it() -> None:
    metrics = {"train/loss": 1.0}
    report = StepReport(4, 4, 80, True, "loss is NaN", metrics, "ab", ("f" * 16,), "cd")
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.step = 9  # type: ignore[misc]
    with pytest.raises(TypeError):
        report.metrics["train/loss"] = 0.0  # type: ignore[index]
    metrics["train/loss"] = 7.0
    assert report.row() == {
        "batch_index": 4,
        "step": 4,
        "tokens": 80,
        "sample_digest": "ab",
        "skipped": True,
        "cause": "loss is NaN",
        "excluded": ["f" * 16],
        "state_digest": "cd",
        "train/loss": 1.0,
    }
