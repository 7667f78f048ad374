"""Logs of any origin read alike; what cannot be read is refused with file, line and rule."""

import gzip
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.guard.replay import LoggedStep
from surefoot.interop.log_columns import LogError
from surefoot.interop.logs import read_log

EXPECTED = [(1, 5.0, 1.5), (2, 4.5, 1.25), (4, 4.0, 1.0)]


def triples(rows: list[LoggedStep]) -> list[tuple[int, float, float]]:
    return [(row.step, row.loss, row.gradient_norm) for row in rows]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "header",
    [
        "step,loss,grad_norm",
        "Step,train/loss,train/gradient_norm",
        "iteration,lm loss,grad-norm",
        "_step,train.loss,GNorm",
    ],
)
def test_csv_by_the_usual_names(tmp_path: Path, header: str) -> None:
    rows = "".join(f"{step},{loss},{norm}\n" for step, loss, norm in EXPECTED)
    assert triples(read_log(written(tmp_path / "log.csv", f"{header}\n{rows}"))) == EXPECTED
    assert triples(read_log(written(tmp_path / "log.txt", f"{header}\n{rows}"))) == EXPECTED
    tabs = f"{header}\n{rows}".replace(",", "\t")
    assert triples(read_log(written(tmp_path / "log.tsv", tabs))) == EXPECTED


def test_a_training_loss_is_preferred_to_nothing_and_a_validation_loss_never_taken(tmp_path: Path) -> None:
    log = written(tmp_path / "log.csv", "epoch,step,val_loss,train_loss\n0,1,9,5\n0,2,9,4\n")
    assert [row.loss for row in read_log(log)] == [5, 4]
    with pytest.raises(
        LogError, match=r"log.csv: line 1: no column for the loss \(one of loss, .*there are: step, val_loss"
    ):
        read_log(written(tmp_path / "log.csv", "step,val_loss\n1,9\n"))


def test_jsonl_rows_of_one_step_come_together_and_others_are_passed_over(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "train/loss": 5.0},
        {"step": 1, "train/grad_norm": 1.5},
        {"event": "checkpoint", "step": 1},
        {"step": 2, "train/loss": 4.5, "train/grad_norm": 1.25},
        {"step": 3, "eval/loss": 9.0},
        {"step": 4, "train/loss": 4.0, "train/grad_norm": 1.0},
    ]
    text = "\n".join(map(json.dumps, lines)) + "\n"
    assert triples(read_log(written(tmp_path / "log.jsonl", text))) == EXPECTED
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert triples(read_log(tmp_path / "log.jsonl.gz")) == EXPECTED
    assert triples(read_log(written(tmp_path / "torn.jsonl", text + '{"step": 5, "train/lo'))) == EXPECTED


def test_an_empty_cell_is_a_gap_and_a_nan_is_a_value(tmp_path: Path) -> None:
    rows = read_log(written(tmp_path / "log.csv", "step,loss,grad_norm\n1,5.0,\n2,,1.0\n3,nan,inf\n"))
    assert [row.step for row in rows] == [1, 3]
    assert not rows[0].gradient_known
    assert math.isnan(rows[1].loss)
    assert rows[1].gradient_norm == math.inf
    jsonl = read_log(
        written(
            tmp_path / "log.jsonl", '{"step": 1, "loss": null}\n{"step": 2, "loss": "NaN"}\n{"step": 3, "loss": NaN}\n'
        )
    )
    assert [row.step for row in jsonl] == [2, 3]


def test_of_a_resumed_run_the_later_rows_count(tmp_path: Path) -> None:
    log = "step,loss\n1,5\n2,4\n3,nan\n4,nan\n3,3.5\n5,3\n"
    assert [(row.step, row.loss) for row in read_log(written(tmp_path / "log.csv", log))] == [
        (1, 5),
        (2, 4),
        (3, 3.5),
        (5, 3),
    ]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "step,loss\n1,5\n2,abc\n", "a.csv: line 3: loss 'abc' is not a number"),
        ("a.csv", "step,loss\n1.5,5\n", "a.csv: line 2: step '1.5' is not a whole number from 0 on"),
        ("a.csv", "step,loss\n-1,5\n", "a.csv: line 2: step '-1' is not a whole number"),
        ("a.csv", "step,loss\n1,5,9\n", "a.csv: line 2: 3 cells, where the header has 2"),
        ("a.csv", "1,5\n2,4\n", "a.csv: line 1: a header is needed, as step,loss,grad_norm"),
        ("a.csv", "", "a.csv: line 1: no column for the step"),
        ("a.csv", "step,loss\n", "a.csv: no row has a loss"),
        ("a.csv", "time,loss\n1,5\n", "a.csv: line 1: no column for the step (one of batch_index, step"),
        ("a.csv", "step,loss\n" + "".join(f"{n},2\n" for n in range(9, 0, -1)), "a.csv: steps run backwards"),
        ("a.csv", 'step,loss\n1,"5\n', "a.csv: line 2: not csv"),
        ("a.jsonl", '{"step": 1, "loss": 5}\n{"step": \n{}\n', "a.jsonl: line 2: not JSON"),
        ("a.jsonl", "[1, 5]\n[2, 4]\n", "a.jsonl: line 1: '[1, 5]' is not an object"),
        ("a.jsonl", '{"step": 1, "lost": 5}\n', "a.jsonl: no column for the loss (one of loss, train_loss"),
        ("a.jsonl", '{"step": 1, "loss": true}\n', "a.jsonl: line 1: loss True is not a number"),
        ("a.jsonl", '{"step": 1, "loss": [5]}\n', "a.jsonl: line 1: loss [5] is not a number"),
        ("a.wandb", "step,loss\n", "a.wandb: not a .wandb file"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_with_line_and_rule(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    if name.endswith(".wandb"):
        pytest.importorskip("wandb")
    with pytest.raises(LogError) as caught:
        read_log(written(tmp_path / name, text))
    assert str(caught.value).startswith(f"{tmp_path}/{words}")


def test_what_is_no_log_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="there is no such file"):
        read_log(tmp_path / "none.csv")
    with pytest.raises(LogError, match=r"no run and no log in this folder; a log is \.csv"):
        read_log(tmp_path)
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(LogError, match=r"image.csv: is not text"):
        read_log(tmp_path / "image.csv")


def test_the_rows_of_our_own_runs_are_read_by_batch(tmp_path: Path) -> None:
    rows = [
        {"batch_index": 0, "step": 1, "train/loss": 5.0, "train/gradient_norm": 1.5},
        {"batch_index": 1, "step": 1, "train/loss": "NaN", "train/gradient_norm": "Infinity", "skipped": True},
        {"batch_index": 2, "step": 2, "train/loss": 4.5, "train/gradient_norm": 1.0, "eval/code/loss": 4.4},
    ]
    text = "\n".join(map(json.dumps, rows)) + "\n"
    found = read_log(written(tmp_path / "metrics.jsonl", text))
    assert [row.step for row in found] == [0, 1, 2]
    assert math.isnan(found[1].loss)


# Trackers


def test_tensorboards_event_files_and_folders_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "tb"))
    for step, loss, norm in EXPECTED:
        values = [
            summary_pb2.Summary.Value(tag="train/loss", simple_value=loss),
            summary_pb2.Summary.Value(tag="train/grad_norm", simple_value=norm),
            summary_pb2.Summary.Value(tag="eval/loss", simple_value=9.0),
        ]
        writer.add_event(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values)))
    writer.close()
    assert triples(read_log(tmp_path / "tb")) == EXPECTED
    (file,) = (tmp_path / "tb").iterdir()
    assert triples(read_log(file)) == EXPECTED


def test_of_several_tensorboard_folders_the_one_with_a_loss_is_read_and_two_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def write(folder: str, tag: str) -> None:
        writer = EventFileWriter(str(tmp_path / folder))
        value = summary_pb2.Summary.Value(tag=tag, simple_value=2.0)
        writer.add_event(event_pb2.Event(step=1, summary=summary_pb2.Summary(value=[value])))
        writer.close()

    write("eval", "val/loss")
    with pytest.raises(LogError, match=r"no column for the loss .*there are: val/loss"):
        read_log(tmp_path)
    write("train", "loss")
    assert [row.loss for row in read_log(tmp_path)] == [2.0]
    write("other", "loss")
    with pytest.raises(LogError, match=r"2 runs with a loss: .*; name one"):
        read_log(tmp_path)


def test_several_wandb_runs_in_a_folder_are_refused(tmp_path: Path) -> None:
    for name in ("run-a.wandb", "run-b.wandb"):
        (tmp_path / name).write_bytes(b":W&B")
    with pytest.raises(LogError, match=r"several wandb runs: .*run-a.wandb, .*; name one"):
        read_log(tmp_path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("CONSOLE", "off"), ("DISABLE_GIT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.teardown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wandbs_offline_files_are_read(tmp_path: Path, offline: Any) -> None:
    run = offline.init(project="p", dir=str(tmp_path))
    for step, loss, norm in EXPECTED:
        run.log({"train/loss": loss, "train/grad_norm": norm, "filling": "x" * 20_000}, step=step)
    run.finish()
    offline.teardown()
    assert triples(read_log(tmp_path)) == EXPECTED
    (file,) = tmp_path.rglob("*.wandb")
    assert triples(read_log(file)) == EXPECTED


@pytest.mark.parametrize(
    ("name", "module"),
    [("x.wandb", "wandb.proto"), ("events.out.tfevents.1", "tensorboard.backend.event_processing.event_accumulator")],
)
def test_a_trackers_log_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[(wandb|tensorboard)\]'"):
        read_log(written(tmp_path / name, ""))
