"""Real ranks: DTensors saved by torch.distributed.checkpoint on one mesh and order, loaded on others."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardweave.checkpoint import LoadPlanner, SavePlanner
from shardweave.errors import ArgumentError, UnsupportedError

pytestmark = pytest.mark.multi
SHAPES = [(), (1,), (3,), (24,), (0, 3), (9, 7), (16, 6), (5, 2, 11), (2, 3, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint16, torch.complex64, torch.float8_e4m3fn]


@dataclass(frozen=True)
class LayoutCase:
    """A layout: placements, cuts in order as (mesh dim, tensor dim, split), and whether a view made it."""

    placements: tuple[Placement, ...]
    cuts: tuple[tuple[int, int, int], ...] = ()
    view: bool = False


def plain(*placements: Placement) -> LayoutCase:
    """The default order: mesh dims cut from left to right, by torch.chunk."""
    cuts = tuple((m, p.dim, 1) for m, p in enumerate(placements) if isinstance(p, Shard))
    return LayoutCase(placements, cuts)


def ordered(layout: LayoutCase, *mesh_dims: int) -> LayoutCase:
    return LayoutCase(layout.placements, tuple(sorted(layout.cuts, key=lambda c: mesh_dims.index(c[0]))))


def by_view(*placements: Placement) -> LayoutCase:
    cuts = [(m, p.dim, getattr(p, "split_factor", 1)) for m, p in enumerate(placements) if not p.is_replicate()]
    return LayoutCase(placements, tuple(cuts), view=True)


REVERSED = ordered(plain(Shard(0), Shard(0)), 1, 0)
STRIDED = by_view(Replicate(), _StridedShard(0, split_factor=4))
TORCH_SPELLING = LayoutCase((_StridedShard(0, split_factor=2), Shard(0)), REVERSED.cuts)
"""The reversed order as torch spells it for FSDP2 over tensor parallelism, on two mesh dims of 2."""


def random_layout(random: Random, mesh: DeviceMesh, ndim: int, stock: bool = False) -> LayoutCase:
    """A random layout; `stock`: one that torch's planners support."""
    chosen = [random.randrange(-1, ndim) for _ in range(mesh.ndim)]
    placements = [Replicate() if d < 0 else Shard(d) for d in chosen]
    kind = 0 if stock else random.randrange(4)
    if kind == 3:
        splits = [random.choice((0, 2, 3, 5)) for _ in chosen]
        pairs = zip(placements, splits, strict=True)
        return by_view(*[_StridedShard(p.dim, split_factor=f) if f and p.is_shard() else p for p, f in pairs])
    order = list(range(mesh.ndim))
    if kind:
        random.shuffle(order)
    return ordered(plain(*placements), *order)


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Distinct values as far as the dtype allows, none of them zero except for bool."""
    values = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return (values % 3 == 1 if dtype == torch.bool else values).to(dtype)


def cut(x: torch.Tensor, mesh: DeviceMesh, layout: LayoutCase) -> torch.Tensor:
    """This rank's shard; empty outside the mesh. Made from bytes, since not every dtype supports `torch.cat`."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return x.new_empty(0)
    index = torch.arange(x.numel()).reshape(x.shape)
    for mesh_dim, d, split in layout.cuts:
        taken = []
        for piece in index.chunk(split, d):
            chunks = piece.chunk(mesh.size(mesh_dim), d)
            at = coordinate[mesh_dim]
            taken.append(chunks[at] if at < len(chunks) else piece.narrow(d, 0, 0))
        index = torch.cat(taken, d)
    return words(x)[index.reshape(-1)].reshape(-1).view(x.dtype).reshape(index.shape)


def words(x: torch.Tensor) -> torch.Tensor:
    """[elements, bytes]"""
    return x.clone(memory_format=torch.contiguous_format).view(-1, 1).view(torch.uint8)


def dtensor_of(x: torch.Tensor, mesh: DeviceMesh, layout: LayoutCase, local: torch.Tensor | None = None) -> DTensor:
    options: dict[str, Any] = {}
    if layout.view:
        options["use_strided_shard_as_shard_order"] = False
    elif not any(isinstance(p, _StridedShard) for p in layout.placements):
        dims = sorted({d for _, d, _ in layout.cuts})
        options["shard_order"] = tuple(ShardOrderEntry(d, tuple(m for m, e, _ in layout.cuts if e == d)) for d in dims)
    spec = DTensorSpec(mesh, layout.placements, TensorMeta(x.shape, x.stride(), x.dtype), **options)
    return DTensor(cut(x, mesh, layout) if local is None else local, spec, requires_grad=False)


def poisoned(x: torch.Tensor, mesh: DeviceMesh, layout: LayoutCase, sparse: bool = False) -> DTensor:
    """A DTensor in which every element is wrong; `sparse`: with strides of two elements."""
    expected = cut(x, mesh, layout)
    local = expected.new_empty((*expected.shape, 2))[..., 0] if sparse else torch.empty_like(expected)
    local.copy_(~expected if x.dtype == torch.bool else torch.zeros_like(expected))
    return dtensor_of(x, mesh, layout, local)


def is_right(y: DTensor | torch.Tensor, x: torch.Tensor, mesh: DeviceMesh, layout: LayoutCase) -> bool:
    local, expected = (y._local_tensor if isinstance(y, DTensor) else y), cut(x, mesh, layout)
    outside = mesh.get_coordinate() is None
    return outside or (local.shape == expected.shape and words(local).equal(words(expected)))


def meshes_of_all_kinds() -> dict[str, DeviceMesh]:
    """Collective, since meshes make process groups."""
    return {
        "2x2": init_device_mesh("cpu", (2, 2)),
        "4": init_device_mesh("cpu", (4,)),
        "1x4": init_device_mesh("cpu", (1, 4)),
        "1,3": DeviceMesh("cpu", [1, 3]),
        "0,2 1,3": DeviceMesh("cpu", [[0, 2], [1, 3]]),
        "0": DeviceMesh("cpu", [0]),
    }


def refusal(action: Callable[..., Any], state: dict[str, Any], path: str, planner: Any) -> str:
    """The exception of rank 0 inside torch's CheckpointException; 'nothing' without one."""
    try:
        action(state, checkpoint_id=path, planner=planner)
    except CheckpointException as error:
        inner = error.failures.get(0, next(iter(error.failures.values())))[0]
        return f"{type(inner).__name__}: {inner}"
    return "nothing"


def from_any_to_any(rank: int, base: str) -> int:
    meshes, random, done = list(meshes_of_all_kinds().values()), Random(7), 0
    for trial in range(2):
        tensors, saved = {}, {}
        for number in range(50):
            x, mesh = whole(random.choice(SHAPES), random.choice(DTYPES)), random.choice(meshes)
            layout = random_layout(random, mesh, x.ndim)
            local = cut(x, mesh, layout)
            if random.random() < 0.3 and local.ndim == 2:
                local = local.t().contiguous().t()
            tensors[f"t{number}"], saved[f"t{number}"] = x, dtensor_of(x, mesh, layout, local)
        path = f"{base}/{trial}"
        dcp.save(saved, checkpoint_id=path, planner=SavePlanner())
        for _ in range(2):
            targets = {}
            for name, x in tensors.items():
                mesh = random.choice(meshes)
                targets[name] = (mesh, random_layout(random, mesh, x.ndim))
            sparse = {name: random.random() < 0.3 for name in tensors}
            state = {name: poisoned(tensors[name], *targets[name], sparse[name]) for name in tensors}
            dcp.load(state, checkpoint_id=path, planner=LoadPlanner())
            for name, x in tensors.items():
                assert is_right(state[name], x, *targets[name]), (rank, saved[name], targets[name])
                done += 1
    return done


def test_save_and_load_in_any_layout(tmp_path: Path) -> None:
    assert run_ranks(from_any_to_any, 4, str(tmp_path)) == [200] * 4


def with_torchs_planners(rank: int, base: str) -> int:
    meshes, random, done = list(meshes_of_all_kinds().values()), Random(11), 0
    for ours_saves in (True, False):
        saver = SavePlanner() if ours_saves else dcp.DefaultSavePlanner()
        loader = dcp.DefaultLoadPlanner() if ours_saves else LoadPlanner()
        tensors, saved = {}, {}
        for number in range(50):
            x, mesh = whole(random.choice(SHAPES), random.choice(DTYPES)), random.choice(meshes)
            tensors[f"t{number}"] = x
            saved[f"t{number}"] = (
                x if number % 9 == 0 else dtensor_of(x, mesh, random_layout(random, mesh, x.ndim, not ours_saves))
            )
        path = f"{base}/{ours_saves}"
        dcp.save(saved, checkpoint_id=path, planner=saver)
        state, targets = {}, {}
        for number, (name, x) in enumerate(tensors.items()):
            mesh = random.choice(meshes)
            targets[name] = (mesh, random_layout(random, mesh, x.ndim, stock=ours_saves))
            state[name] = poisoned(x, *targets[name])
            if number % 7 == 0:
                targets[name] = (meshes[1], plain(Replicate()))
                state[name] = ~x if x.dtype == torch.bool else torch.zeros_like(x)
        dcp.load(state, checkpoint_id=path, planner=loader)
        for name, x in tensors.items():
            assert is_right(state[name], x, *targets[name]), (rank, ours_saves, saved[name], targets[name])
            done += 1
    return done


def test_torch_planners_read_and_write_the_same_checkpoints(tmp_path: Path) -> None:
    assert run_ranks(with_torchs_planners, 4, str(tmp_path)) == [100] * 4


def torchs_mistakes(rank: int, base: str) -> list[Any]:
    """Whether torch's planners, then shardweave's, load layouts correctly that torch's do not support."""
    mesh, x, found = init_device_mesh("cpu", (2, 2)), whole((16, 3), torch.float32), []
    for ours in (False, True):
        saver = SavePlanner if ours else dcp.DefaultSavePlanner
        loader = LoadPlanner if ours else dcp.DefaultLoadPlanner
        for name, layout in (("order", REVERSED), ("strided", STRIDED), ("torch's order", TORCH_SPELLING)):
            path, state = f"{base}/{ours}{name}", {"w": torch.zeros_like(x)}
            given = {"w": dtensor_of(x, mesh, layout)}
            refused = refusal(dcp.save, given, path, saver())
            if refused == "nothing":
                dcp.load(state, checkpoint_id=path)
            found.append(refused.partition(":")[0] if refused != "nothing" else state["w"].equal(x))
            dcp.save({"w": x}, checkpoint_id=path + "whole")
            into = poisoned(x, mesh, layout)
            dcp.load({"w": into}, checkpoint_id=path + "whole", planner=loader())
            right = [None] * 4
            dist.all_gather_object(right, is_right(into, x, mesh, layout))
            found.append(all(right))
    return found


def test_shard_orders_that_torch_planners_get_wrong(tmp_path: Path) -> None:
    """If the part about torch fails, torch supports the layout: check which parts of these planners are still
    needed."""
    for found in run_ranks(torchs_mistakes, 4, str(tmp_path)):
        assert found[:6] == [False, False, "ValueError", False, True, True]
        assert found[6:] == [True] * 6


class Counting(LoadPlanner):
    reads = 0

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.reads += 1
        return super().resolve_tensor(read_item)


def chunks_of(path: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["w"]
    return sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks)


def chunks(rank: int, base: str) -> None:
    mesh, pair, x = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [1, 3]), whole((16, 3), torch.float32)
    halves, quarters, eighths = ([((i, 0), (n, 3)) for i in range(0, 16, n)] for n in (8, 4, 2))
    cases = [
        (mesh, plain(Replicate(), Replicate()), [((0, 0), (16, 3))]),
        (mesh, plain(Shard(0), Replicate()), halves),
        (mesh, REVERSED, quarters),
        (mesh, TORCH_SPELLING, quarters),
        (mesh, STRIDED, eighths),  # four spans of two rows per rank, saved once although two ranks hold each
        (mesh, by_view(_StridedShard(0, split_factor=2), Shard(0)), quarters),
        (pair, plain(Shard(0)), halves),
    ]
    for number, (on, layout, expected) in enumerate(cases):
        path, state = f"{base}/{number}", {"w": dtensor_of(x, on, layout)}
        # Twice: the second time with the cached plan.
        for _ in range(2):
            dcp.save(state, checkpoint_id=path, planner=SavePlanner(enable_plan_caching=True))
            assert chunks_of(path) == expected, (layout, chunks_of(path))
        count = 0 if on.get_coordinate() is None else len(expected)
        into, planner = poisoned(x, mesh, STRIDED), Counting()
        dcp.load({"w": into}, checkpoint_id=path, planner=planner)
        assert is_right(into, x, mesh, STRIDED)
        # Each chunk is read once, even where it intersects several spans.
        assert planner.reads == (4 if expected is eighths else len(expected)), (layout, planner.reads)
        into, planner = poisoned(x, on, layout), Counting()
        dcp.load({"w": into}, checkpoint_id=path, planner=planner)
        assert is_right(into, x, on, layout) and planner.reads <= count


def test_one_chunk_per_box_and_one_read_per_chunk(tmp_path: Path) -> None:
    run_ranks(chunks, 4, str(tmp_path))


def refusals(rank: int, base: str) -> None:
    mesh, x = init_device_mesh("cpu", (2, 2)), whole((4, 6), torch.float32)
    for op in ("sum", "max"):
        layout = LayoutCase((Partial(op), Shard(0)), ((1, 0, 1),))
        state = {"layer": {"good": dtensor_of(x, mesh, REVERSED), "odd": dtensor_of(x, mesh, layout)}}
        path = f"{base}/{op}"
        message = refusal(dcp.save, state, path, SavePlanner())
        assert message.startswith(f"{UnsupportedError.__name__}: layer.odd: P") and "redistribute" in message, message
        assert not list(Path(path).glob("*"))
        dcp.save({"layer": {"good": x, "odd": x}}, checkpoint_id=path)
        message = refusal(dcp.load, state, path, LoadPlanner())
        assert message.startswith(f"{UnsupportedError.__name__}: layer.odd: P"), message

    writer = dcp.HuggingFaceStorageWriter(f"{base}/safetensors", save_distributed=True)
    with pytest.raises(CheckpointException, match="w: this rank's shard has 2 boxes, and safetensors files hold one"):
        strided = dtensor_of(x, mesh, by_view(Shard(1), _StridedShard(0, split_factor=2)))
        dcp.save({"w": strided}, storage_writer=writer, planner=SavePlanner())

    wrong = dtensor_of(x, mesh, plain(Shard(0), Replicate()), x[:3])
    path = f"{base}/shape"
    message = refusal(dcp.save, {"w": wrong}, path, SavePlanner())
    assert message.startswith(f"{ArgumentError.__name__}: w: the local tensor has shape (3, 6)"), message
    dcp.save({"w": dtensor_of(x, mesh, REVERSED)}, checkpoint_id=path, planner=SavePlanner())
    other = poisoned(whole((4, 7), torch.float32), mesh, REVERSED)
    message = refusal(dcp.load, {"w": other}, path, LoadPlanner())
    assert message.startswith("ValueError: Size mismatch"), message

    dist.barrier()
    if rank == 0:  # a checkpoint without its last row
        metadata = dcp.FileSystemReader(path).read_metadata()
        metadata.state_dict_metadata["w"].chunks.pop()
        (Path(path) / ".metadata").write_bytes(pickle.dumps(metadata))
    dist.barrier()
    into = poisoned(x, mesh, plain(Replicate(), Replicate()))
    message = refusal(dcp.load, {"w": into}, path, LoadPlanner())
    assert message == f"{ArgumentError.__name__}: w: the checkpoint has 18 of the 24 elements of this rank's shard", (
        message
    )


def test_unsupported_checkpoints_raise(tmp_path: Path) -> None:
    run_ranks(refusals, 4, str(tmp_path))


def trained(x: torch.Tensor, mesh: DeviceMesh, layout: LayoutCase) -> dict[str, Any]:
    """The state of a model and its optimizer after a step, and other values."""
    parameter = torch.nn.Parameter(dtensor_of(x, mesh, layout))
    optimizer = torch.optim.AdamW([parameter], lr=0.5)
    parameter.grad = dtensor_of(x * 2, mesh, layout)
    optimizer.step()
    return {"model": {"w": parameter, "plain": x}, "optimizer": optimizer.state_dict(), "names": ["a", x], "step": 3}


def whole_states(rank: int, base: str) -> None:
    mesh, x = init_device_mesh("cpu", (2, 2)), whole((5, 4), torch.float32)
    # torch.nn.Parameter drops a shard order, so one parameter has torch's spelling; the other is a plain DTensor.
    saved = trained(x, mesh, TORCH_SPELLING) | {"ordered": dtensor_of(x, mesh, REVERSED)}
    dcp.async_save(saved, checkpoint_id=base, planner=SavePlanner()).result()

    state = trained(x * 0, mesh, STRIDED) | {"step": 0, "names": ["b", x * 0], "model": {"plain": x * 0}}
    # On the meta device the layout includes the shard order.
    for name, layout in (("w", TORCH_SPELLING), ("ordered", REVERSED)):
        empty = dtensor_of(x, mesh, layout, cut(x, mesh, layout).to("meta"))
        (state if name == "ordered" else state["model"])[name] = empty
    dcp.load(state, checkpoint_id=base, planner=LoadPlanner())
    assert state["ordered"]._spec.shard_order == saved["ordered"]._spec.shard_order
    assert is_right(state["ordered"], x, mesh, REVERSED)
    assert state["model"]["w"].placements == TORCH_SPELLING.placements
    assert state["model"]["w"]._local_tensor.equal(saved["model"]["w"]._local_tensor)
    assert state["model"]["plain"].equal(x) and state["step"] == 3
    assert state["names"][0] == "a" and state["names"][1].equal(x)
    moment = state["optimizer"]["state"][0]["exp_avg"]
    assert moment.placements == STRIDED.placements
    assert moment._local_tensor.allclose(cut(x * 0.2, mesh, STRIDED))


def test_state_of_models_and_optimizers(tmp_path: Path) -> None:
    run_ranks(whole_states, 4, str(tmp_path))


def many(rank: int, base: str) -> list[str]:
    mesh, x, messages = init_device_mesh("cpu", (2,)), whole((2100,), torch.bfloat16), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardweave.runtime.dtensor.distributed_checkpoint").addHandler(handler)
    layout = by_view(_StridedShard(0, split_factor=1050))
    dcp.save({"w": dtensor_of(x, mesh, layout)}, checkpoint_id=base, planner=SavePlanner())
    into = {"w": poisoned(x, mesh, plain(Shard(0)))}
    dcp.load(into, checkpoint_id=base, planner=LoadPlanner())
    assert is_right(into["w"], x, mesh, plain(Shard(0)))
    dcp.save(into, checkpoint_id=base + "/plain", planner=SavePlanner())
    again, planner = {"w": poisoned(x, mesh, layout)}, Counting()
    dcp.load(again, checkpoint_id=base + "/plain", planner=planner)
    assert is_right(again["w"], x, mesh, layout) and planner.reads == 2
    return messages


def test_shard_of_many_boxes_logs_a_warning(tmp_path: Path) -> None:
    for messages in run_ranks(many, 2, str(tmp_path)):
        assert len(messages) == 1 and "w: this rank's shard has 1050 boxes" in messages[0]
