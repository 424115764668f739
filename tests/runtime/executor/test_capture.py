"""Second calls of every kind can be captured in a CUDA graph: real ranks with interpreted kernels, in a capture that is
pretended."""

from __future__ import annotations

from ast import literal_eval
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from moe_reference import tokens_of
from rank_processes import interpreted, run_ranks
from test_no_sync import dtensor
from test_processes import SETTINGS, E, H, K, leaf
from test_symmetric import transport_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardweave
from shardweave.runtime.moe.dispatcher import TokenDispatcher

pytestmark = pytest.mark.multi
ASKED: tuple[tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]], ...] = (
    ((Shard(0),), (Shard(1),), {}),
    ((Shard(0),), (Replicate(),), {}),
    ((Partial("avg"),), (Shard(0),), {}),
    ((Replicate(),), (Partial(),), {}),
    ((Partial(),), (Replicate(),), {"forward_dtype": torch.bfloat16}),
    ((Partial("max"),), (Replicate(),), {"async_op": True}),
    ((Partial(),), (Shard(1),), {"reduction": "fast"}),
)


class Boxes:
    """Redistributions, a batch, gradients and FSDP2's collectives, with other memory in each call."""

    def __init__(self) -> None:
        self.kept: list[Any] = []  # so that memory is not used again
        self.mesh, self.other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
        for mesh in (self.mesh, self.other):
            # Reads the mesh's ranks, which torch keeps in a CPU tensor.
            shardweave.redistribute_cost(mesh, (), "float32", *[[Replicate()] * mesh.ndim] * 2)

    def __call__(self, rank: int) -> None:
        asked = [(dtensor(self.mesh, (7, 5), source), target, options) for source, target, options in ASKED]
        self.kept += asked
        for x, target, options in asked:
            y = shardweave.redistribute(x, target, **options)
            if options.get("async_op"):
                y._local_tensor.wait()
        shardweave.redistribute_batch([x for x, *_ in asked[:4]], [target for _, target, _ in asked[:4]])
        shardweave.redistribute(asked[0][0], [Shard(1), Replicate()], device_mesh=self.other)
        x = dtensor(self.mesh, (7, 5), (Shard(0),)).requires_grad_()
        shardweave.redistribute(x, [Replicate()]).to_local().sum().backward()
        gather, scatter = shardweave.fsdp.FSDPAllGather(), shardweave.fsdp.FSDPReduceScatter()
        whole = gather.allocate((10,), dtype=torch.bfloat16, device=torch.device("cpu"))
        gather(whole, torch.ones(5, dtype=torch.bfloat16), dist.group.WORLD)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            scatter(torch.empty(5, dtype=torch.bfloat16), torch.ones_like(whole), dist.group.WORLD, op)


class Direct:
    """Redistributions that are written directly into outputs of peers, with other memory in each call. Outputs of the
    first call have two of three pooled buffers, and one of the second finds none."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2,))
        shardweave.prepare(self.mesh, 1 << 12, pooled_outputs=3)
        self.kept: list[Any] = []

    def __call__(self, rank: int) -> None:
        x = dtensor(self.mesh, (8, 16), (Shard(0),))
        for target in (Replicate(), Shard(1)):
            self.kept += [x, shardweave.redistribute(x, [target])]

    def check(self) -> tuple[int, int]:
        """The outputs that lie in pooled buffers, and those that were copied out of another one."""
        outputs, lent = self.kept[1::2], transport_of("cpu").outputs((0, 1))
        for x, y in zip(self.kept[::2], outputs, strict=True):
            assert "by direct push" in shardweave.explain(x, list(y.placements))
            assert y.full_tensor().equal(x.full_tensor())
        first, end = (lent.buffer(n, dist.get_rank(), torch.uint8).data_ptr() for n in (0, lent.number))
        pooled = sum(first <= y.to_local().data_ptr() < end for y in outputs)
        return pooled, shardweave.stats().copies["outputs of a redistribution: all pooled buffers are in use"]


class Layer:
    """Dispatch, combine and their backward, with other tokens in other memory in each call."""

    def __init__(self, **settings: Any) -> None:
        self.dispatcher = TokenDispatcher(**with_options(**{**SETTINGS, **settings}))
        self.calls = 0
        self.kept: list[Any] = []  # so that memory is not used again

    def __call__(self, rank: int) -> None:
        self.calls += 1
        t = tokens_of(rank, 5 + rank, K, E, H, torch.bfloat16, "holes", self.calls)
        x, weights = leaf(t.x), leaf(t.weights)
        routed = self.dispatcher.dispatch(x, t.ids, weights)
        y = self.dispatcher.combine(routed.x * 2, routed, add=x)
        y.backward(t.gradient)
        self.kept.append([t, x, weights, routed, y])


def all_on_rank(rank: int) -> tuple[list[int], list[int], list[Any], list[str]]:
    from capture_lint import Keys

    keys = Keys()
    boxes = second_calls(rank, keys, [Boxes()])
    tokens = second_calls(rank, keys, [Layer(), Layer(save="copy", overflow="drop", expert_capacity=4)])
    direct = Direct()
    written = [second_calls(rank, keys, [direct]), direct.check()]
    return boxes, tokens, written, violations(rank, keys)


def ranks() -> list[tuple[list[int], list[int], list[Any], list[str]]]:
    return run_ranks(all_on_rank, 2, environment={"SHARDWEAVE_TRANSPORT": "symmetric_memory"})


def second_calls(rank: int, keys: Any, calls: list[Any]) -> list[int]:
    """The launches of prepared kernels, and those by the binder."""
    from capture_lint import PretendedCapture

    for call in calls:
        call(rank)
    dist.barrier()
    before = keys.prepared, keys.launches
    with PretendedCapture(keys) as capture:
        for call in calls:
            call(rank)
    assert capture.seen["empty"], capture.seen
    transport = transport_of("cpu")
    assert transport.error is None and set(shardweave.stats().calls) <= {"symmetric_memory", "tokens"}
    return [keys.prepared - before[0], keys.launches - before[1]]


def violations(rank: int, keys: Any) -> list[str]:
    """What a capture of a first call, and of some planted errors, is refused for."""
    from capture_lint import PretendedCapture
    from sync_guard import SyncRefused

    from shardweave.kernels import StridedBoxes, copy_boxes, copy_rows, copy_table
    from shardweave.kernels.channel import Failure

    reasons = []
    boxes = StridedBoxes([[i] for i in range(6)], [0] * 6, [[0]] * 6, [4 * i for i in range(6)], [[4]] * 6, [[[1]]] * 6,
                         [[1]] * 6)  # fmt: skip
    table = copy_table(boxes, torch.float32)
    memory = torch.zeros(64)
    rows = torch.zeros(8, 16, dtype=torch.bfloat16)
    copy_rows(rows, rows.clone(), torch.tensor([3], dtype=torch.int32))
    transport = transport_of("cpu")
    mesh = init_device_mesh("cpu", (2,))
    shardweave.redistribute_cost(mesh, (), "float32", [Replicate()], [Replicate()])  # reads the mesh's ranks
    x = dtensor(mesh, (6, 4), (Shard(0),))
    aligned, skewed, number = memory[:24], memory[1:25], torch.tensor([3], dtype=torch.int32)
    copy_boxes(table, list(memory[32:56].split(4)), [aligned])
    planted = {
        "first call": lambda: shardweave.redistribute(x, [Shard(1)]),
        "window": lambda: transport.window((0, 1), 1 << 30),
        "other alignment": lambda: copy_boxes(table, list(memory[32:56].split(4)), [skewed]),
        "other buffers": lambda: copy_boxes(table, list(memory[24:48].split(4)), [aligned]),
        "other rows": lambda: copy_rows(rows[:, :8].contiguous(), rows[:, :8].clone(), number),
        "other address": lambda: copy_rows(rows, rows.clone(), torch.zeros(4, dtype=torch.int32)[1:2]),
        "failure": lambda: Failure(torch.device("cpu")),
        "pinned": lambda: torch.empty(3, pin_memory=True),
        "pin": lambda: memory.pin_memory(),
        "host": lambda: number.item(),
    }
    for plant in planted.values():
        with pytest.raises(SyncRefused) as refused, PretendedCapture(keys):
            plant()
        reasons.append(str(refused.value).split(":")[0])
    return reasons


@pytest.fixture(scope="module")
def ran() -> Any:
    """What the ranks return: of redistributions, of token dispatch, of direct writes, of violations."""
    return list(zip(*literal_eval(interpreted("test_capture", "t.ranks()")), strict=True))


def test_second_calls_can_be_captured(ran: Any) -> None:
    """They pin, upload, compile and read nothing, and allocate no window."""
    boxes, tokens, *_ = ran
    for prepared, by_binder in (*boxes, *tokens):
        assert prepared > 20 and by_binder == 0, ran


def test_direct_writes_can_be_captured(ran: Any) -> None:
    """One launch each, and the copy of the output that found no pooled buffer."""
    _, _, direct, _ = ran
    assert direct == ([[2, 0], (3, 1)],) * 2, direct


def test_violations_are_found(ran: Any) -> None:
    *_, (first, second) = ran
    assert first == second
    assert first == [
        "a table is uploaded", "memory of a window is allocated", "a table is uploaded",
        "addresses are uploaded", *["a kernel is compiled and loaded"] * 2, "a word of the host is pinned",
        "empty(pin_memory=True)", "pin_memory()", "item()",
    ]  # fmt: skip
