"""Opening and reading cost the same for ten billion tokens and for a thousand."""

import os
import tracemalloc
from pathlib import Path

import numpy as np

from surefoot.config.data import DataConfig, Shards, SourceConfig
from surefoot.data.loader import Loader
from surefoot.data.prepared import PreparedData, PreparedSource
from surefoot.data.shards import HEADER, MAGIC, Manifest, Split
from tolerances import ALLOCATED_MIB, RESIDENT_GROWTH_MIB

READS_PER_LOOKUP = 60  # two bisections of 2^20 documents: 20 each, and the copy


def write_sparse(folder: Path, num_tokens: int, num_documents: int) -> Path:
    """A split of zeros that takes no disk space."""
    folder.mkdir()
    with (folder / "tokens.bin").open("wb") as file:
        os.truncate(file.fileno(), 2 * num_tokens)
    length = num_tokens // num_documents
    count = np.arange(num_documents, dtype="<i8")
    index = HEADER.pack(MAGIC, 1, 8, num_documents, num_documents + 1)
    index += np.full(num_documents, length, "<i4").tobytes() + (2 * length * count).tobytes()
    (folder / "tokens.idx").write_bytes(index + np.arange(num_documents + 1, dtype="<i8").tobytes())
    (folder / "documents.ids").write_bytes(count.tobytes())
    manifest = Manifest(
        dtype="uint16",
        num_tokens=num_tokens,
        num_documents=num_documents,
        num_bytes=num_tokens,
        vocab_size=257,
        tokenizer_fingerprint="t",
        eos_appended=False,
        eos_id=256,
        sha256=dict.fromkeys(("tokens.bin", "tokens.idx", "documents.ids"), "0" * 64),
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


def open_loader(folder: Path) -> Loader:
    data = DataConfig(
        sources=(SourceConfig(name="big", documents=Shards(path=str(folder))),), seq_len=2048, batch_size=4
    )
    return Loader(data, PreparedData((PreparedSource("big", folder, folder),), None, "t", 257, 256, "0" * 16), seed=1)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_ten_billion_tokens_open_and_give_batches_in_constant_memory(tmp_path):
    folder = write_sparse(tmp_path / "big", 10_000_000_000, 10)
    assert (folder / "tokens.bin").stat().st_size == 20_000_000_000
    before = resident_mib()
    tracemalloc.start()
    loader = open_loader(folder)
    for batch_index in range(0, 1_000_000, 20_000):
        batch = loader.batch(batch_index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.num_targets == 4 * 2048
    assert len(np.unique(batch.samples_B3[:, 2])) == 4
    assert peak / 2**20 < ALLOCATED_MIB
    assert resident_mib() - before < RESIDENT_GROWTH_MIB


def test_the_last_tokens_of_ten_billion_are_in_reach(tmp_path):
    loader = open_loader(write_sparse(tmp_path / "big", 10_000_000_000, 10))
    num_rows = loader.mixture.num_rows[0]
    (span,) = loader.row_documents(0, num_rows - 1)
    assert span.stop == 1_000_000_000
    assert loader.splits[0].document_span(9) == (9_000_000_000, 10_000_000_000)


def test_a_million_documents_are_searched_in_a_few_reads(tmp_path):
    split = Split.open(write_sparse(tmp_path / "many", 3 * 2**20, 2**20))

    class Counted:
        """The index, counting what is read of it."""

        def __init__(self, view):
            self.view, self.reads = view, 0

        def __len__(self):
            return len(self.view)

        def __getitem__(self, at):
            self.reads += 1
            return self.view[at]

    counted = Counted(split._pointers)
    split._pointers = counted
    first, starts = split.offsets_at(3 * 777_777 + 1, 3 * 777_777 + 7)
    assert first == 777_777
    assert starts.tolist() == [3 * 777_777, 3 * 777_777 + 3, 3 * 777_777 + 6]
    assert counted.reads <= READS_PER_LOOKUP
