"""Who writes and who reads which part of which tensor: boxes of the whole, whatever the layouts of those who save and those who load."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from surefoot.parallel.boxes import box_of
from surefoot.train.manifest import CheckpointError
from surefoot.train.staging import Piece


class PiecePlanner(DefaultSavePlanner):
    """Plans the writing of staged pieces; a piece that several ranks hold is written by one of them, the work spread over them.

    One piece is one box of the whole: pieces of one name with other sizes at the same place, or of another whole, are refused.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        pieces = cast(Mapping[str, Piece], self.state_dict)
        self.plan = SavePlan([_write_item(name, piece) for name, piece in pieces.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if problems := contradictions(all_plans):
            raise CheckpointError("\n".join(problems))
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return cast(Piece, self.state_dict[write_item.index.fqn]).content


def contradictions(plans: Sequence[SavePlan]) -> list[str]:
    """Sentences about tensors of one name that cannot be parts of one tensor, by the rank that first says otherwise."""
    wholes: dict[str, tuple[tuple[Any, ...], int]] = {}
    boxes: dict[MetadataIndex, tuple[torch.Size, int]] = {}
    found: dict[str, str] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, name = cast(TensorWriteData, item.tensor_data), item.index.fqn
            whole = (list(data.size), data.properties.dtype)
            first, holder = wholes.setdefault(name, (whole, rank))
            if whole != first:
                text = f"{name} is {first[1]} {first[0]} on rank {holder}, but {whole[1]} {whole[0]} on rank {rank}"
                found.setdefault(name, f"{text}: one name is one tensor")
                continue
            sizes, holder = boxes.setdefault(item.index, (data.chunk.sizes, rank))
            if sizes != data.chunk.sizes:
                at = f"{name} at {list(data.chunk.offsets)}"
                text = f"{at} is {list(sizes)} on rank {holder}, but {list(data.chunk.sizes)} on rank {rank}"
                found.setdefault(name, f"{text}: pieces must be the same box, or lie apart")
    return list(found.values())


def _write_item(name: str, piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=piece.offsets, sizes=piece.content.shape)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=piece.content.dtype), size=piece.shape)
    return WriteItem(index=MetadataIndex(name, piece.offsets), type=WriteItemType.SHARD, tensor_data=data)


class TensorPlanner(DefaultLoadPlanner):
    """Plans the reading of what this rank holds of tensors, and of nothing else."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        saved = cast(Metadata, self.metadata).state_dict_metadata
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
                continue
            # by our own arithmetic: PyTorch's knows only some of the ways in which two axes cut one dim
            box = box_of(tensor)
            if box.numel:
                chunk = ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
                items += create_read_items_for_chunk_list(name, cast(TensorStorageMetadata, saved[name]), [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor = self.state_dict[index.fqn]
        return tensor.to_local() if isinstance(tensor, DTensor) else cast(Tensor, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> NoReturn:
        raise CheckpointError(f"{read_item.dest_index.fqn}: holds pickled bytes; only tensors are read")


def misfits(metadata: Metadata, tensors: Mapping[str, Tensor]) -> list[str]:
    """Which of these tensors are not what a checkpoint has by their names."""
    saved = metadata.state_dict_metadata
    found: list[str] = []
    for name in sorted(saved.keys() & tensors.keys()):
        entry, tensor = cast(TensorStorageMetadata, saved[name]), tensors[name]
        if entry.size != tensor.shape:
            found.append(f"{name}: shape {list(entry.size)} in the checkpoint, {list(tensor.shape)} here")
        if entry.properties.dtype != tensor.dtype:
            found.append(f"{name}: dtype {entry.properties.dtype} in the checkpoint, {tensor.dtype} here")
        if tensor.is_meta:
            found.append(f"{name}: on meta here; give it memory (to_empty) before loading")
    return found
