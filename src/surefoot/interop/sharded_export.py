"""A checkpoint as a model folder of Hugging Face transformers, one tensor in memory at a time, however many ranks wrote it.

    export_checkpoint(run_folder / "checkpoints" / name, config, target)

Safetensors files are written as they are read: their header says shape and place of every tensor, and both are known from the checkpoint's
table of contents before the first byte is.
"""

import json
import math
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefoot.config.run import RunConfig
from surefoot.interop.huggingface import HuggingFaceError, folding, to_config, to_name
from surefoot.train.checkpoint_match import Source, open_source

WEIGHTS = "weights/"
"""How a checkpoint's names of weights begin; moments have other beginnings."""
SHARD_GIB = 5.0
"""Weights of one file, as transformers itself cuts them."""
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    files: tuple[str, ...]
    num_parameters: int
    num_bytes: int
    """Of weights."""


@dataclass(frozen=True)
class _Weight:
    """One tensor of the exported model."""

    name: str
    """As transformers calls it."""
    source: str
    """As the checkpoint calls it."""
    scale: float
    """What the forward multiplied by, to be part of the weight from now on."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_checkpoint(
    checkpoint: Path,
    config: RunConfig,
    target: Path,
    *,
    tokenizer: Path | None = None,
    shard_gib: float = SHARD_GIB,
    verified: bool = False,
) -> Exported:
    """Write the weights of a checkpoint into the new folder ``target``: config.json, safetensors files of at most ``shard_gib`` (or of one tensor
    that is larger), their index where there are several, and a copy of ``tokenizer``.

    What the forward multiplies by is folded into the weights. The folder is there when all of it is. ``verified``: the caller has compared the
    hashes. Raises CheckpointError for a damaged checkpoint, HuggingFaceError for a model that transformers has no family for, and where
    ``target`` exists.
    """
    if target.exists():
        raise HuggingFaceError(f"{target} exists; give a folder that is not there yet")
    source = open_source(checkpoint, verified=verified)
    weights = list(_weights(source, config))
    shards = _shards(weights, int(shard_gib * 1024**3))
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    names = _file_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        _write_shard(partial / name, shard, source)
    total = sum(weight.num_bytes for weight in weights)
    if len(shards) > 1:
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(partial / "model.safetensors.index.json", index)
    _write_json(partial / "config.json", to_config(config.model, max_positions=config.data.seq_len))
    if tokenizer is not None:
        shutil.copyfile(tokenizer, partial / "tokenizer.json")
    partial.rename(target)
    return Exported(target, names, sum(math.prod(weight.shape) for weight in weights), total)


def _weights(source: Source, config: RunConfig) -> Iterator[_Weight]:
    """The tensors of the exported model, in the order in which a forward meets them."""
    held = source.shapes()
    ours = [name.removeprefix(WEIGHTS) for name in held if name.startswith(WEIGHTS)]
    for name, (origin, scale) in sorted(folding(ours, config.model)[1].items(), key=lambda item: _place(item[0])):
        dtype = source.dtype(WEIGHTS + origin)
        if dtype not in _DTYPES:
            raise HuggingFaceError(f"{origin} is {dtype}; exported are {', '.join(map(str, _DTYPES))}")
        yield _Weight(to_name(name), WEIGHTS + origin, scale, held[WEIGHTS + origin], dtype)


def _place(name: str) -> tuple[int, int, str]:
    """Embedding, blocks by number, then what comes after them."""
    block = re.match(r"blocks\.(\d+)\.", name)
    part = 0 if name.startswith("embedding") else 1 if block else 2
    return part, int(block[1]) if block else 0, name


def _shards(weights: Sequence[_Weight], most: int) -> list[list[_Weight]]:
    """The weights in their order, as many to a file as go into ``most`` bytes."""
    shards: list[list[_Weight]] = [[]]
    for weight in weights:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + weight.num_bytes > most:
            shards.append([])
        shards[-1].append(weight)
    return shards


def _file_names(count: int) -> tuple[str, ...]:
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))


def _write_shard(path: Path, weights: Sequence[_Weight], source: Source) -> None:
    """A safetensors file: length of the header, the header, and the bytes of one tensor after the other as they are read."""
    with path.open("wb") as stream:
        header = _header(weights)
        stream.write(struct.pack("<Q", len(header)) + header)
        for weight in weights:
            tensor = _read(weight, source)
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor


def _header(weights: Sequence[_Weight]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        places = [offset, offset + weight.num_bytes]
        entries[weight.name] = {
            "dtype": _DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": places,
        }
        offset = places[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _read(weight: _Weight, source: Source) -> Tensor:
    tensor = torch.empty(weight.shape, dtype=weight.dtype)
    source.fill({weight.source: tensor})
    return tensor if weight.scale == 1.0 else tensor.mul_(weight.scale)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
