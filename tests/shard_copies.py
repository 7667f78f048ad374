"""Copies of prepared shards in which a document holds something else."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from surefoot.config.data import DataConfig, Shards
from surefoot.config.run import RunConfig
from surefoot.data.prepared import PreparedData


def with_shards(config: RunConfig, data: PreparedData, folder: Path) -> RunConfig:
    """The config reading its own copy of the shards."""
    sources = []
    for source, prepared in zip(config.data.sources, data.sources, strict=True):
        copy = folder / source.name
        shutil.copytree(prepared.train.parent, copy)
        sources.append(dataclasses.replace(source, documents=Shards(path=str(copy))))
    new: DataConfig = dataclasses.replace(config.data, sources=tuple(sources))
    return dataclasses.replace(config, data=new)


def overwrite(source: Path, document: str, token: int | npt.NDArray[np.int64]) -> None:
    """Replace a document's tokens in place (by one, or by as many as it needs of several), its end excepted, and make the manifests agree;
    its id for life stays."""
    split = source / "train"
    manifest = json.loads((split / "manifest.json").read_text())
    hashes = np.fromfile(split / "documents.ids", dtype="<u8").tolist()
    if int(document, 16) not in hashes:
        return
    number = hashes.index(int(document, 16))
    lengths = np.fromfile(split / "tokens.idx", "<i4", len(hashes), offset=34)
    start = int(lengths[:number].sum())
    tokens = np.fromfile(split / "tokens.bin", dtype=manifest["dtype"])
    length = int(lengths[number]) - 1
    tokens[start : start + length] = token if isinstance(token, int) else token[:length]
    tokens.tofile(split / "tokens.bin")
    manifest["sha256"]["tokens.bin"] = hashlib.sha256((split / "tokens.bin").read_bytes()).hexdigest()
    (split / "manifest.json").write_text(json.dumps(manifest))
    sealed = json.loads((source / "manifest.json").read_text())
    sealed["splits"]["train"] = hashlib.sha256((split / "manifest.json").read_bytes()).hexdigest()
    (source / "manifest.json").write_text(json.dumps(sealed))
