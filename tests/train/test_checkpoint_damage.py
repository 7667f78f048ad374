"""Damaged and hostile checkpoints: refused with the reason, the previous one used, nothing in them run."""

import hashlib
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from surefoot.train.checkpoint import load, newest_valid, save, verify
from surefoot.train.manifest import CheckpointError, FileSeal, Manifest, read_manifest, whole, write_manifest
from surefoot.train.unpickle import read_metadata

DATA = "__0_0.distcp"


def made(folder: Path, value: float = 1.0) -> Path:
    save(folder, {"w": torch.full((1000,), value), "v": torch.full((3,), value)}, {"value": value}).wait()
    return folder


def targets() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(1000), "v": torch.zeros(3)}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", [DATA, ".metadata", "record.json"])
def test_one_flipped_byte_is_refused_with_the_file_and_both_hashes(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path / "c")
    good = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    flip(folder / name, (folder / name).stat().st_size // 2)
    bad = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    found = targets()
    with pytest.raises(CheckpointError) as caught:
        load(folder, found)
    assert str(caught.value) == f"{folder / name}: sha256 is {bad}, but the manifest says {good}; its content changed"
    assert not any(tensor.any() for tensor in found.values())
    assert whole(folder)  # sizes are right: only reading tells


def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    text = (folder / "manifest.json").read_text()
    for place, letter in enumerate(text):
        if letter.isdigit():
            changed = text[:place] + str((int(letter) + 1) % 10) + text[place + 1 :]
            (folder / "manifest.json").write_text(changed)
            assert verify(folder), text[place - 20 : place + 5]


def test_a_truncated_file_is_refused_with_file_and_offset(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    size = (folder / DATA).stat().st_size
    (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-7])
    assert not whole(folder)
    with pytest.raises(
        CheckpointError, match=rf"{DATA}: {size - 7} bytes, but the manifest says {size}; it ends at offset"
    ):
        load(folder, targets())


def test_a_missing_file_a_link_in_its_place_and_a_missing_manifest_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    content = (folder / DATA).read_bytes()
    (folder / DATA).unlink()
    assert not whole(folder)
    assert verify(folder) == [f"{folder / DATA}: missing, but the manifest lists it with {len(content)} bytes"]
    (tmp_path / "elsewhere").write_bytes(content)
    (folder / DATA).symlink_to(tmp_path / "elsewhere")
    assert "missing" in verify(folder)[0]
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing, so this save was cut short; use an older"):
        load(folder, targets())
    assert not whole(tmp_path / "never")


def test_the_previous_good_checkpoint_is_used_and_the_refused_ones_are_told(tmp_path: Path) -> None:
    old, damaged, partial = made(tmp_path / "1"), made(tmp_path / "2"), made(tmp_path / "3")
    flip(damaged / DATA, 100)
    (partial / "manifest.json").unlink()
    folder, refused = newest_valid([partial, damaged, old])
    assert folder == old
    assert [path for path, _ in refused] == [partial, damaged]
    assert "cut short" in refused[0][1]
    assert "sha256" in refused[1][1]
    assert newest_valid([partial])[0] is None


def test_a_file_that_the_manifest_does_not_list_is_never_opened(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    (folder / "notes.txt").write_text("a person's")
    assert verify(folder) == []
    assert load(folder, targets()) == {"value": 1.0}


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "a/b", ""])
def test_a_manifest_that_reaches_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path / "c")
    manifest = read_manifest(folder)
    write_manifest(folder, Manifest(1, {**manifest.files, name: FileSeal("0" * 64, 0)}))
    with pytest.raises(CheckpointError, match="a checkpoint's files lie in its own folder"):
        load(folder, targets())


def test_a_manifest_of_another_format_or_without_the_table_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    manifest = read_manifest(folder)
    write_manifest(folder, Manifest(1, {DATA: manifest.files[DATA]}))
    assert "does not list .metadata, which every checkpoint has" in verify(folder)[0]
    for text in ("[]", "{", '{"sha256": 1}', '{"sha256": 1, "format": 1, "world_size": 1, "files": {"a": 1}}'):
        (folder / "manifest.json").write_text(text)
        assert "unreadable" in verify(folder)[0]


# ------------------------------------------------------------------ hostile, with a valid manifest


class Payload:
    """Leaves a mark when it is unpickled the ordinary way."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def reseal(folder: Path) -> None:
    """A manifest that fits whatever the files are now: what an attacker would do."""
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    contents = {name: (folder / name).read_bytes() for name in names}
    seals = {name: FileSeal(hashlib.sha256(content).hexdigest(), len(content)) for name, content in contents.items()}
    write_manifest(folder, Manifest(1, seals))
    assert verify(folder) == []


def test_a_payload_in_the_table_of_contents_is_refused_and_does_not_run(tmp_path: Path) -> None:
    folder, mark = made(tmp_path / "c"), tmp_path / "ran"
    table = pickle.loads((folder / ".metadata").read_bytes())
    for hostile in (Payload(mark), [table, Payload(mark)]):
        (folder / ".metadata").write_bytes(pickle.dumps(hostile))
        reseal(folder)
        with pytest.raises(CheckpointError, match=r"\.metadata: names pathlib\.Path.*nothing was run"):
            load(folder, targets())
        assert not mark.exists()
    table.planner_data = Payload(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    reseal(folder)
    with pytest.raises(CheckpointError, match="nothing was run"):
        load(folder, targets())
    assert not mark.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert mark.exists()  # the payload was a live one


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_payload_in_a_tensor_file_is_refused_and_does_not_run(tmp_path: Path, as_zip: bool) -> None:
    folder, mark = made(tmp_path / "c"), tmp_path / "ran"
    if as_zip:
        stream = io.BytesIO()
        torch.save([torch.zeros(1000), Payload(mark)], stream)
        payload = stream.getvalue()
    else:
        payload = pickle.dumps(Payload(mark))
    table = pickle.loads((folder / ".metadata").read_bytes())
    for place in table.storage_data.values():
        place.offset, place.length = 0, len(payload)
    (folder / DATA).write_bytes(payload)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    reseal(folder)
    reason = "it names getattr" if as_zip else "not the zip format that tensors are written in"
    with pytest.raises(
        CheckpointError, match=rf"{DATA} at offset 0: [vw] is not a plain tensor \({reason}\); nothing was run"
    ):
        load(folder, targets())
    assert not mark.exists()
    torch.load(io.BytesIO(payload), weights_only=False) if as_zip else pickle.loads(payload)
    assert mark.exists()


def test_pickled_bytes_in_place_of_a_tensor_are_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        dcp.save({"w": {"not": "a tensor"}}, checkpoint_id=str(tmp_path / "c"))
    (tmp_path / "c" / "record.json").write_text("{}")
    reseal(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"names torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"):
        load(tmp_path / "c", {"w": torch.zeros(1)})


def tampered(folder: Path, change: Callable[[Any], None]) -> str:
    """The refusal after ``change`` to the table of contents."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    change(table)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    reseal(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder, targets())
    return str(caught.value)


def test_a_table_of_contents_that_lies_is_refused(tmp_path: Path) -> None:
    def places(field: str, value: Any) -> Callable[[Any], None]:
        return lambda table: [setattr(place, field, value) for place in table.storage_data.values()] and None

    lies: list[tuple[Callable[[Any], None], str]] = [
        (places("relative_path", "../../secret"), "which the manifest does not list"),
        (places("relative_path", "record.json"), "which the manifest does not list"),
        (places("relative_path", 7), "a int where a name belongs"),
        (places("offset", -1), "-1 where a count belongs"),
        (places("length", 10), "is not a plain tensor"),
        (places("transform_descriptors", ["zstd"]), "only plain storage is read"),
        (lambda table: table.storage_data.clear(), "says no place for"),
        (lambda table: table.state_dict_metadata["w"].chunks.clear(), "covers 0 of the 1000 elements of w"),
        (lambda table: setattr(table, "state_dict_metadata", 3), "not a table of tensors"),
        (lambda table: setattr(table.state_dict_metadata["w"], "size", torch.Size([4])), "outside [4]"),
        (lambda table: setattr(table.state_dict_metadata["w"], "properties", 1), "holds no properties of w"),
        (
            lambda table: table.state_dict_metadata.update(w=table.state_dict_metadata["w"].chunks[0]),
            "holds a ChunkStorageMetadata where a TensorStorageMetadata belongs",
        ),
    ]
    for number, (change, refusal) in enumerate(lies):
        assert refusal in tampered(made(tmp_path / str(number)), change)


def test_a_stored_tensor_unlike_its_entry_is_refused_not_cast(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    stream = io.BytesIO()
    torch.save(torch.zeros(1000, dtype=torch.float64), stream)
    offset = (folder / DATA).stat().st_size
    with (folder / DATA).open("ab") as file:
        file.write(stream.getvalue())

    def point_there(table: Any) -> None:
        (place,) = [place for index, place in table.storage_data.items() if index.fqn == "w"]
        place.offset, place.length = offset, len(stream.getvalue())

    refusal = tampered(folder, point_there)
    assert (
        f"{DATA} at offset {offset}: w is torch.float64 [1000], but the table of contents says torch.float32" in refusal
    )


def test_a_pickle_that_would_change_the_classes_it_names_changes_nothing_of_ours(tmp_path: Path) -> None:
    before, module = dict(vars(ChunkStorageMetadata)), ChunkStorageMetadata.__module__
    names = (
        b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in (module, "ChunkStorageMetadata")) + b"\x93"
    )
    attack = b"\x80\x04" + names + b"N}\x8c\x06hacked\x4b\x01s\x86b."  # BUILD(class, (None, {"hacked": 1}))
    (tmp_path / ".metadata").write_bytes(attack)
    with pytest.raises(CheckpointError):
        read_metadata(tmp_path / ".metadata", [])
    assert dict(vars(ChunkStorageMetadata)) == before
    pickle.loads(attack)
    assert ChunkStorageMetadata.hacked == 1  # type: ignore[attr-defined]
    del ChunkStorageMetadata.hacked  # type: ignore[attr-defined]


def test_a_record_is_json_and_nothing_else(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    assert json.loads((folder / "record.json").read_text()) == {"value": 1.0}
    (folder / "record.json").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"record\.json: not JSON"):
        load(folder, targets())
    assert not (tmp_path / "ran").exists()
