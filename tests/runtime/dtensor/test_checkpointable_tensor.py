"""Real ranks: DTensors as torch's CheckpointableTensor, saved and loaded by torch's planners and by shardweave's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import run_ranks
from test_checkpoint import (
    DTYPES,
    REVERSED,
    SHAPES,
    STRIDED,
    by_view,
    chunks_of,
    cut,
    dtensor_of,
    is_right,
    meshes_of_all_kinds,
    plain,
    poisoned,
    random_layout,
    whole,
    words,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardweave.checkpoint import LoadPlanner, SavePlanner, checkpointable_tensor
from shardweave.errors import ArgumentError, UnsupportedError

needs_protocol = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="torch has no CheckpointableTensor before 2.15"
)
SIZES = [*SHAPES, (3, 0), (4, 0, 5)]


def names_of_fields() -> tuple[str, ...]:
    return "global_shape", "global_offsets", "local_offsets", "local_sizes"


@pytest.fixture
def with_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """What older versions of torch need for the fields to be computed."""
    monkeypatch.setattr(dcp, "CheckpointableTensor", object, raising=False)


@pytest.mark.plan
def test_fields_equal_brute_force(with_protocol: None) -> None:
    """The boxes tile the elements that a rank holds, and name each element's place in the local tensor."""
    random, several = Random(3), 0
    for _ in range(800):
        shape = random.choice(SIZES)
        ranks = torch.arange(4).reshape(random.choice([(4,), (2, 2), (1, 4)]))
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=random.randrange(4))
        x = torch.arange(torch.Size(shape).numel()).reshape(shape)
        layout = random_layout(random, mesh, len(shape)) if shape else plain(*[Replicate()] * mesh.ndim)
        expected = cut(x, mesh, layout)
        local = checkpointable_tensor(dtensor_of(x, mesh, layout))
        assert local.global_shape == shape and local.equal(expected)
        found = torch.full_like(expected, -1)
        boxes = list(zip(local.global_offsets, local.local_offsets, local.local_sizes, strict=True))
        for at, start, size in boxes:
            part = found[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
            assert part.shape == torch.Size(size) and (part == -1).all()
            part.copy_(x[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))])
        assert found.equal(expected), (layout, boxes)
        assert len(set(local.global_offsets)) == len(boxes) and (boxes or not expected.numel())
        several += len(boxes) > 1
    assert several > 30


@pytest.mark.plan
def test_shares_memory_and_leaves_the_dtensor_alone(with_protocol: None) -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=1)
    x = whole((5, 3), torch.float32)
    parameter = torch.nn.Parameter(dtensor_of(x, mesh, plain(Shard(0))))
    local = checkpointable_tensor(parameter)
    assert not local.requires_grad and local.data_ptr() == parameter.to_local().data_ptr()
    local.fill_(7)
    assert (parameter.to_local() == 7).all()
    assert not any(hasattr(parameter._local_tensor, name) for name in names_of_fields())


@pytest.mark.plan
def test_versions_without_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dcp, "CheckpointableTensor", raising=False)
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    tensor = dtensor_of(whole((3,), torch.float32), mesh, plain(Shard(0)))
    with pytest.raises(UnsupportedError, match="has no CheckpointableTensor; allowed: torch 2.15 or newer"):
        checkpointable_tensor(tensor)


@pytest.mark.plan
def test_unsupported_tensors_raise(with_protocol: None) -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=1)
    x = whole((5, 3), torch.float32)
    for wrong in (x, None):
        with pytest.raises(ArgumentError, match="tensor: a (Tensor|NoneType); allowed: a DTensor"):
            checkpointable_tensor(wrong)
    for tensor, error, text in (
        (dtensor_of(x, mesh, plain(Partial())), UnsupportedError, "tensor: P is partial; redistribute it"),
        (dtensor_of(x, mesh, plain(Shard(0)), x.to("meta")), ArgumentError, "tensor: on the meta device"),
        (dtensor_of(x, mesh, plain(Shard(0)), x), ArgumentError, r"tensor: the local tensor has shape \(5, 3\)"),
    ):
        with pytest.raises(error, match=text):
            checkpointable_tensor(tensor)
    listing = dtensor_of(x, mesh, plain(Shard(0)))
    listing._local_tensor.__create_chunk_list__ = list  # as torchrec's local shards do
    with pytest.raises(ArgumentError, match="tensor: its local tensor, a Tensor, lists its own chunks"):
        checkpointable_tensor(listing)


# Saved and loaded.

WAYS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[DTensor], Any]]] = {
    "torch": (dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner, lambda x: checkpointable_tensor(x)),
    "both": (
        SavePlanner,
        LoadPlanner,
        lambda x: checkpointable_tensor(x),
    ),
    "shardweave": (SavePlanner, LoadPlanner, lambda x: x),
}
"""Planners, and the form in which a state dict holds a DTensor."""


def any_to_any(rank: int, base: str) -> int:
    meshes, random, done = list(meshes_of_all_kinds().values()), Random(17), 0
    tensors, saved = {}, {}
    for number in range(40):
        x, mesh = whole(random.choice(SIZES), random.choice(DTYPES)), random.choice(meshes)
        tensors[f"t{number}"] = x
        saved[f"t{number}"] = dtensor_of(x, mesh, random_layout(random, mesh, x.ndim) if x.ndim else plain(
            *[Replicate()] * mesh.ndim))  # fmt: skip
    for way, (planner, _, form) in WAYS.items():
        state = {name: form(x) for name, x in saved.items()}
        dcp.save(state, checkpoint_id=f"{base}/{way}", planner=planner())
    for way in WAYS:
        for loaded, (_, planner, form) in WAYS.items():
            targets = {}
            for name, x in tensors.items():
                mesh = random.choice(meshes)
                layout = random_layout(random, mesh, x.ndim) if x.ndim else plain(*[Replicate()] * mesh.ndim)
                targets[name] = (mesh, layout)
            state = {name: poisoned(tensors[name], *targets[name], random.random() < 0.3) for name in tensors}
            dcp.load({name: form(x) for name, x in state.items()}, checkpoint_id=f"{base}/{way}", planner=planner())
            for name, x in tensors.items():
                assert is_right(state[name], x, *targets[name]), (rank, way, loaded, saved[name], targets[name])
                done += 1
    return done


@needs_protocol
@pytest.mark.multi
def test_save_and_load_in_any_layout(tmp_path: Path) -> None:
    assert run_ranks(any_to_any, 4, str(tmp_path)) == [360] * 4


def same_chunks(rank: int, base: str) -> None:
    mesh, pair = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [1, 3])
    x = whole((16, 3), torch.float32)
    cases = [
        (mesh, plain(Replicate(), Replicate())),
        (mesh, plain(Shard(0), Replicate())),
        (mesh, REVERSED),
        (mesh, STRIDED),
        (mesh, by_view(Shard(1), _StridedShard(0, split_factor=3))),
        (pair, plain(Shard(0))),
    ]
    for number, (on, layout) in enumerate(cases):
        given = dtensor_of(x, on, layout)
        for name, (planner, _, form) in WAYS.items():
            dcp.save({"w": form(given)}, checkpoint_id=f"{base}/{number}{name}", planner=planner())
        chunks = [chunks_of(f"{base}/{number}{name}") for name in WAYS]
        assert chunks[0] == chunks[1] == chunks[2], (layout, chunks)
    # What async_save saves is a copy.
    given = dtensor_of(x, mesh, STRIDED)
    future = dcp.async_save({"w": checkpointable_tensor(given)}, checkpoint_id=f"{base}/async")
    future.result()
    into = poisoned(x, mesh, REVERSED)
    dcp.load({"w": into}, checkpoint_id=f"{base}/async", planner=LoadPlanner())
    assert is_right(into, x, mesh, REVERSED)
    # Nested, and beside DTensors.
    state = {"model": {"w": checkpointable_tensor(given), "d": given}, "step": 3}
    dcp.save(state, checkpoint_id=f"{base}/nested", planner=SavePlanner())
    into, other = poisoned(x, pair, plain(Shard(1))), poisoned(x, mesh, REVERSED)
    state = {"model": {"w": checkpointable_tensor(into), "d": other}, "step": 0}
    dcp.load(state, checkpoint_id=f"{base}/nested", planner=LoadPlanner())
    assert is_right(into, x, pair, plain(Shard(1))) and is_right(other, x, mesh, REVERSED) and state["step"] == 3
    assert words(given.to_local()).equal(words(cut(x, mesh, STRIDED)))
    dist.barrier()


@needs_protocol
@pytest.mark.multi
def test_chunks_are_those_of_save_planner(tmp_path: Path) -> None:
    run_ranks(same_chunks, 4, str(tmp_path))
