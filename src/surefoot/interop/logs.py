"""Training logs of any origin: csv, jsonl, TensorBoard, wandb offline, and our own runs."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.guard.replay import LoggedStep
from surefoot.interop.log_columns import GRADIENT_NORM, LOSS, STEP, LogError, Rows, choose, missing, number, whole
from surefoot.interop.tracker_logs import TENSORBOARD_NAME, add_tensorboard, add_wandb
from surefoot.monitor.run import Run

ENDINGS = ".csv, .tsv, .jsonl, events.out.tfevents.*, .wandb (csv and jsonl also as .gz), or a folder of a run, of TensorBoard or of wandb"


def read_log(path: Path) -> list[LoggedStep]:
    """The rows of a log that have a loss, by step; gaps stay gaps. Raises LogError with file, line and rule."""
    if not path.exists():
        raise LogError(f"{path}: there is no such file or folder")
    rows = Rows(str(path))
    if path.is_dir():
        _add_folder(path, rows)
    elif TENSORBOARD_NAME in path.name:
        add_tensorboard(path, rows)
    elif path.suffix == ".wandb":
        add_wandb(path, rows)
    else:
        _add_text(path, rows)
    return rows.logged()


def _add_folder(folder: Path, rows: Rows) -> None:
    if (folder / "ledger.jsonl").exists():
        for row in Run(folder).rows:
            _add(
                row, ("batch_index", "train/loss", "train/gradient_norm"), f"{folder}: batch {row['batch_index']}", rows
            )
    elif files := sorted(folder.rglob("*.wandb")):
        if len({file.stem for file in files}) > 1:
            names = ", ".join(str(file) for file in files[:5])
            raise LogError(f"{folder}: {len(files)} files of several wandb runs: {names}; name one")
        for file in files:
            add_wandb(file, rows)
    elif any(folder.rglob(f"*{TENSORBOARD_NAME}*")):
        add_tensorboard(folder, rows)
    else:
        raise LogError(f"{folder}: no run and no log in this folder; a log is {ENDINGS}")


def _add_text(path: Path, rows: Rows) -> None:
    name = path.name.removesuffix(".gz")
    try:
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        text = data.decode("utf-8-sig")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise LogError(f"{path}: is not text ({error}); a log is {ENDINGS}") from None
    if name.endswith((".jsonl", ".json")) or (not name.endswith((".csv", ".tsv")) and text.lstrip().startswith("{")):
        _add_jsonl(path, text, rows)
    else:
        _add_csv(path, text, "\t" if name.endswith(".tsv") else ",", rows)


def _add_csv(path: Path, text: str, delimiter: str, rows: Rows) -> None:
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    lines = _lines(path, reader)
    header = next(lines, (1, []))[1]
    if header and all(_is_number(name) for name in header):
        raise LogError(
            f"{path}: line 1: a header is needed, as step,loss,grad_norm; {','.join(header)!r} is all numbers"
        )
    columns = _columns(header, f"{path}: line 1")
    for line, cells in lines:
        where = f"{path}: line {line}"
        if len(cells) != len(header):
            raise LogError(f"{where}: {len(cells)} cells, where the header has {len(header)}")
        _add(dict(zip(header, cells, strict=True)), columns, where, rows)


def _lines(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise LogError(f"{path}: line {reader.line_num}: not csv ({error})") from None


def _add_jsonl(path: Path, text: str, rows: Rows) -> None:
    columns: tuple[str, str, str | None] | None = None
    names: dict[str, None] = {}
    lines = text.split("\n")
    for line, content in enumerate(lines, start=1):
        where = f"{path}: line {line}"
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError as error:
            if line == len(lines):  # torn: the log is being written
                break
            raise LogError(f"{where}: not JSON ({error}); each line of a jsonl file is one object") from None
        if not isinstance(row, dict):
            raise LogError(
                f"{where}: {content[:40]!r} is not an object; each line is one, as {{'step': 1, 'loss': 2.5}}"
            )
        names |= dict.fromkeys(row)
        columns = _columns(names, where) if choose(names, LOSS) and choose(names, STEP) else None
        if columns is not None and columns[0] in row:
            _add(row, columns, where, rows)
    if columns is None:
        _columns(names, str(path))


def _columns(names: Any, where: str) -> tuple[str, str, str | None]:
    step, loss = choose(names, STEP), choose(names, LOSS)
    if step is None:
        raise missing(where, "step", STEP, names)
    if loss is None:
        raise missing(where, "loss", LOSS, names)
    return step, loss, choose(names, GRADIENT_NORM)


def _add(row: dict[str, Any], columns: tuple[str, str, str | None], where: str, rows: Rows) -> None:
    step, loss, norm = columns
    rows.add(
        whole(row.get(step), where),
        number(row.get(loss), where, loss),
        number(row.get(norm), where, norm) if norm else None,
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
