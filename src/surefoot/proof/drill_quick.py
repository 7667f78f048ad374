"""The drill in a minute: one bad document in real data, and the same run without it, with it, and with it under guard."""

import dataclasses
import json
import math
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.config.data import BytesTokenizer, DataConfig, Exclusion, PythonInstallation, SourceConfig, TextFiles
from surefoot.config.guard import GuardConfig
from surefoot.config.model import GroupedQueryAttention, ModelConfig, SwiGLU
from surefoot.config.optim import WSD, OptimConfig
from surefoot.config.parallel import ParallelConfig
from surefoot.config.run import CheckpointConfig, EvalConfig, LogConfig, RunConfig
from surefoot.data.build import prepare
from surefoot.data.hashing import document_id, document_name
from surefoot.data.loader import Loader
from surefoot.data.pack import rows_of_document
from surefoot.data.source import list_names, read_documents
from surefoot.parallel.mesh import join_world
from surefoot.proof.resumable import begin_worker
from surefoot.proof.witness import Witness
from surefoot.train.evaluate import evaluate
from surefoot.train.interrupt import StopRequest
from surefoot.train.loop import train
from surefoot.train.run import open_run

BAD_FILE = "forum-thread-0831.txt"
BAD_BYTES = 5_000
OF_FOUR = 2
"""Of every four rows, so many are the bad document's."""
LETTERS = [chr(code) for code in range(0xA1, 0x180)]
"""What bytes that are no text look like when they are read as text: two bytes of UTF-8 each."""
FROM_BATCH = 150
"""Where the bad document comes."""
STEPS = 240
MODULES = 160
"""Modules of the Python installation whose code and docstrings make up the rest of the data."""
VERSIONS = ("clean", "unguarded", "guarded")


def write_texts(folder: Path) -> Path:
    """The corpus as files, once: code and docstrings of the Python installation, and among the docstrings one thread of a forum into which
    somebody pasted a picture. Returns the thread's path."""
    bad = folder / "prose" / BAD_FILE
    draw = random.Random(0)
    text = "".join(draw.choice(LETTERS) for _ in range(BAD_BYTES // 2))
    if bad.exists() and bad.read_text() == text:
        return bad
    for part in ("code", "prose"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        source = PythonInstallation(part=part)
        names = list_names(source)
        random.Random(0).shuffle(names)
        for number, document in enumerate(read_documents(source, names[:MODULES])):
            (folder / part / f"{number:04d}.txt").write_text(document.text)
    # Last, as the sign that the others are whole.
    bad.write_text(text)
    return bad


def quick_config(folder: Path, *, guarded: bool = False, without: str = "") -> RunConfig:
    """A run of seconds on these texts; ``without`` a document, when it is known to be bad beforehand."""
    sources = tuple(
        SourceConfig(name=name, documents=TextFiles(glob=f"{folder}/{name}/*.txt")) for name in ("code", "prose")
    )
    return RunConfig(
        recipe="drill-quick",
        steps=STEPS,
        model=ModelConfig(
            vocab_size=257,
            d_model=64,
            num_layers=2,
            attention=GroupedQueryAttention(num_heads=4, num_kv_heads=4, d_head=16, qk_norm=True),
            feed_forward=SwiGLU(d_ff=160),
        ),
        data=DataConfig(
            sources=sources,
            tokenizer=BytesTokenizer(),
            seq_len=64,
            batch_size=16,
            exclude=(Exclusion(document=without),) if without else (),
            cache_dir=str(folder / "shards"),
        ),
        optim=OptimConfig(lr=1e-2, warmup_steps=40, schedule=WSD(decay_fraction=0.25)),
        parallel=ParallelConfig(device="cpu", precision="fp32", threads=1),
        guard=GuardConfig(policy="guarded" if guarded else "observe", snapshot_every=20, snapshots=4, probe_every=20),
        checkpoint=CheckpointConfig(every=0, asynchronous=False),
        eval=EvalConfig(every=0, rows=256, batch_size=64),
        log=LogConfig(sample_tokens=0),
    )


class UnshuffledDocument(Loader):
    """A loader whose shuffle left one document nearly in one piece: its rows come together from a batch on, every second one.

    They change places with the rows that stood there, so that every row is still read once.
    """

    def __init__(self, inner: Loader, document: str, from_batch: int) -> None:
        vars(self).update(vars(inner))
        number = int(document, 16)
        mine = [
            (source, 0, row)
            for source, split in enumerate(inner.splits)
            for at in split.find_document(number)
            for row in rows_of_document(split, at, inner.data.seq_len)
        ]
        first, _ = inner.batch_starts.rows_of(from_batch)
        places = [first + at // OF_FOUR * 4 + at % OF_FOUR for at in range(len(mine))]
        place_of = dict(zip(mine, places, strict=True))
        there = [tuple(inner.mixture.samples(place, place + 1)[0].tolist()) for place in places]
        held = {row for row in there if row in place_of}
        displaced = [row for row in there if row not in held]
        self._at = {place: row for row, place in place_of.items()}
        self._instead = dict(zip((row for row in mine if row not in held), displaced, strict=True))
        self._order = inner

    def sample_ids(self, batch_index: int) -> npt.NDArray[np.int64]:
        """As the loader's, with the document's rows moved together."""
        first, _ = self.batch_starts.rows_of(batch_index)
        ids = [tuple(row) for row in self._order.sample_ids(batch_index).tolist()]
        moved = [self._at.get(first + at, self._instead.get(row, row)) for at, row in enumerate(ids)]
        return np.array(moved, dtype=np.int64)


def run_version(version: str, folder: Path) -> dict[str, Any]:
    """One of the three runs, and what came of it."""
    document = document_name(document_id((folder / "prose" / BAD_FILE).read_bytes()))
    config = quick_config(folder, guarded=version == "guarded", without=document if version == "clean" else "")
    witness = Witness(FROM_BATCH)
    with (
        tempfile.TemporaryDirectory(prefix="surefoot-quick-") as place,
        open_run(config, Path(place) / "run", join_world(config.parallel), notify=witness.notify, peak=0.0) as run,
    ):
        loader = UnshuffledDocument(run.data.loader, document, FROM_BATCH)
        data = dataclasses.replace(run.data, loader=loader)
        ending = train(run.state, run.setup, data, run.keeping, stop=StopRequest(), watchers=(witness,))
        ends = [evaluate(run.setup, rows, config.eval.rows).loss for rows in data.held_out]
    rows = witness.surviving()
    return {
        "version": version,
        "document": document,
        "file": BAD_FILE,
        "bytes": BAD_BYTES,
        "spoils": math.ceil(BAD_BYTES / config.data.seq_len / (config.data.batch_size * OF_FOUR / 4)),
        "domain": "prose",
        "loss": sum(ends) / len(ends),
        "ending": ending.reason,
        "batches": list(rows),
        "losses": [row.loss for row in rows.values()],
        "skipped": [batch for batch, row in rows.items() if row.skipped and not row.idle],
        "blank": [batch for batch, row in rows.items() if row.idle],
        "events": [event.to_dict() for event in witness.events],
        "suspects": [s for row in witness.rows for s in row.get("suspects") or ()],
    }


def run_quick(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """All three runs, two at a time: by version."""
    say("Writing a corpus from this Python installation, and one bad document into it.")
    write_texts(folder)
    prepare(quick_config(folder).data)
    say("Three runs of one config: without the document, with it, and with it under guard.")
    with ProcessPoolExecutor(2, get_context("spawn"), begin_worker) as pool:
        found = list(pool.map(partial(run_version, folder=folder), VERSIONS))
    return {result["version"]: result for result in found}


def to_json(result: dict[str, Any]) -> str:
    """For ``--json``: everything but the curves; numbers that are not finite become null."""
    plain = {
        version: {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in run.items()
            if key not in ("losses", "batches")
        }
        for version, run in result.items()
    }
    return json.dumps(plain, indent=2)
