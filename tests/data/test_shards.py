import json
import os
import struct

import numpy as np
import pytest

from surefoot.data.errors import DataError
from surefoot.data.hashing import document_id, sha256_of_file
from surefoot.data.shard_writer import SplitWriter
from surefoot.data.shards import HEADER, Split, read_manifest
from surefoot.data.verify import verify_once, verify_split

TEXTS = ["first", "the second document", "x", "été"]


def read_as_megatron_does(folder):
    """Documents by the layout that Megatron-LM's IndexedDataset documents, with nothing of ours."""
    data = (folder / "tokens.idx").read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack("<Q", data[9:17])
    (code,) = struct.unpack("<B", data[17:18])
    sequences, bounds = struct.unpack("<QQ", data[18:34])
    lengths = np.frombuffer(data, "<i4", sequences, 34)
    pointers = np.frombuffer(data, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(data, "<i8", bounds, 34 + 12 * sequences)
    assert len(data) == 34 + 12 * sequences + 8 * bounds
    assert (version, code) == (1, 8)
    assert documents.tolist() == list(range(sequences + 1))
    tokens = (folder / "tokens.bin").read_bytes()
    return [
        np.frombuffer(tokens, np.uint16, length, pointer).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]


def reseal(folder, **changes):
    """Give a doctored folder a manifest that fits it, as whoever planted the fault would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"] = {name: sha256_of_file(folder / name) for name in manifest["sha256"]}
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def patch(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_what_is_written_is_what_megatron_reads(write_split):
    folder = write_split(TEXTS)
    assert read_as_megatron_does(folder) == [[*text.encode(), 256] for text in TEXTS]


def test_a_split_knows_its_documents(write_split):
    split = Split.open(write_split(TEXTS))
    assert (split.num_documents, split.num_tokens) == (4, sum(len(text.encode()) + 1 for text in TEXTS))
    assert split.manifest.num_bytes == sum(len(text.encode()) for text in TEXTS)
    for at, text in enumerate(TEXTS):
        start, stop = split.document_span(at)
        assert split.tokens[start:stop].tolist() == [*text.encode(), 256]
        assert split.document_hash(at) == document_id(text.encode())
        assert split.find_document(document_id(text.encode())) == [at]
    assert split.find_document(1) == []
    verify_split(split)


def test_the_documents_of_a_stretch_are_found_by_their_starts(write_split):
    split = Split.open(write_split(TEXTS))
    starts = [split.document_span(at)[0] for at in range(4)]
    for start in range(split.num_tokens):
        for stop in range(start + 1, split.num_tokens + 2):
            first, found = split.offsets_at(start, stop)
            touching = [at for at in range(4) if starts[at] < stop and split.document_span(at)[1] > start]
            assert first == touching[0]
            assert found.tolist() == [starts[at] for at in touching]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "uint16"), (65_500, "int32")])
def test_ids_take_two_bytes_only_below_65500(write_split, vocab_size, dtype):
    split = Split.open(write_split(TEXTS, vocab_size=vocab_size))
    assert split.manifest.dtype == dtype
    assert split.tokens[:5].tolist() == list(b"first")
    verify_split(split)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "documents.ids"])
def test_a_truncated_shard_is_refused_with_file_and_offset(write_split, name):
    folder = write_split(TEXTS)
    size = (folder / name).stat().st_size
    os.truncate(folder / name, size - 3)
    with pytest.raises(DataError) as caught:
        Split.open(folder)
    assert str(caught.value) == (
        f"{folder / name}: ends at byte offset {size - 3}: {size - 3} bytes where manifest.json asks for {size}; the shard is "
        "damaged or half copied: build it again with `surefoot data build`, or copy it again"
    )


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "documents.ids", "manifest.json"])
def test_a_missing_file_is_refused_by_name(write_split, name):
    folder = write_split(TEXTS)
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: no such file; .*build it again"):
        Split.open(folder)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"X", r"tokens.idx: offset 0 holds b'XMIDIDX"),
        (17, b"\x04", r"tokens.idx: dtype code 4 at offset 17 is int32, manifest.json says uint16"),
        (18, b"\x05", r"tokens.idx: 5 sequences and 5 document bounds at offset 18 where 4 documents need 4 and 5"),
        (34 + 12, b"\x09", r"tokens.idx: documents run from byte 0 to \d+ of tokens.bin, which has \d+"),
    ],
)
def test_an_index_that_contradicts_the_manifest_is_refused_at_open(write_split, offset, data, message):
    folder = write_split(TEXTS)
    patch(folder / "tokens.idx", offset, data)
    with pytest.raises(DataError, match=message):
        Split.open(folder)


@pytest.mark.parametrize(("name", "offset"), [("tokens.bin", 0), ("documents.ids", 5)])
def test_a_changed_byte_is_a_wrong_hash(write_split, name, offset):
    folder = write_split(TEXTS)
    patch(folder / name, offset, b"\x01")
    with pytest.raises(
        DataError, match=rf"{name}: sha256 is [0-9a-f]{{16}}…, the manifest says [0-9a-f]{{16}}…; .*build"
    ):
        verify_split(Split.open(folder))


def test_an_id_beyond_the_vocabulary_is_refused_with_its_offset(write_split):
    folder = write_split(TEXTS)
    patch(folder / "tokens.bin", 2 * 7, (300).to_bytes(2, "little"))
    reseal(folder)
    with pytest.raises(
        DataError, match=r"tokens.bin: id 300 at byte offset 14 is beyond the vocabulary of 257; .*build"
    ):
        verify_split(Split.open(folder))


def test_documents_with_a_gap_are_refused_with_their_number(write_split):
    folder = write_split(TEXTS)
    patch(folder / "tokens.idx", HEADER.size + 4 * 4 + 8 * 2, (50).to_bytes(8, "little"))
    reseal(folder)
    with pytest.raises(
        DataError, match=r"tokens.idx: document 2 \(pointer at byte offset 66\) has length 2 and starts at"
    ):
        verify_split(Split.open(folder))


def test_bounds_that_skip_a_document_are_refused(write_split):
    folder = write_split(TEXTS)
    patch(folder / "tokens.idx", HEADER.size + 12 * 4 + 8, (3).to_bytes(8, "little"))
    reseal(folder)
    with pytest.raises(DataError, match=r"tokens.idx: document 1 "):
        verify_split(Split.open(folder))


def test_a_document_without_its_end_is_refused_with_its_offset(write_split):
    folder = write_split(TEXTS)
    patch(folder / "tokens.bin", 2 * 5, b"\x41\x00")
    reseal(folder)
    with pytest.raises(
        DataError, match=r"tokens.bin: document 0 \([0-9a-f]{16}\) at byte offset 0 does not end with id 256"
    ):
        verify_split(Split.open(folder))


def test_verification_reads_again_only_what_changed(write_split, tmp_path, monkeypatch):
    folder, cache = write_split(TEXTS), tmp_path / "cache" / "verified.json"
    verify_once(Split.open(folder), cache)
    monkeypatch.setattr("surefoot.data.verify.verify_split", lambda *args: pytest.fail("verified twice"))
    verify_once(Split.open(folder), cache)
    monkeypatch.undo()
    patch(folder / "tokens.bin", 0, b"\x01")
    with pytest.raises(DataError, match="sha256"):
        verify_once(Split.open(folder), cache)


def test_a_file_cut_short_while_in_use_is_an_error_and_no_crash(write_split):
    folder = write_split(TEXTS)
    split = Split.open(folder)
    os.truncate(folder / "tokens.bin", 10)
    with pytest.raises(DataError, match=r"tokens.bin: 6 of 16 bytes at offset 4; the file was cut short while in use"):
        split.read(2, np.empty(8, dtype=split.dtype))


def test_a_split_without_ids_names_documents_by_shard_and_ordinal(write_split):
    folders = [write_split(TEXTS), write_split(TEXTS[::-1])]
    for folder in folders:
        (folder / "documents.ids").unlink()
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["sha256"]["documents.ids"]
        (folder / "manifest.json").write_text(json.dumps(manifest | {"document_ids": "ordinal"}))
    first, second = (Split.open(folder) for folder in folders)
    ids = [split.document_hash(at) for split in (first, second) for at in range(4)]
    assert len(set(ids)) == 8
    assert [first.find_document(number) for number in ids[:5]] == [[0], [1], [2], [3], []]
    verify_split(first)


def test_an_interrupted_writer_leaves_no_manifest(tmp_path):
    writer = SplitWriter(tmp_path / "s", vocab_size=257, eos_id=256, tokenizer_fingerprint="t")
    with pytest.raises(DataError), writer:
        writer.add([], 1, 0, "empty")
    with pytest.raises(DataError, match="a split folder is whole only with its manifest"):
        Split.open(tmp_path / "s")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "doc.txt: an empty document; remove it"),
        ([1, 400], "doc.txt: token 1 has id 400 beyond the vocabulary of 257"),
        ([1, 256, 2], r"doc.txt: token 1 is the end of a document \(id 256\) in the middle of one"),
    ],
)
def test_a_document_that_cannot_be_told_apart_later_is_refused_when_written(tmp_path, ids, message):
    writer = SplitWriter(tmp_path / "s", vocab_size=257, eos_id=256, tokenizer_fingerprint="t")
    with pytest.raises(DataError, match=message), writer:
        writer.add(ids, 1, 2, "doc.txt")


def test_a_manifest_of_something_else_is_refused(write_split):
    folder = write_split(TEXTS)
    (folder / "manifest.json").write_text("[")
    with pytest.raises(DataError, match=r"manifest.json: not JSON"):
        read_manifest(folder)
    (folder / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(DataError, match=r"manifest.json: not a split manifest of format 'surefoot-split-1'"):
        read_manifest(folder)
    (folder / "manifest.json").write_text('{"format": "surefoot-split-1", "dtypo": 1}')
    with pytest.raises(DataError, match=r"keys missing or unknown: document_ids, dropped_duplicates, dtype, dtypo"):
        read_manifest(folder)
