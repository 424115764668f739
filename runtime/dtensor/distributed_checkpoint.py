"""Checkpoints of DTensors in any shard order, strided or not: planners for `torch.distributed.checkpoint`.

torch's own planners save a shard as one box, at the offset that its placements give in ascending order of mesh dims.
In general a shard is a product of lists of spans, one list per tensor dim, which depends on the shard order. Each box
of that product is saved as one chunk. The chunks tile the tensor, so any planner can load them into the layouts that it
supports.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _iterate_state_dict
from torch.distributed.tensor import DTensor

from ...errors import ArgumentError, UnsupportedError
from ...planner import held_spans, parts_of
from ..convert_specs import layout_of_spec
from .autograd import as_dtensor
from .local import is_in

_logger = logging.getLogger(__name__)
MANY_BOXES = 1024
"""Saving a shard of more boxes logs a warning."""


class SavePlanner(DefaultSavePlanner):
    """Saves DTensors of all layouts except partial ones: `dcp.save(state, checkpoint_id=…, planner=SavePlanner())`.

    Takes the arguments of torch's `DefaultSavePlanner` and behaves like it for everything except DTensors. A shard is
    written as one chunk per box of the global tensor: one, unless it is strided. Replicas are written once, and ranks
    outside the mesh write nothing. Each chunk is a separate record, which takes space and time in addition to its data;
    a shard of more than 1,024 boxes therefore logs a warning. Redistribute it to plain shards before saving.

    Raises, on every rank wrapped in `torch.distributed.checkpoint.CheckpointException`, before anything is written:
        UnsupportedError: a DTensor is partial, is sharded along a mesh dim whose ranks do not ascend, or has several
            boxes where safetensors are written; the text names its key.
        ArgumentError: the shape of a local tensor is not that of its shard.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        # torch asks the values of the state dict for their write items.
        self.state_dict = {**self.state_dict, **_shards_of(self.state_dict)}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        if isinstance(plan.storage_data, dict):  # torch's safetensors writer keeps one chunk per key and file
            counts = Counter(item.index.fqn for item in plan.items)
            if several := [fqn for fqn, count in counts.items() if count > 1]:
                raise UnsupportedError(
                    f"{several[0]}: this rank's shard has {counts[several[0]]} boxes, and safetensors files hold one; "
                    f"redistribute it to plain shards first"
                )
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict.get(index.fqn)
        return value.box_at(index) if isinstance(value, _Shard) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Loads DTensors of all layouts except partial ones: `dcp.load(state, checkpoint_id=…, planner=LoadPlanner())`.

    Takes the arguments of torch's `DefaultLoadPlanner` and behaves like it for everything except DTensors. The
    checkpoint may have been saved on another mesh, in another shard order, from a whole tensor, or by torch's planner.
    Each saved chunk that intersects a shard is read once: into a view of the local tensor, or into a buffer no larger
    than the chunk where the intersection has several boxes. DTensors on the meta device are allocated and keep their
    shard order.

    Raises, on every rank wrapped in `torch.distributed.checkpoint.CheckpointException`, before anything is read:
        UnsupportedError: a DTensor is partial, or is sharded along a mesh dim whose ranks do not ascend; the text names
            its key.
        ArgumentError: the shape of a local tensor is not that of its shard; the checkpoint lacks a part of the tensor.
        ValueError: the checkpoint has a tensor of another shape.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # Before torch does it, which would drop the shard order.
        _iterate_state_dict(state_dict, _materialize, _unchanged, _unchanged)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # Before torch's own plan, whose errors do not name the key.
        self._shards = _shards_of(self.state_dict)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        # torch has renamed the keys to those of the checkpoint, which depend on the version that wrote it.
        self._shards = _shards_of(self.state_dict)
        assert self.metadata is not None
        items = [i for i in plan.items if i.type is LoadItemType.BYTE_IO or i.dest_index.fqn not in self._shards]
        for fqn, shard in self._shards.items():
            saved = self.metadata.state_dict_metadata.get(fqn)
            if isinstance(saved, TensorStorageMetadata):
                items += shard.read_items(saved.chunks)
        return replace(plan, items=items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        shard = self._shards.get(read_item.dest_index.fqn)
        if shard is None:
            return super().resolve_tensor(read_item)
        parts = list(shard.parts(read_item))
        return parts[0][1] if len(parts) == 1 else shard.local.new_empty(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        shard = self._shards.get(read_item.dest_index.fqn)
        if shard is None:
            return super().commit_tensor(read_item, tensor)
        parts = list(shard.parts(read_item))
        if len(parts) > 1:
            for box, into in parts:
                into.copy_(_box_of(tensor, *box))


def checkpointable_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor as torch's CheckpointableTensor, which torch's own planners save and load (2.15).

    For state dicts that you hand to code that chooses the planner; otherwise use SavePlanner and LoadPlanner. The files
    are those of SavePlanner: a shard of several boxes, such as a strided one, is one chunk per box. Loading reads a
    saved chunk once for each box that it intersects.

    Args:
        tensor: of any layout except partial ones. Ranks outside of its mesh save and load nothing.

    Returns:
        A tensor that shares the memory of the local tensor, so that loading into it loads the DTensor, with the
        attributes `global_shape`, `global_offsets`, `local_offsets` and `local_sizes`. They belong to this object:
        views and copies of it, other than those that `async_save` makes, are plain tensors.

    Raises:
        UnsupportedError: this version of torch has no CheckpointableTensor; the DTensor is partial, or is sharded along
            a mesh dim whose ranks do not ascend.
        ArgumentError: not a DTensor, or one on the meta device; the local tensor lists its own chunks, or its shape is
            not that of its shard.
    """
    if not hasattr(torch.distributed.checkpoint, "CheckpointableTensor"):
        raise UnsupportedError(
            f"checkpointable_tensor: torch {torch.__version__} has no CheckpointableTensor; allowed: torch 2.15 or "
            "newer; SavePlanner and LoadPlanner save and load the DTensor itself on every version"
        )
    if not isinstance(tensor, DTensor):
        raise ArgumentError(f"tensor: a {type(tensor).__name__}; allowed: a DTensor")
    if tensor.device.type == "meta":
        raise ArgumentError("tensor: on the meta device; allowed: a DTensor with memory, such as after to_empty")
    if hasattr(tensor._local_tensor, "__create_chunk_list__"):
        kind = type(tensor._local_tensor).__name__
        raise ArgumentError(f"tensor: its local tensor, a {kind}, lists its own chunks; allowed: a plain local tensor")
    if is_in(tensor.device_mesh):
        shard = _Shard("tensor", tensor)
        shard.warn_of_many_boxes("tensor")
        local, boxes = shard.local, list(shard.boxes())
    else:
        local, boxes = tensor._local_tensor.detach(), []
    offsets, sizes, starts = zip(*boxes, strict=True) if boxes else ((), (), ())
    fields = {"global_offsets": offsets, "local_sizes": sizes, "local_offsets": starts}
    for name, value in ({"global_shape": tuple(tensor.shape)} | fields).items():
        setattr(local, name, value)
    return local


class _Shard:
    """This rank's shard of a DTensor.

    Attributes:
        spans: for each tensor dim the ascending global index ranges of the shard, [n, 2].
        offsets: for each tensor dim the local index at which each span starts, and the local size, [n + 1].
    """

    def __init__(self, fqn: str, tensor: DTensor) -> None:
        spec = tensor._spec
        try:
            layout = layout_of_spec(spec)
        except UnsupportedError as error:
            raise UnsupportedError(f"{fqn}: {error}") from None
        if layout.has_partial:
            raise UnsupportedError(f"{fqn}: {layout} is partial; redistribute it to shards or replicas first")
        coordinate = spec.mesh.get_coordinate()
        assert coordinate is not None
        local = tensor._local_tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        self.fqn, self.size, self.local = fqn, tensor.size(), local.detach()
        mesh_shape, at = tuple(spec.mesh.shape), tuple(coordinate)
        self.spans = [held_spans(n, parts_of(layout.cuts(d), mesh_shape, at)) for d, n in enumerate(self.size)]
        self.offsets = [_local_offsets(spans) for spans in self.spans]
        needed = tuple(int(offsets[-1]) for offsets in self.offsets)
        if tuple(local.shape) != needed:
            raise ArgumentError(
                f"{fqn}: the local tensor has shape {tuple(local.shape)}; layout {layout} of global shape "
                f"{tuple(self.size)} on mesh {mesh_shape} allows only {needed} at {at}"
            )

    def warn_of_many_boxes(self, fqn: str) -> None:
        count = math.prod(map(len, self.spans))
        if count > MANY_BOXES:
            _logger.warning(
                "%s: this rank's shard has %d boxes, each a separate record in the checkpoint; "
                "redistribute it to plain shards before saving",
                fqn,
                count,
            )

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        self.warn_of_many_boxes(fqn)
        properties = TensorProperties.create_from_tensor(self.local)
        items = []
        for offset, size, _start in self.boxes():
            # A tensor without elements is saved as a whole.
            chunk = ChunkStorageMetadata(torch.Size(offset), self.size if 0 in self.size else torch.Size(size))
            data = TensorWriteData(chunk, properties, self.size)
            items.append(WriteItem(index=MetadataIndex(fqn, offset), type=WriteItemType.SHARD, tensor_data=data))
        return items

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """The global offsets, the sizes and the local offsets of the boxes.

        A tensor without elements has one box, so that it is saved.
        """
        if 0 in self.size:
            yield (0,) * len(self.size), tuple(self.local.shape), (0,) * len(self.size)
            return
        dims = zip(self.spans, self.offsets, strict=True)
        along = [np.column_stack([spans, offsets[:-1]]).tolist() for spans, offsets in dims]
        for box in product(*along):
            sizes = tuple(high - low for low, high, _ in box)
            yield tuple(low for low, _, _ in box), sizes, tuple(at for _, _, at in box)

    def box_at(self, index: MetadataIndex) -> torch.Tensor:
        """The box at the global offset of a write item."""
        if 0 in self.size:
            return self.local.new_empty(self.size)
        assert index.offset is not None
        which = [int(np.searchsorted(spans[:, 0], at)) for spans, at in zip(self.spans, index.offset, strict=True)]
        starts = [int(offsets[i]) for offsets, i in zip(self.offsets, which, strict=True)]
        stops = [int(offsets[i + 1]) for offsets, i in zip(self.offsets, which, strict=True)]
        return _box_of(self.local, starts, [b - a for a, b in zip(starts, stops, strict=True)])

    def read_items(self, chunks: Sequence[ChunkStorageMetadata]) -> list[ReadItem]:
        """One read per saved chunk that intersects the shard: the bounding box of the intersection.

        `dest_index.offset` is the global offset of that box. There is one read per chunk because a storage reader may
        load the whole chunk for every read.
        """
        if not self.local.numel():
            return []
        shape = (len(chunks), len(self.size))
        starts = np.array([chunk.offsets for chunk in chunks], dtype=np.int64).reshape(shape)
        stops = starts + np.array([chunk.sizes for chunk in chunks], dtype=np.int64).reshape(shape)
        low, high, local = starts.copy(), stops.copy(), starts.copy()
        common = np.ones(len(chunks), dtype=np.int64)
        for d, (spans, offsets) in enumerate(zip(self.spans, self.offsets, strict=True)):
            i = np.searchsorted(spans[:, 1], starts[:, d], side="right")
            j = np.searchsorted(spans[:, 0], stops[:, d], side="left") - 1
            intersects = (i <= j) & (starts[:, d] < stops[:, d])
            i, j = np.where(intersects, i, 0), np.where(intersects, j, 0)
            low[:, d] = np.maximum(starts[:, d], spans[i, 0])
            high[:, d] = np.minimum(stops[:, d], spans[j, 1])
            local[:, d] = offsets[i] + low[:, d] - spans[i, 0]
            common *= np.where(intersects, offsets[j] + high[:, d] - spans[j, 0] - local[:, d], 0)
        if common.sum() < self.local.numel():
            raise ArgumentError(
                f"{self.fqn}: the checkpoint has {common.sum()} of the {self.local.numel()} elements of this rank's "
                f"shard"
            )
        return [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(self.fqn, low[n].tolist()),
                dest_offsets=torch.Size(local[n].tolist()),
                storage_index=MetadataIndex(self.fqn, chunks[n].offsets, n),
                storage_offsets=torch.Size((low[n] - starts[n]).tolist()),
                lengths=torch.Size((high[n] - low[n]).tolist()),
            )
            for n in np.flatnonzero(common).tolist()
        ]

    def parts(self, item: ReadItem) -> Iterator[tuple[tuple[list[int], list[int]], torch.Tensor]]:
        """The boxes of a read that belong to this shard: offsets and sizes in the read data, and their views of
        `local`."""
        assert item.dest_index.offset is not None
        along = []
        dims = zip(self.spans, self.offsets, item.dest_index.offset, item.lengths, strict=True)
        for spans, offsets, low, length in dims:
            i = int(np.searchsorted(spans[:, 1], low, side="right"))
            j = int(np.searchsorted(spans[:, 0], low + length, side="left"))
            start, stop = np.maximum(spans[i:j, 0], low), np.minimum(spans[i:j, 1], low + length)
            table = np.stack([start - low, offsets[i:j] + start - spans[i:j, 0], stop - start], axis=1)
            along.append(table.tolist())
        for box in product(*along):
            sizes = [size for _, _, size in box]
            yield ([at for at, _, _ in box], sizes), _box_of(self.local, [at for _, at, _ in box], sizes)


def _local_offsets(spans: np.ndarray) -> np.ndarray:
    """The local index at which each span starts, and at which the last one ends."""
    return np.concatenate([[0], (spans[:, 1] - spans[:, 0]).cumsum()])


def _shards_of(state_dict: dict[str, Any]) -> dict[str, _Shard]:
    """The shards of the DTensors whose mesh contains this rank, except those whose local tensor lists its own
    chunks."""
    return {
        fqn: _Shard(fqn, value)
        for fqn, value in state_dict.items()
        if isinstance(value, DTensor)
        and is_in(value.device_mesh)
        and not hasattr(value._local_tensor, "__create_chunk_list__")
    }


def _box_of(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for d, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size < tensor.size(d):
            tensor = tensor.narrow(d, start, size)
    return tensor


def _materialize(tensor: DTensor) -> DTensor:
    if tensor.device.type != "meta":
        return tensor
    local = torch.empty_like(tensor._local_tensor, device=tensor.device_mesh.device_type)
    return as_dtensor(local.detach(), tensor._spec, tensor.requires_grad)


def _unchanged(value: Any) -> Any:
    return value
