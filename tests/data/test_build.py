import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from surefoot.config.data import (
    BpeTokenizer,
    BytesTokenizer,
    DataConfig,
    PythonInstallation,
    Shards,
    SourceConfig,
    TextFiles,
    TokenizerFile,
)
from surefoot.data import build, extract, source
from surefoot.data.build import prepare
from surefoot.data.errors import DataError
from surefoot.data.hashing import document_id
from surefoot.data.loader import Loader
from surefoot.data.shards import Split
from surefoot.data.tokenizer import load_tokenizer

NUM_FILES = 60


@pytest.fixture
def folder(tmp_path):
    """Sixty distinct text files."""
    place = tmp_path / "texts"
    place.mkdir()
    for at in range(NUM_FILES):
        (place / f"{at:03d}.txt").write_text(f"text number {at}, été {at * at}\n" * (1 + at % 5), encoding="utf-8")
    return place


def config(tmp_path, *sources, tokenizer=None, **changes):
    named = [SourceConfig(name=f"s{at}", documents=documents) for at, documents in enumerate(sources)]
    settings = {"seq_len": 16, "batch_size": 2, "cache_dir": str(tmp_path / "cache"), "val_fraction": 0.2} | changes
    return DataConfig(sources=tuple(named), tokenizer=tokenizer or BytesTokenizer(), **settings)


def ids_of(folder: Path) -> list[int]:
    split = Split.open(folder)
    return [split.document_hash(at) for at in range(split.num_documents)]


def text_of(data, prepared, folder, document):
    split = Split.open(folder)
    start, stop = split.document_span(document)
    return load_tokenizer(data.tokenizer, prepared.tokenizer_path).decode(split.tokens[start:stop])


@pytest.mark.parametrize("tokenizer", [BytesTokenizer(), BpeTokenizer(vocab_size=300)])
def test_texts_become_two_sides_that_share_nothing_and_lose_nothing(tmp_path, folder, tokenizer):
    data = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"), tokenizer=tokenizer)
    prepared = prepare(data)
    (source,) = prepared.sources
    sides = {
        side: {text_of(data, prepared, side, at) for at in range(Split.open(side).num_documents)}
        for side in (source.train, source.val)
    }
    originals = {path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert sides[source.train] | sides[source.val] == originals
    assert not sides[source.train] & sides[source.val]
    assert sides[source.val] == {text for text in originals if document_id(text.encode()) < 0.2 * 2**64}
    assert 2 <= len(sides[source.val]) <= 24
    for side, texts in sides.items():
        assert Split.open(side).manifest.num_bytes == sum(len(text.encode()) for text in texts)
    assert Loader(data, prepared, 0).batch(0).num_targets > 0


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(extract, "_NAMES_PER_WORKER", 8)
    source = TextFiles(glob=f"{folder}/*.txt")
    tokenizer = BpeTokenizer(vocab_size=300)
    found = []
    for workers in (1, 3):
        data = config(tmp_path, source, tokenizer=tokenizer, cache_dir=str(tmp_path / f"cache-{workers}"))
        found.append(prepare(data, num_workers=workers))
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].tokenizer_fingerprint == found[1].tokenizer_fingerprint
    for one, other in zip(found[0].sources, found[1].sources, strict=True):
        assert (one.train / "tokens.bin").read_bytes() == (other.train / "tokens.bin").read_bytes()


def test_the_bpe_is_trained_on_training_documents_only(tmp_path, folder):
    source = TextFiles(glob=f"{folder}/*.txt")
    one = prepare(config(tmp_path, source, tokenizer=BpeTokenizer(vocab_size=300)))
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8")
        if document_id(text.encode()) < 0.2 * 2**64:
            path.unlink()
    at = 0
    while document_id(f"{at} ZZZZ QQQQ\n".encode() * 50) >= 0.2 * 2**64:
        at += 1
    (folder / "other.txt").write_text(f"{at} ZZZZ QQQQ\n" * 50)
    other = prepare(config(tmp_path, source, tokenizer=BpeTokenizer(vocab_size=300)))
    assert ids_of(one.sources[0].train) == ids_of(other.sources[0].train)
    assert ids_of(one.sources[0].val) != ids_of(other.sources[0].val)
    assert one.tokenizer_fingerprint == other.tokenizer_fingerprint


def test_what_was_built_is_reused_until_a_text_changes(tmp_path, folder, monkeypatch):
    data = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"))
    first = prepare(data)
    with monkeypatch.context() as patched:
        patched.setattr(build, "_build_folder", lambda *args: pytest.fail("built again"))
        patched.setattr("surefoot.data.verify.verify_split", lambda *args: pytest.fail("verified again"))
        assert prepare(data) == first
        assert prepare(dataclasses.replace(data, seq_len=8)) == first
    (folder / "000.txt").write_text("another text")
    assert prepare(data).fingerprint != first.fingerprint


def test_progress_is_told_by_name_and_share(tmp_path, folder):
    told = []
    prepare(
        config(tmp_path, TextFiles(glob=f"{folder}/*.txt"), tokenizer=BpeTokenizer(vocab_size=300)),
        progress=lambda what, share: told.append((what, share)),
    )
    assert {what for what, _ in told} == {"read s0", "train tokenizer", "tokenise s0"}
    for name in ("read s0", "tokenise s0"):
        shares = [share for what, share in told if what == name]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_an_interrupted_build_leaves_nothing_that_looks_finished(tmp_path, folder, monkeypatch):
    data = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"))
    with monkeypatch.context() as patched:
        patched.setattr(build, "seal_source", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(data)
    assert list((tmp_path / "cache").iterdir()) == []
    assert prepare(data).sources


def test_leftovers_of_a_killed_build_are_swept_after_a_day(tmp_path, folder):
    old, young = tmp_path / "cache" / ".building-old", tmp_path / "cache" / ".building-young"
    for place in (old, young):
        place.mkdir(parents=True)
    os.utime(old, (0, 0))
    prepare(config(tmp_path, TextFiles(glob=f"{folder}/*.txt")))
    assert not old.exists()
    assert young.exists()


def test_a_document_that_comes_twice_is_kept_once_and_counted(tmp_path, folder):
    for at in range(7):
        shutil.copy(folder / f"{at:03d}.txt", folder / f"copy-{at}.txt")
    prepared = prepare(config(tmp_path, TextFiles(glob=f"{folder}/*.txt")))
    (source,) = prepared.sources
    ids = ids_of(source.train) + ids_of(source.val)
    assert len(ids) == len(set(ids)) == NUM_FILES
    assert Split.open(source.train).manifest.dropped_duplicates == 7


def test_what_one_source_holds_out_no_other_trains_on(tmp_path, folder):
    few = tmp_path / "few"
    few.mkdir()
    candidates = [path for path in folder.iterdir() if document_id(path.read_bytes()) >= 0.2 * 2**64]
    for path in candidates[:3]:  # none lies below the limit, so the smallest of the three is held out
        shutil.copy(path, few)
    prepared = prepare(config(tmp_path, TextFiles(glob=f"{folder}/*.txt"), TextFiles(glob=f"{few}/*.txt")))
    held_out = set(ids_of(prepared.sources[0].val)) | set(ids_of(prepared.sources[1].val))
    trained = set(ids_of(prepared.sources[0].train)) | set(ids_of(prepared.sources[1].train))
    assert len(ids_of(prepared.sources[1].val)) == 1
    assert not held_out & trained
    assert Split.open(prepared.sources[0].train).manifest.dropped_duplicates == 1


def test_texts_give_way_to_shards_that_were_divided_otherwise(tmp_path, folder):
    other = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"), val_fraction=0.5, cache_dir=str(tmp_path / "elsewhere"))
    shards = prepare(other).sources[0]
    for at in range(20):
        (folder / f"new-{at}.txt").write_text(f"not in the shards {at}")
    for fraction in (0.8, 0.3):
        data = config(
            tmp_path, Shards(path=str(shards.train.parent)), TextFiles(glob=f"{folder}/*.txt"), val_fraction=fraction
        )
        prepared = prepare(data)
        held_out = {number for source in prepared.sources for number in ids_of(source.val)}
        trained = {number for source in prepared.sources for number in ids_of(source.train)}
        assert not held_out & trained
        manifest = Split.open(prepared.sources[1].train).manifest
        assert manifest.dropped_duplicates == NUM_FILES + 20 - sum(
            Split.open(side).num_documents for side in (prepared.sources[1].train, prepared.sources[1].val)
        )
        assert manifest.dropped_duplicates > 5


def test_a_source_whose_held_out_texts_all_stand_in_the_training_shards_is_refused(tmp_path, folder):
    other = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"), cache_dir=str(tmp_path / "elsewhere"))
    shards = prepare(other).sources[0].train.parent
    few = tmp_path / "few"
    few.mkdir()
    for path in [path for path in folder.iterdir() if document_id(path.read_bytes()) >= 0.2 * 2**64][:3]:
        shutil.copy(path, few)
    data = config(tmp_path, Shards(path=str(shards)), TextFiles(glob=f"{few}/*.txt"))
    with pytest.raises(
        DataError, match=r"sources\[s1\]: other sources train on every one of its held-out documents; remove"
    ):
        prepare(data)


def test_held_out_documents_stand_in_the_order_of_their_ids(tmp_path, folder):
    (source,) = prepare(config(tmp_path, TextFiles(glob=f"{folder}/*.txt"))).sources
    assert ids_of(source.val) == sorted(ids_of(source.val))
    assert ids_of(source.train) != sorted(ids_of(source.train))


def test_a_source_with_nothing_left_to_train_on_is_refused(tmp_path):
    (tmp_path / "only.txt").write_text("only")
    with pytest.raises(
        DataError, match=r"sources\[s0\]: 1 distinct documents, of which 1 are held out .* add documents"
    ):
        prepare(config(tmp_path, TextFiles(glob=f"{tmp_path}/only.txt")))


def test_a_cache_that_cannot_be_written_is_refused_with_the_way_out(tmp_path, folder):
    (tmp_path / "file").write_text("in the way")
    data = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"), cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be built: .*Not a directory.*; free space, or point data.cache_dir"):
        prepare(data)


def test_the_same_texts_under_two_names_are_refused(tmp_path, folder):
    (tmp_path / "again").symlink_to(folder)
    data = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"), TextFiles(glob=f"{tmp_path}/again/*.txt"))
    with pytest.raises(DataError, match=r"s1/train/tokens.bin: the same tokens as s0/train .* remove one of the two"):
        prepare(data)


@pytest.mark.parametrize("workers", [1, 3])
def test_bad_bytes_in_any_worker_are_refused_with_file_and_offset(tmp_path, folder, monkeypatch, workers):
    monkeypatch.setattr(extract, "_NAMES_PER_WORKER", 8)
    (folder / "042.txt").write_bytes(b"good\xff")
    with pytest.raises(DataError, match=r"042.txt: byte 0xff at offset 4 is not UTF-8"):
        prepare(config(tmp_path, TextFiles(glob=f"{folder}/*.txt")), num_workers=workers)


@pytest.fixture
def shards(tmp_path, folder):
    """A source folder with a BPE, as another run built it."""
    data = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"), tokenizer=BpeTokenizer(vocab_size=300))
    source = prepare(dataclasses.replace(data, cache_dir=str(tmp_path / "elsewhere"))).sources[0]
    return shutil.copytree(source.train.parent, tmp_path / "shards")


def test_shards_are_read_as_they_are_with_the_tokenizer_they_bring(tmp_path, shards):
    data = config(tmp_path, Shards(path=str(shards)), tokenizer=BpeTokenizer(vocab_size=300))
    prepared = prepare(data)
    assert prepared.sources[0].train == shards / "train"
    assert (prepared.vocab_size, prepared.tokenizer_path) == (300, shards / "tokenizer.json")
    file = TokenizerFile(path=str(shards / "tokenizer.json"))
    assert prepare(dataclasses.replace(data, tokenizer=file)).fingerprint == prepared.fingerprint
    assert Loader(data, prepared, 0).batch(0).num_targets


def test_shards_and_texts_mix_under_one_tokenizer_file(tmp_path, shards, folder):
    for path in folder.iterdir():
        path.write_text("more " + path.read_text(encoding="utf-8"), encoding="utf-8")
    file = TokenizerFile(path=str(shards / "tokenizer.json"))
    data = config(tmp_path, Shards(path=str(shards)), TextFiles(glob=f"{folder}/*.txt"), tokenizer=file)
    prepared = prepare(data)
    assert {split.manifest.tokenizer_fingerprint for split in map(Split.open, (s.train for s in prepared.sources))} == {
        prepared.tokenizer_fingerprint
    }


def test_a_bpe_beside_shards_is_refused_with_the_way_out(tmp_path, shards, folder):
    data = config(
        tmp_path, Shards(path=str(shards)), TextFiles(glob=f"{folder}/*.txt"), tokenizer=BpeTokenizer(vocab_size=300)
    )
    with pytest.raises(
        DataError, match=r"not fit the shards of 's0'; set data.tokenizer.kind = file and .*tokenizer.json"
    ):
        prepare(data)


def test_shards_of_another_tokenizer_than_the_configs_are_refused(tmp_path, shards):
    data = config(tmp_path, Shards(path=str(shards)))
    with pytest.raises(
        DataError, match=r"shards: made with tokenizer \w{16}, but data.tokenizer \(kind bytes\) is \w{16}"
    ):
        prepare(data)
    smaller = dataclasses.replace(data, tokenizer=BpeTokenizer(vocab_size=280))
    with pytest.raises(DataError, match=r"tokenizer.json: 300 ids where data.tokenizer.vocab_size=280; set it to 300"):
        prepare(smaller)


def test_shards_of_two_tokenizers_are_refused(tmp_path, shards, folder):
    other = prepare(config(tmp_path, TextFiles(glob=f"{folder}/*.txt"))).sources[0].train.parent
    with pytest.raises(
        DataError, match=r"train: made with tokenizer \w{16}, but .*train with \w{16}; build both with one"
    ):
        prepare(config(tmp_path, Shards(path=str(other)), Shards(path=str(shards))))


def test_the_same_shards_twice_are_refused_by_path_and_by_content(tmp_path, shards):
    tokenizer = BpeTokenizer(vocab_size=300)
    detour = f"{shards}/../shards"
    with pytest.raises(DataError, match=r"'s0' and 's1' read the same shards /.*shards, .* remove one"):
        prepare(config(tmp_path, Shards(path=str(shards)), Shards(path=detour), tokenizer=tokenizer))
    copy = shutil.copytree(shards, tmp_path / "copy")
    with pytest.raises(DataError, match=r"copy/train/tokens.bin: the same tokens as s0/train"):
        prepare(config(tmp_path, Shards(path=str(shards)), Shards(path=str(copy)), tokenizer=tokenizer))


def test_damaged_shards_are_refused_before_the_first_step(tmp_path, shards):
    data = config(tmp_path, Shards(path=str(shards)), tokenizer=BpeTokenizer(vocab_size=300))
    path = shards / "val" / "tokens.bin"
    good = path.read_bytes()
    path.write_bytes((65_000).to_bytes(2, "little") + good[2:])
    with pytest.raises(DataError, match=r"val/tokens.bin: id 65000 at byte offset 0 is beyond the vocabulary of 300"):
        prepare(data)
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(DataError, match=r"val/tokens.bin: sha256 is \w{16}…, the manifest says"):
        prepare(data)
    path.write_bytes(good[:-1])
    with pytest.raises(DataError, match=rf"val/tokens.bin: ends at byte offset {len(good) - 1}"):
        prepare(data)
    path.write_bytes(good)
    assert prepare(data)
    manifest = shards / "val" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))
    with pytest.raises(DataError, match=r"val/manifest.json: sha256 is \w{16}…, .* changed after the source was built"):
        prepare(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"manifest.json: no such file; data.sources\[s0\] wants a folder written by `surefoot data build`"),
        ("[", r"manifest.json: not JSON"),
        ("{}", r"manifest.json: not a source manifest of format 'surefoot-source-1'"),
    ],
)
def test_a_folder_that_is_no_source_is_refused(tmp_path, text, message):
    (tmp_path / "empty").mkdir()
    if text is not None:
        (tmp_path / "empty" / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=message):
        prepare(config(tmp_path, Shards(path=str(tmp_path / "empty"))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_fraction": 0.0}, r"data.val_fraction=0.0: must lie between 0 and 1"),
        ({"sources": ()}, r"data.sources is empty; name at least one"),
        (
            {"sources": (SourceConfig(name="a", documents=Shards(path="x"), weight=-1.0),)},
            r"data.sources\[a\].weight=-1.0: weights must be above 0; remove the source instead",
        ),
        (
            {"sources": (SourceConfig(name="a/b", documents=Shards(path="x")),)},
            r"data.sources: the name 'a/b' must be letters",
        ),
        (
            {"sources": (SourceConfig(name="a", documents=Shards(path="x")),) * 2},
            r"data.sources: two sources are called 'a'; names must differ",
        ),
        ({"tokenizer": TokenizerFile(path="/no/t.json")}, r"/no/t.json: no such tokenizer file"),
    ],
)
def test_a_config_that_cannot_be_prepared_is_refused(tmp_path, folder, changes, message):
    data = config(tmp_path, TextFiles(glob=f"{folder}/*.txt"))
    with pytest.raises(DataError, match=message):
        prepare(dataclasses.replace(data, **changes))


def test_the_standard_library_gives_code_and_prose(tmp_path, monkeypatch):
    """A few packages of this Python stand for all of it."""
    every = source._library_modules
    monkeypatch.setattr(
        source,
        "_library_modules",
        lambda: [name for name in every() if name.startswith(("json/", "email/", "logging/"))],
    )
    data = config(tmp_path, PythonInstallation(part="code"), PythonInstallation(part="prose"), val_fraction=0.2)
    prepared = prepare(data, num_workers=1)
    code, prose = (Split.open(source.train) for source in prepared.sources)
    assert code.num_tokens > 200_000
    assert prose.num_documents > 40
    assert Loader(data, prepared, 0).batch(0).samples_B3[:, 0].tolist() in ([0, 0], [0, 1], [1, 0], [1, 1])
    assert np.isin(ids_of(prepared.sources[0].val), ids_of(prepared.sources[0].train)).sum() == 0
