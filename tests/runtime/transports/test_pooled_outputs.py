"""Redistributions that write directly into outputs of peers in pooled buffers, on real processes."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from rank_processes import interpreted, run_ranks
from test_redistribute import held_by, whole_tensor
from test_symmetric import made, transport_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import shardweave
from shardweave.errors import ArgumentError, DisagreementError, MeetingTimeoutError, TransportError

pytestmark = pytest.mark.multi
ALL_IN_USE = "outputs of a redistribution: all pooled buffers are in use"
SHAPE = (16, 32)
PAIRS = (
    ([Shard(0)], [Replicate()]),
    ([Shard(0)], [Shard(1)]),
    ([Shard(1)], [Shard(0)]),
    ([Shard(1)], [Replicate()]),
)


def pooled(size: int, number: int, device: str = "cpu") -> Any:
    """A mesh with pooled outputs of one tensor each."""
    mesh = init_device_mesh(device, (size,))
    shardweave.prepare(mesh, 1 << 16, pooled_outputs=number, transport="symmetric_memory")
    return mesh


def redistributed(x: Any, target: Any, **options: Any) -> torch.Tensor:
    return shardweave.redistribute(x, target, transport="symmetric_memory", **options).to_local()


def every_pair(rank: int, size: int, rounds: int = 3) -> list[int]:
    """Results that live on are not written again, whichever buffer they are in; when they are gone it is used again."""
    mesh = pooled(size, 2)
    lent = transport_of("cpu").outputs(tuple(range(size)))
    kept, copies = [], shardweave.stats().copies
    for number in range(rounds):
        for i, (source, target) in enumerate(PAIRS):
            for dtype in (torch.float32, torch.bfloat16):
                whole = whole_tensor(SHAPE, dtype) + number + i
                x = made(whole, mesh, source, {}, "cpu")
                if rounds > 1 and not number:
                    assert "by direct push: into outputs in 2 pooled buffers of 64 KiB" in shardweave.explain(
                        x, target, transport="symmetric_memory"
                    )
                kept.append((redistributed(x, target), held_by(whole, target, mesh, {})))
                if len(kept) > 1 + i:
                    kept.pop(0)
        for out, expected in kept:
            assert out.equal(expected)
        if rank % 2:
            kept.clear()
        gc.collect()
    addresses = {lent.buffer(n, rank, torch.uint8).data_ptr() for n in range(3)}
    assert {out.data_ptr() for out, _ in kept} & addresses if kept else True
    assert lent.buffer(2, rank, torch.uint8).data_ptr() not in {out.data_ptr() for out, _ in kept}
    return [copies[ALL_IN_USE]]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_outputs_stay_while_they_are_used(size: int) -> None:
    for rank, (copies,) in enumerate(run_ranks(every_pair, size, size)):
        assert copies > 0, rank


def in_the_interpreter(rank: int, size: int) -> int:
    every_pair(rank, size, 1)
    return 1


def test_kernels_in_interpreter() -> None:
    assert interpreted("test_pooled_outputs", "t.run_ranks(t.in_the_interpreter, 2, 2)") == "[1, 1]"


def what_is_not_direct(rank: int) -> None:
    """Reductions, odd rows and outputs that are too large go through windows; `explain` says why."""
    mesh = pooled(2, 1)
    with pytest.raises(ArgumentError, match="pooled_outputs: -1; allowed: a whole number, 0 to 1024"):
        shardweave.prepare(mesh, 1, pooled_outputs=-1)
    for shape, source, target, why in (
        ((16, 7), Shard(0), Shard(1), "; not directly into outputs, in which runs do not begin and end at multiples"),
        ((256, 256), Shard(0), Replicate(), "; not directly into outputs, which are 256 KiB and the pooled buffers 64"),
        (SHAPE, Partial(), Shard(0), ""),
    ):
        x = made(whole_tensor(shape, torch.float32), mesh, [source], {}, "cpu") if source != Partial() else None
        if x is None:
            continue
        text = shardweave.explain(x, [target], transport="symmetric_memory")
        assert why in text and "direct push" not in text, text
        assert redistributed(x, [target]).equal(held_by(whole_tensor(shape, torch.float32), [target], mesh, {}))
    assert not shardweave.prepare(mesh, 1 << 10, pooled_outputs=1, transport="symmetric_memory")
    x = made(whole_tensor(SHAPE, torch.float32), mesh, [Shard(0)], {}, "cpu")
    batch = shardweave.redistribute_batch([x, x], [[Replicate()], [Shard(1)]], transport="symmetric_memory")
    for y, target in zip(batch, ([Replicate()], [Shard(1)]), strict=True):
        assert y.to_local().equal(held_by(whole_tensor(SHAPE, torch.float32), target, mesh, {}))
    late = shardweave.redistribute(x, [Replicate()], transport="symmetric_memory", async_op=True).to_local()
    assert torch.equal(late, whole_tensor(SHAPE, torch.float32))


def test_explain_says_what_is_not_direct() -> None:
    run_ranks(what_is_not_direct, 2)


def stays_away(rank: int) -> str:
    mesh = pooled(2, 1)
    x = made(whole_tensor(SHAPE, torch.float32), mesh, [Shard(0)], {}, "cpu")
    redistributed(x, [Replicate()])
    transport = transport_of("cpu")
    torch.distributed.barrier()
    if rank:
        time.sleep(5)
        return ""
    out = transport.outputs((0, 1)).buffer(0, 0, torch.float32)[: 16 * 32]
    with pytest.raises(MeetingTimeoutError, match="rank 1 did not arrive") as raised:
        redistributed(x, [Replicate()])
    assert bool(out.isnan().all()), "an output that is not whole is overwritten"
    with pytest.raises(TransportError):
        redistributed(x, [Replicate()])
    return str(raised.value)


def test_missing_peer_is_named_and_output_overwritten() -> None:
    message = run_ranks(stays_away, 2, environment={"SHARDWEAVE_TIMEOUT": "2"})[0]
    assert "outputs since then are overwritten" in message


def disagree(rank: int) -> None:
    """Ranks that make different calls write nothing into each other's outputs."""
    mesh = pooled(2, 1)
    x = made(whole_tensor(SHAPE, torch.float32), mesh, [Shard(0)], {}, "cpu")
    before = transport_of("cpu").outputs((0, 1)).buffer(0, rank, torch.float32)
    before.fill_(-1)
    with pytest.raises(DisagreementError, match="made different requests"):
        redistributed(x, [[Replicate()], [Shard(1)]][rank])
    assert bool((before.isnan() | (before == -1)).all())


def test_different_requests_raise() -> None:
    run_ranks(disagree, 2)
