"""Process groups that are made after a failure work, and keep nothing once they are destroyed; a rank that leaves its
process group is named by its peers."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatcher_settings import with_options
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.errors import ArgumentError, PeerError, TransportError, UnsupportedError

pytestmark = pytest.mark.multi

TRANSPORTS = ["shared_memory", "process_group", "hierarchical", "symmetric_memory"]
WHOLE = torch.arange(24.0).view(8, 3)


def environment_of(transport: str, timeout: int = 20) -> dict[str, str]:
    nodes = {"SHARDWEAVE_NODE_SIZE": "2"} if transport == "hierarchical" else {}
    return {"SHARDWEAVE_TIMEOUT": str(timeout), "SHARDWEAVE_TRANSPORT": transport, **nodes}


def sharded(mesh: DeviceMesh) -> DTensor:
    rank, ranks = dist.get_rank(), mesh.mesh.flatten().tolist()
    local = WHOLE.chunk(len(ranks))[ranks.index(rank)].clone()
    placements = [Shard(0)] * mesh.ndim
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())


def check(mesh: DeviceMesh) -> None:
    x = sharded(mesh)
    for _ in range(2):
        assert shardweave.redistribute(x, [Replicate()] * mesh.ndim).to_local().equal(WHOLE)


def disagree(mesh: DeviceMesh) -> None:
    x = sharded(mesh)
    last = mesh.mesh.flatten()[-1] == dist.get_rank()
    with pytest.raises(TransportError):
        shardweave.redistribute(x, [Shard(1) if last else Replicate()] * mesh.ndim)


def raise_on_one(mesh: DeviceMesh) -> None:
    """One rank fails while it waits within the call, and lives on."""
    x = sharded(mesh)
    if dist.get_rank() != 1:
        time.sleep(0.4)
        with pytest.raises(TransportError):
            for _ in range(3):  # of the first one it may have done its part
                shardweave.redistribute(x, [Replicate()])
        return

    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises((Interrupt, TransportError)):
        shardweave.redistribute(x, [Replicate()])


def refuse_on_one(mesh: DeviceMesh) -> None:
    x = sharded(mesh)
    error = ArgumentError if dist.get_rank() == 1 else TransportError
    with pytest.raises(error):
        shardweave.redistribute(x, [Shard(9) if dist.get_rank() == 1 else Replicate()])


def come_late(mesh: DeviceMesh) -> None:
    x = sharded(mesh)
    if dist.get_rank() == 1:
        time.sleep(5)
    with pytest.raises(TransportError):
        for _ in range(3):  # the first one may find what the others have sent
            shardweave.redistribute(x, [Replicate()])


def dispatch(group: dist.ProcessGroup) -> None:
    size = group.size()
    settings: Any = {"num_experts": 2 * size, "top_k": 2, "hidden": 8, "max_tokens": 4, "dtype": torch.float32}
    dispatcher = shardweave.TokenDispatcher(group, **with_options(**settings))
    x = torch.full((4, 8), float(dist.get_rank()))
    ids = torch.arange(8).view(4, 2) % (2 * size)
    routed = dispatcher.dispatch(x, ids, torch.full((4, 2), 0.5))
    assert dispatcher.combine(routed.x, routed).equal(x)


def go_on(rank: int, fail: Callable[[DeviceMesh], None]) -> None:
    mesh = init_device_mesh("cpu", (4,))
    check(mesh)
    fail(mesh)
    made: list[Any] = [dist.new_group([0, 1, 2, 3]), dist.new_group([1, 2]), dist.new_group([0, 3])]
    everyone, pair = made[0], made[1] if rank in (1, 2) else made[2]
    new = DeviceMesh.from_group(everyone, "cpu")
    check(new)
    dispatch(everyone)
    check(DeviceMesh.from_group(pair, "cpu"))
    dispatch(pair)
    check(init_device_mesh("cpu", (2, 2)))
    # From a tensor of the old mesh, whose groups may have lost their connections.
    moved = shardweave.redistribute(sharded(mesh), [Replicate()], device_mesh=new)
    assert moved.to_local().equal(WHOLE)
    if fail is not refuse_on_one or rank != 1:
        with pytest.raises(TransportError, match="allowed after that: calls on process groups made since"):
            shardweave.redistribute(sharded(mesh), [Replicate()])
    # The same once more.
    disagree(new)
    again = DeviceMesh.from_group(dist.new_group([0, 1, 2, 3]), "cpu")
    check(again)
    with pytest.raises(TransportError, match="allowed after that"):
        shardweave.redistribute(sharded(new), [Replicate()])
    check(again)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fail", [disagree, raise_on_one])
def test_new_groups_work_after_a_failure(transport: str, fail: Callable[[DeviceMesh], None]) -> None:
    run_ranks(go_on, 4, fail, environment=environment_of(transport))


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("fail", [refuse_on_one, pytest.param(come_late, marks=pytest.mark.long)])
def test_new_groups_work_after_refusals_and_timeouts(transport: str, fail: Callable[[DeviceMesh], None]) -> None:
    run_ranks(go_on, 4, fail, environment=environment_of(transport, 4 if fail is come_late else 20))


def fail_in_one_row(rank: int) -> None:
    """Ranks 2 and 3 see nothing of the failure, and make a group with those that did. Meanwhile their own go on."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    check(rows)
    row = rows["b"]
    check(row)
    if rank < 2:
        disagree(row)
    new = DeviceMesh.from_group(dist.new_group([0, 1, 2, 3]), "cpu")
    if rank >= 2:
        check(row)
    check(new)
    # Without a store's barrier among all ranks, and so without a number.
    group = dist.new_group([1, 2], use_local_synchronization=True) if rank in (1, 2) else None
    if group is not None:
        check(DeviceMesh.from_group(group, "cpu"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_did_not_fail_join_new_groups(transport: str) -> None:
    run_ranks(fail_in_one_row, 4, environment=environment_of(transport))


def mesh_without_a_group(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    disagree(mesh)
    x = sharded(init_device_mesh("cpu", (2, 2)))
    with pytest.raises(UnsupportedError, match=r"no process group .* since has all .*new_group\(\)"):
        shardweave.redistribute(x, [Replicate()] * 2)
    with shardweave.installed():  # torch's own collectives are along the dims, whose groups are new
        assert x.redistribute(placements=[Replicate()] * 2).to_local().equal(WHOLE)
    shardweave.stats().delegations.clear()


def test_messages_need_a_new_group_of_all_ranks() -> None:
    run_ranks(mesh_without_a_group, 4, environment=environment_of("process_group"))


def held() -> tuple[int, int]:
    """The descriptors and the threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def check_no_more_are_held(than: tuple[int, int]) -> None:
    deadline = time.monotonic() + 20
    while any(now > before for now, before in zip(held(), than, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)  # threads end within a few seconds
    now = held()
    assert now[0] <= than[0] and now[1] <= than[1], f"{now} descriptors and threads, before {than}"


def gathered(mesh: DeviceMesh) -> torch.Tensor:
    return shardweave.redistribute(sharded(mesh), [Replicate()]).to_local()


def replace_groups(_: int) -> None:
    """Each failure is followed by a new group, after which the one that failed is destroyed."""
    mesh = init_device_mesh("cpu", (4,))
    check(mesh)
    group, first, before = None, torch.empty(0), (0, 0)
    for number in range(6):
        dist.barrier(group)  # peers are no longer in the call before
        disagree(mesh)
        new = dist.new_group([0, 1, 2, 3])
        mesh = DeviceMesh.from_group(new, "cpu")
        out = gathered(mesh)
        if group is not None:
            dist.destroy_process_group(group)
        group = new
        check(mesh)
        first = first if number else out
        if number == 1:
            before = held()
        del out
    check_no_more_are_held(before)
    assert first.equal(WHOLE)


def use_groups_in_turn(rank: int) -> None:
    world = init_device_mesh("cpu", (4,))
    check(world)
    outputs, before = [], (0, 0)
    for failed in (False, True):
        if failed:
            dist.barrier()
            disagree(world)
        for number in range(5):
            every, half = dist.new_group([0, 1, 2, 3]), [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
            out = gathered(DeviceMesh.from_group(every, "cpu"))
            dispatch(half)
            check(DeviceMesh.from_group(half, "cpu"))
            if number == 0:
                outputs.append(out)
                before = held()
            del out
            dist.destroy_process_group(every)
            dist.destroy_process_group(half)
            del every, half
        check_no_more_are_held(before)
    assert all(out.equal(WHOLE) for out in outputs)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("main", [replace_groups, use_groups_in_turn])
def test_destroyed_groups_keep_no_descriptors_or_threads(transport: str, main: Callable[[int], None]) -> None:
    run_ranks(main, 4, environment=environment_of(transport))


def destroy_with_a_pending_call(_: int) -> None:
    world = init_device_mesh("cpu", (4,))
    for failed in (False, True):
        if failed:
            dist.barrier()
            disagree(world)
            world = DeviceMesh.from_group(dist.new_group([0, 1, 2, 3]), "cpu")
        group = dist.new_group([0, 1, 2, 3])
        x = sharded(DeviceMesh.from_group(group, "cpu"))
        y = shardweave.redistribute(x, [Replicate()], async_op=True)
        dist.destroy_process_group(group)
        del group, x
        shardweave.redistribute(sharded(world), [Shard(0)])  # nothing to exchange
        assert y.to_local().equal(WHOLE)
        check(world)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pending_call_outlives_its_group(transport: str) -> None:
    run_ranks(destroy_with_a_pending_call, 4, environment=environment_of(transport))


def leave(rank: int, inside: bool, keep: bool) -> str:
    mesh = init_device_mesh("cpu", (4,))
    check(mesh)
    world, x = dist.group.WORLD if keep else None, sharded(mesh)
    del mesh
    if rank == 1:
        time.sleep(0.6 if inside else 0)
        dist.destroy_process_group()
        time.sleep(2)  # it lives on
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return ""
    time.sleep(0 if inside else 0.6)
    start = time.monotonic()
    with pytest.raises(PeerError) as raised:
        shardweave.redistribute(x, [Replicate()])
    assert time.monotonic() - start < 10 and world is (dist.group.WORLD if keep else None)  # not the timeout
    return str(raised.value)


@pytest.mark.parametrize(
    ("transport", "inside", "keep"),
    [(transport, True, True) for transport in TRANSPORTS]
    + [("shared_memory", False, False), ("process_group", False, True), ("process_group", True, False)],
)
def test_rank_that_leaves_is_named(transport: str, inside: bool, keep: bool) -> None:
    """Whether something holds the process group, and with it its connections, or not."""
    texts = run_ranks(leave, 4, inside, keep, environment=environment_of(transport, 40))
    assert all("rank 1 has left the process group (destroy_process_group)" in texts[r] for r in (0, 2, 3)), texts


def leave_with_a_pending_call(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    check(mesh)
    y = shardweave.redistribute(sharded(mesh), [Replicate()], async_op=True)
    if rank == 0:
        time.sleep(0.4)  # the other has left by now
        assert y.to_local().equal(WHOLE)


def leave_after_the_last_call(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    check(mesh)
    x = sharded(mesh)
    time.sleep(0.5 * (rank == 1))  # the other waits for longer than until it looks at reports
    assert shardweave.redistribute(x, [Replicate()]).to_local().equal(WHOLE)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "symmetric_memory"])
@pytest.mark.parametrize("last", [leave_with_a_pending_call, leave_after_the_last_call])
def test_rank_that_leaves_after_its_last_call_does_not_fail_others(transport: str, last: Callable[[int], None]) -> None:
    run_ranks(leave_at_once, 2, last, environment=environment_of(transport))


def leave_at_once(rank: int, last: Callable[[int], None]) -> None:
    last(rank)
    dist.destroy_process_group()
    time.sleep(0.8)  # it lives on
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def fail_and_destroy(rank: int, port: int) -> list[str]:
    dist.destroy_process_group()
    seen: list[str] = []
    threading.excepthook = lambda args: seen.append(f"{args.exc_type.__name__} in {args.thread}")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for life in range(4):
        own = dist.PrefixStore(f"{life}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        mesh = init_device_mesh("cpu", (2,))
        check(mesh)
        x = sharded(mesh)
        shardweave.redistribute(x, [Replicate()], reduction="fast")
        if rank == 0:
            with pytest.raises(TransportError):
                shardweave.redistribute(x, [Replicate()])
        else:
            time.sleep(0.15)
            with pytest.raises(ArgumentError):
                shardweave.redistribute(x, [Shard(7)])
        dist.destroy_process_group()
        store.set(f"gone/{life}/{rank}", "")
        store.wait([f"gone/{life}/0", f"gone/{life}/1"])
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=2)
    return seen


def test_group_that_is_destroyed_at_once_after_a_failure() -> None:
    """The thread that closes connections is still at it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(fail_and_destroy, 2, server.port, environment=environment_of("process_group")) == [[], []]
