"""How fast batches come: tokens/s of one core, time from open to a random batch, and memory against the size of the data.

    python benchmarks/data_loader.py [--json]

Builds a sparse shard of 10^10 tokens (no disk space) and a real one of mixed document lengths in a temporary folder.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from surefoot.config.data import DataConfig, Shards, SourceConfig
from surefoot.data.hashing import sha256_of_file
from surefoot.data.loader import Loader
from surefoot.data.prepared import PreparedData, PreparedSource
from surefoot.data.shard_writer import SplitWriter
from surefoot.data.shards import HEADER, MAGIC, Manifest

SEQ_LEN, BATCH_SIZE = 2048, 64
VOCAB_SIZE, EOS_ID = 4096, 0
MEAN_DOCUMENT = 700  # tokens, about that of web text


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        print(json.dumps(probe_open(Path(args.probe))))
        return
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name))
    if args.json:
        print(json.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:32} {value:,.3f}")


def measure(folder: Path) -> dict[str, float]:
    """All figures, by name with unit."""
    write_real(folder / "real", num_tokens=20_000_000)
    write_sparse(folder / "sparse", num_tokens=10_000_000_000)
    loader = open_loader(folder / "real")
    best = min(time_batches(loader, first) for first in range(0, 160, 20))
    real, sparse = probe(folder / "real"), probe(folder / "sparse")
    return {
        "tokens_per_s_per_core_millions": 20 * BATCH_SIZE * SEQ_LEN / best / 1e6,
        "microseconds_per_row": best / (20 * BATCH_SIZE) * 1e6,
        "open_and_first_batch_ms_2e7": real["ms"],
        "open_and_first_batch_ms_1e10": sparse["ms"],
        "seek_ms_1e10": sparse["seek_ms"],
        "resident_growth_mib_2e7": real["mib"],
        "resident_growth_mib_1e10": sparse["mib"],
    }


def time_batches(loader: Loader, first: int) -> float:
    """CPU seconds for 20 batches."""
    start = time.process_time()
    for batch_index in range(first, first + 20):
        loader.batch(batch_index)
    return time.process_time() - start


def probe(folder: Path) -> dict[str, float]:
    """``probe_open`` in a process of its own."""
    command = [sys.executable, __file__, "--probe", str(folder)]
    figures: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return figures


def probe_open(folder: Path) -> dict[str, float]:
    """Time from nothing to a far batch, and what that and 200 more add to the memory of the process."""
    before = resident_mib()
    start = time.perf_counter()
    loader = open_loader(folder, batch_size=4)
    loader.batch(1_000_003)
    opened = time.perf_counter()
    loader.batch(17)
    sought = time.perf_counter()
    for batch_index in range(200):
        loader.batch(batch_index * 7919)
    after = resident_mib()
    return {"ms": (opened - start) * 1e3, "seek_ms": (sought - opened) * 1e3, "mib": after - before}


def resident_mib() -> float:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_loader(folder: Path, batch_size: int = BATCH_SIZE) -> Loader:
    source = SourceConfig(name="text", documents=Shards(path=str(folder)))
    data = DataConfig(sources=(source,), seq_len=SEQ_LEN, batch_size=batch_size)
    prepared = PreparedData(
        (PreparedSource("text", folder, folder),), None, "benchmark", VOCAB_SIZE, EOS_ID, "benchmark"
    )
    return Loader(data, prepared, seed=0)


def write_real(folder: Path, num_tokens: int) -> None:
    """Random ids in documents of exponentially distributed lengths."""
    generator = np.random.default_rng(0)
    with SplitWriter(folder, vocab_size=VOCAB_SIZE, eos_id=EOS_ID, tokenizer_fingerprint="benchmark") as writer:
        written = 0
        while written < num_tokens:
            ids = generator.integers(1, VOCAB_SIZE, size=1 + int(generator.exponential(MEAN_DOCUMENT)))
            writer.add(ids, written, len(ids), "random")
            written += len(ids) + 1


def write_sparse(folder: Path, num_tokens: int, num_documents: int = 10) -> None:
    """Zeros that take no disk space, in a few huge documents."""
    folder.mkdir()
    with (folder / "tokens.bin").open("wb") as file:
        os.truncate(file.fileno(), 2 * num_tokens)
    length = num_tokens // num_documents
    index = HEADER.pack(MAGIC, 1, 8, num_documents, num_documents + 1)
    index += struct.pack(f"<{num_documents}i", *[length] * num_documents)
    index += struct.pack(f"<{num_documents}q", *range(0, 2 * num_tokens, 2 * length))
    index += struct.pack(f"<{num_documents + 1}q", *range(num_documents + 1))
    (folder / "tokens.idx").write_bytes(index)
    (folder / "documents.ids").write_bytes(struct.pack(f"<{num_documents}Q", *range(num_documents)))
    manifest = Manifest(
        dtype="uint16",
        num_tokens=num_tokens,
        num_documents=num_documents,
        num_bytes=num_tokens,
        vocab_size=VOCAB_SIZE,
        tokenizer_fingerprint="benchmark",
        eos_appended=False,
        eos_id=EOS_ID,
        sha256={name: sha256_of_file(folder / name) for name in ("tokens.idx", "documents.ids")}
        | {"tokens.bin": "0" * 64},
    )
    (folder / "manifest.json").write_text(manifest.to_json())


if __name__ == "__main__":
    main()
