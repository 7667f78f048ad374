"""Logs that trackers keep: TensorBoard's event files, and wandb's offline files. Each needs its own package to be installed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.interop.log_columns import GRADIENT_NORM, LOSS, STEP, LogError, Rows, choose, missing, number, whole

TENSORBOARD_NAME = "tfevents"
"""In the name of every event file."""
BLOCK = 32_768
HEADER = 7
"""A .wandb file is a log in LevelDB's format: blocks of 32 KiB; before each piece 4 bytes of checksum, 2 of length, 1 of type (1 whole,
2 first, 3 middle, 4 last); 7 bytes of its own at the start."""


def add_tensorboard(path: Path, rows: Rows) -> None:
    """The scalars of an event file, or of all in a folder."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise ImportError(
            f"{path}: reading TensorBoard's files needs its package: pip install -e '.[tensorboard]' in Surefoot's checkout, "
            "or export the curve as csv"
        ) from error
    found: list[tuple[str, dict[int, list[float | None]]]] = []
    seen: dict[str, None] = {}
    for source in [path] if path.is_file() else sorted({file.parent for file in path.rglob(f"*{TENSORBOARD_NAME}*")}):
        events = EventAccumulator(str(source), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        tags = events.Tags()
        names = [*tags["scalars"], *tags["tensors"]]
        seen |= dict.fromkeys(names)
        loss, norm = choose(names, LOSS), choose(names, GRADIENT_NORM)
        values: dict[int, list[float | None]] = {}
        for place, tag in enumerate((loss, norm)):
            if tag in tags["scalars"]:
                points = [(event.step, float(event.value)) for event in events.Scalars(tag)]
            elif tag is not None:
                points = [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
            else:
                points = []
            for step, value in points:
                values.setdefault(step, [None, None])[place] = value
        if loss is not None:
            found.append((str(source), values))
    if not found:
        raise missing(str(path), "loss", LOSS, seen)
    if len(found) > 1:
        raise LogError(f"{path}: {len(found)} runs with a loss: {', '.join(name for name, _ in found[:5])}; name one")
    for step in sorted(found[0][1]):
        rows.add(step, *found[0][1][step])


def add_wandb(path: Path, rows: Rows) -> None:
    """The history in one .wandb file."""
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError as error:
        raise ImportError(
            f"{path}: reading wandb's files needs its package: pip install -e '.[wandb]' in Surefoot's checkout, or export the curve as csv"
        ) from error
    names: dict[str, None] = {}
    for n, data in enumerate(_payloads(path), start=1):
        where = f"{path}: record {n}"
        record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        try:
            record.ParseFromString(data)
        except Exception as error:  # noqa: BLE001 -- the class of a decoding error differs between versions of protobuf
            raise LogError(f"{where}: damaged ({error})") from None
        if not record.HasField("history"):
            continue
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        names |= dict.fromkeys(row)
        _add_row(row, record.history.step.num, where, rows)
    if choose(names, LOSS) is None:
        raise missing(str(path), "loss", LOSS, [name for name in names if not name.startswith("_")])


def _add_row(row: dict[str, Any], counted: int, where: str, rows: Rows) -> None:
    # wandb's own count of calls comes last: a run that logs twice a step has two of them for one step.
    step = choose([name for name in row if name != "_step"], STEP)
    loss, norm = choose(row, LOSS), choose(row, GRADIENT_NORM)
    rows.add(
        whole(row[step], where) if step else counted,
        number(row[loss], where, loss) if loss else None,
        number(row[norm], where, norm) if norm else None,
    )


def _payloads(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file, up to where it was torn."""
    data = path.read_bytes()
    if not data.startswith(b":W&B"):
        raise LogError(f"{path}: not a .wandb file: it would begin with :W&B")
    place, pieces = HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:  # too little of the block for one more piece
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        pieces += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if place > len(data):
            return
        if kind in (1, 4):
            yield pieces
            pieces = b""
