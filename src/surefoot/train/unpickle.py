"""Reading a checkpoint's ``.metadata`` without running anything that is in it.

PyTorch's distributed checkpoint pickles its table of contents, and unpickling runs code of the writer's choice. Here a
name in the file can only stand for an inert record made for this one read, or for a dtype; the records are then checked
and the real table is built from plain numbers and strings. Anything else is refused.
"""

import math
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from surefoot.train.manifest import CheckpointError

_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    (_DCP + "metadata", "Metadata"),
    (_DCP + "metadata", "TensorStorageMetadata"),
    (_DCP + "metadata", "TensorProperties"),
    (_DCP + "metadata", "ChunkStorageMetadata"),
    (_DCP + "metadata", "MetadataIndex"),
    (_DCP + "metadata", "StorageMeta"),
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"),
    (_DCP + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _Record:
    """A named thing of the file: what it was made of, and the state it was given. Does nothing."""

    parts: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        # Fresh classes for every read: a hostile BUILD can change attributes of what find_class returns.
        self.kinds: dict[tuple[str, str], type[_Record]] = {key: type(key[1], (_Record,), {}) for key in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        kind = self.kinds.get((module, name))
        if kind is None:
            raise CheckpointError(f"names {module}.{name}, which a table of tensors has no use for; nothing was run")
        return kind

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError("refers to an object outside itself; nothing was run")


def read_metadata(path: Path, data_files: Collection[str]) -> Metadata:
    """The table of contents in ``path``: shape, dtype and chunks by name, and the file and bytes that hold each chunk.

    Raises CheckpointError when the file names anything but the parts of such a table, holds an item that is no tensor, or
    points to a file outside ``data_files``.
    """
    try:
        with path.open("rb") as stream:
            unpickler = _InertUnpickler(stream)
            root = unpickler.load()
        return _Rebuilder(unpickler.kinds, data_files).metadata(root)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{path}: not a table of tensors ({type(error).__name__}: {error})") from error


class _Rebuilder:
    """Turns the inert records of one file into PyTorch's own types, each field checked."""

    def __init__(self, kinds: dict[tuple[str, str], type[_Record]], data_files: Collection[str]) -> None:
        self.kinds = {name: kind for (_, name), kind in kinds.items()}
        self.data_files = data_files

    def metadata(self, root: Any) -> Metadata:
        fields = self._fields(root, "Metadata")
        tensors = {
            _text(name): self._tensor(_text(name), entry) for name, entry in fields["state_dict_metadata"].items()
        }
        storage = dict(self._stored(index, info, tensors) for index, info in fields["storage_data"].items())
        for name, tensor in tensors.items():
            for chunk in tensor.chunks:
                if MetadataIndex(name, chunk.offsets) not in storage:
                    raise CheckpointError(f"says no place for {name} at {list(chunk.offsets)}")
        return Metadata(dict(tensors), None, storage, StorageMeta(), _text(fields["version"]))

    def _fields(self, record: Any, kind: str) -> dict[str, Any]:
        if type(record) is not self.kinds[kind] or not isinstance(record.state, dict):
            raise CheckpointError(f"holds a {type(record).__name__} where a {kind} belongs")
        return record.state

    def _tensor(self, name: str, record: Any) -> TensorStorageMetadata:
        fields = self._fields(record, "TensorStorageMetadata")
        properties = fields["properties"]
        if type(properties) is not self.kinds["TensorProperties"]:
            raise CheckpointError(f"holds no properties of {name}")
        dtype, size = properties.state[0], self._size(fields["size"])
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"says dtype {dtype!r} of {name}")
        chunks = []
        for chunk in fields["chunks"]:
            parts = self._fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = self._size(parts["offsets"]), self._size(parts["sizes"])
            ends = zip(offsets, sizes, size, strict=True)
            if any(offset + length > whole for offset, length, whole in ends):
                raise CheckpointError(
                    f"has a chunk of {name} at {list(offsets)} of sizes {list(sizes)}, outside {list(size)}"
                )
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
        covered = sum(math.prod(chunk.sizes) for chunk in chunks)
        if covered != math.prod(size):
            raise CheckpointError(f"covers {covered} of the {math.prod(size)} elements of {name}")
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _stored(
        self, index: Any, info: Any, tensors: dict[str, TensorStorageMetadata]
    ) -> tuple[MetadataIndex, _StorageInfo]:
        where, place = self._fields(index, "MetadataIndex"), self._fields(info, "_StorageInfo")
        name, file = _text(where["fqn"]), _text(place["relative_path"])
        if name not in tensors:
            raise CheckpointError(f"places {name!r}, which is no tensor")
        if file not in self.data_files:
            raise CheckpointError(f"places {name} in {file!r}, which the manifest does not list")
        if place.get("transform_descriptors"):
            raise CheckpointError(
                f"stores {name} transformed by {place['transform_descriptors']}; only plain storage is read"
            )
        hint = None if where["index"] is None else _count(where["index"])
        return (
            MetadataIndex(name, self._size(where["offset"]), hint),
            _StorageInfo(file, _count(place["offset"]), _count(place["length"])),
        )

    def _size(self, record: Any) -> torch.Size:
        if type(record) is not self.kinds["Size"]:
            raise CheckpointError(f"holds a {type(record).__name__} where a size belongs")
        (numbers,) = record.parts
        return torch.Size([_count(number) for number in numbers])


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CheckpointError(f"holds a {type(value).__name__} where a name belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(f"holds {value!r} where a count belongs")
    return value
