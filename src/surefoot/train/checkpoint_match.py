"""What a fork takes from a checkpoint whose model or optimiser is not quite its own; and a record without its tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from surefoot.train import manifest as manifests
from surefoot.train.checkpoint import verify
from surefoot.train.checkpoint_io import TensorPlanner, VerifiedReader
from surefoot.train.manifest import METADATA, RECORD, CheckpointError
from surefoot.train.unpickle import read_metadata


def read_record(folder: Path) -> dict[str, Any]:
    """What a checkpoint recorded besides its tensors. Raises CheckpointError when it is not whole."""
    manifest = manifests.read_manifest(folder)
    if problems := manifests.check_files(folder, manifest, [RECORD]):
        raise CheckpointError(problems[0])
    record: dict[str, Any] = json.loads((folder / RECORD).read_bytes())
    return record


def load_matching(
    folder: Path, tensors: Mapping[str, Tensor], *, group: Any = None
) -> tuple[dict[str, Any], list[str]]:
    """Fill, in place, the tensors that a checkpoint has by the same name and shape; returns its record and the names it has not.

    Verified like any load; a dtype that differs is refused. All ranks call it. Raises CheckpointError.
    """
    if problems := verify(folder, group=group):
        raise CheckpointError("\n".join(problems))
    manifest = manifests.read_manifest(folder)
    metadata = read_metadata(folder / METADATA, manifest.files.keys() - {RECORD, METADATA})
    shared: dict[str, Tensor] = {}
    missing: list[str] = []
    for name, tensor in sorted(tensors.items()):
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.shape:
            missing.append(name)
        elif entry.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{folder}: {name} is {entry.properties.dtype} in the checkpoint and {tensor.dtype} here; "
                "fork with the precision of the parent's masters"
            )
        else:
            shared[name] = tensor
    _load_state_dict(
        state_dict=dict(shared),
        storage_reader=VerifiedReader(folder, metadata),
        process_group=group,
        no_dist=not dist.is_initialized(),
        planner=TensorPlanner(),
    )
    return read_record(folder), missing
