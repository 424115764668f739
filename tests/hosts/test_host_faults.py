"""Hosts that vanish, links that stall or drop packets, a slow host, clocks apart: named in time, nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.bench.harness.host_processes import RankEnd, report
from shardweave.bench.harness.hosts import Hosts, values_of
from shardweave.bench.harness.namespaces import SHARED, SWITCH
from shardweave.runtime.tracing.merge import merge_traces
from shardweave.runtime.tracing.trace_file import Trace

pytestmark = pytest.mark.multi

TWO = [[0, 1], [2, 3]]
TIMEOUT = 6.0  # seconds, SHARDWEAVE_TIMEOUT
SLACK = 15.0  # for a busy machine
ROWS = 256


def sharded(rank: int) -> tuple[DTensor, torch.Tensor]:
    mesh, whole = init_device_mesh("cpu", (2, 2)), torch.arange(ROWS * 64.0).view(ROWS, 64)
    part = whole.chunk(4)[rank].clone()
    return DTensor.from_local(part, mesh, [Shard(0), Shard(0)], run_check=False), whole


def calls(rank: int, seconds: float, every: float = 0.0, kind: str = "redistribute") -> int:
    """Calls until the time is over, of which each result is right. All ranks make as many."""
    x, whole = sharded(rank)
    mesh = x.device_mesh
    dispatcher = shardweave.TokenDispatcher(num_experts=8, top_k=2, hidden=64, max_tokens=ROWS, dtype=torch.float32)
    ids = torch.arange(2 * len(x.to_local())).view(-1, 2) % 8
    done, start, go_on, told = 0, time.monotonic(), True, False
    while go_on:
        if kind == "redistribute":
            y = shardweave.redistribute(x, [Replicate(), Replicate()]).to_local()
            assert y.equal(whole)
        else:
            rows = x.to_local()
            routed = dispatcher.dispatch(rows, ids, torch.full(ids.shape, 0.5))
            assert dispatcher.combine(routed.x.clone(), routed).equal(rows)
        # Rank 0 decides.
        mine = DTensor.from_local(torch.tensor([float(time.monotonic() - start < seconds)]), mesh, [Shard(0)] * 2)
        go_on = bool(shardweave.redistribute(mine, [Replicate()] * 2).to_local()[0])
        done += 1
        if done == 3:
            report("running")
        if time.monotonic() - start > seconds - 2.0 and not told:
            report("disturbed")
            told = True
        time.sleep(every)
    return done


def fault(
    start_hosts: Callable[..., Hosts], action: Callable[[Hosts], None], kind: str = "redistribute", **environment: str
) -> tuple[Hosts, list[RankEnd], float]:
    """The ends of ranks after `action`, and the seconds from then on. The hosts are still there."""
    hosts = start_hosts(TWO)
    try:
        hosts.start(calls, 300.0, 0.01, kind, environment={"SHARDWEAVE_TIMEOUT": str(TIMEOUT), **environment})
        hosts.wait_for("running")
        began = time.monotonic()
        action(hosts)
        ends = hosts.ends(TIMEOUT + 60)
        return hosts, ends, time.monotonic() - began
    except BaseException:
        hosts.close()
        raise


def vanish(host: int, how: str) -> Callable[[Hosts], None]:
    def action(hosts: Hosts) -> None:
        if how != "killed":
            hosts.set_link(host, False)
        if how != "cut off":
            hosts.end_host(host)

    return action


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "how", "kind"),
    [
        (0, "killed", "redistribute"),
        (1, "powered off", "dispatch"),
        (0, "cut off", "dispatch"),
        (1, "cut off", "redistribute"),
    ],
)
def test_vanished_host_is_named(host: int, how: str, kind: str, start_hosts: Callable[..., Hosts]) -> None:
    hosts, ends, seconds = fault(start_hosts, vanish(host, how), kind)
    with hosts:
        left, gone = TWO[1 - host], TWO[host]
        check_named(ends, left, gone, seconds)
        if how == "cut off":
            check_named(ends, gone, left, seconds)
            hosts.set_link(host, True)
            assert len(set(hosts.run(calls, 0.5))) == 1  # what came back goes on


@pytest.mark.long
def test_host_of_the_store_is_cut_off_while_calls_are_recorded(start_hosts: Callable[..., Hosts]) -> None:
    hosts, ends, seconds = fault(
        start_hosts, vanish(0, "cut off"), SHARDWEAVE_FR_BUFFER_SIZE="50", TORCH_FR_DUMP_TEMP_FILE="/tmp/records/rank_"
    )
    with hosts:
        check_named(ends, TWO[1], TWO[0], seconds)
        check_named(ends, TWO[0], TWO[1], seconds)
        records = [name for of_host in hosts.run_on_hosts(recorded) for name in of_host]
    assert sorted(records) == [f"shardweave_{rank}" for rank in range(4)]


def recorded(host: int) -> list[str]:
    return os.listdir("/tmp/records/shardweave")


def check_named(ends: list[RankEnd], left: list[int], gone: list[int], seconds: float) -> None:
    """Those that are left have raised in time, and at least one of each host names a rank that is gone."""
    assert seconds < TIMEOUT + SLACK, [end.error for end in ends]
    errors = {rank: ends[rank] for rank in left}
    assert {end.error for end in errors.values()} <= {"PeerError", "MeetingTimeoutError"}, errors
    assert any(f"rank {rank}" in end.message.splitlines()[0] for end in errors.values() for rank in gone), errors


def first_call(rank: int) -> None:
    """The first call of all, after the link has gone."""
    x, _ = sharded(rank)
    report("running")
    time.sleep(2.0)
    shardweave.redistribute(x, [Replicate(), Replicate()])


@pytest.mark.long
@pytest.mark.parametrize("host", [0, 1])
def test_host_that_vanishes_before_ranks_meet_is_named(host: int, start_hosts: Callable[..., Hosts]) -> None:
    with start_hosts(TWO) as hosts:
        hosts.start(first_call, environment={"SHARDWEAVE_TIMEOUT": str(TIMEOUT)})
        hosts.wait_for("running")
        began = time.monotonic()
        hosts.set_link(host, False)
        ends = hosts.ends(TIMEOUT + 60)
        seconds = time.monotonic() - began - 2.0
    check_named(ends, TWO[0], TWO[1], seconds)
    check_named(ends, TWO[1], TWO[0], seconds)


def disturbed(
    start_hosts: Callable[..., Hosts], disturb: Callable[[Hosts], None], seconds: float, kind: str
) -> list[int]:
    """The calls of each rank, all with the right result, while the hosts are disturbed."""
    with start_hosts(TWO) as hosts:
        hosts.start(calls, seconds, 0.0, kind, environment={"SHARDWEAVE_TIMEOUT": "60"})
        hosts.wait_for("running")
        disturb(hosts)
        return values_of(hosts.ends(120))


def stall(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.set_link(1, False)
        time.sleep(1.5)
        hosts.set_link(1, True)
        time.sleep(1.0)


def drop_packets(hosts: Hosts) -> None:
    """A queue of a few packets, as a switch that is overloaded has."""
    hosts.shape(1, 0.2, queue_bytes=5_000)
    hosts.wait_for("disturbed")
    assert hosts.dropped(1) > 20, "the link was to drop packets"


def slow_down(hosts: Hosts) -> None:
    for _ in range(12):
        hosts.signal(1, signal.SIGSTOP)
        time.sleep(0.3)
        hosts.signal(1, signal.SIGCONT)
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("disturb", "kind"), [(stall, "dispatch"), (drop_packets, "redistribute"), (slow_down, "dispatch")]
)
def test_calls_survive(disturb: Callable[[Hosts], None], kind: str, start_hosts: Callable[..., Hosts]) -> None:
    (number,) = set(disturbed(start_hosts, disturb, 8.0, kind))
    assert number > 3


@pytest.mark.long
def test_stopped_host_is_named(start_hosts: Callable[..., Hosts]) -> None:
    """Its connections stay open; when it goes on, its ranks raise as well."""
    hosts, ends, seconds = fault(start_hosts, lambda hosts: stop_for(hosts, TIMEOUT + 4.0))
    with hosts:
        check_named(ends, TWO[0], TWO[1], seconds)
        assert all(ends[rank].error in ("PeerError", "MeetingTimeoutError") for rank in TWO[1]), ends[2:]
        assert len(set(hosts.run(calls, 0.5))) == 1


def stop_for(hosts: Hosts, seconds: float) -> None:
    hosts.signal(1, signal.SIGSTOP)
    time.sleep(seconds)
    hosts.signal(1, signal.SIGCONT)


def hour_ahead(rank: int) -> int:
    """Calls and a trace on ranks of which those of one host read a clock that is an hour ahead."""
    if rank in TWO[1]:
        read, read_ns = time.time, time.time_ns
        time.time, time.time_ns = lambda: read() + 3600.0, lambda: read_ns() + 3600 * 10**9
    with shardweave.tracing.record(SHARED / "trace.json"):
        return calls(rank, 1.0, 0.0, "dispatch")


@pytest.mark.long
def test_clocks_an_hour_apart(start_hosts: Callable[..., Hosts]) -> None:
    with start_hosts(TWO) as hosts:
        assert len(set(hosts.run(hour_ahead))) == 1
        assert hosts.run_on_hosts(merged) == [(0, 1, 2, 3)] * 2


def merged(host: int) -> tuple[int, ...]:
    traces = [Trace.read(file) for file in SHARED.glob("trace.rank*.json")]
    assert max(trace.alive[0] for trace in traces) - min(trace.alive[1] for trace in traces) > 3000.0
    return merge_traces(traces).ranks


def namespaces(rank: int) -> list[str]:
    report("running")
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "mnt")]


def alive_in(found: set[str]) -> list[str]:
    """Processes of this machine in one of these namespaces. A namespace ends with its last process."""
    alive = []
    for link in Path("/proc").glob("[0-9]*/ns/*"):
        with suppress(OSError):
            if os.readlink(link) in found:
                alive.append(str(link))
    return alive


def wait_until_gone(found: set[str]) -> None:
    deadline = time.monotonic() + 20
    while alive := alive_in(found):
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def test_nothing_is_left_of_hosts(start_hosts: Callable[..., Hosts]) -> None:
    with start_hosts([[0], [1]]) as hosts:
        found = {name for of_rank in hosts.run(namespaces) for name in of_rank}
        assert len(found) == 6 and alive_in(found)
        assert not found & {os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "mnt")}
        interfaces = [path.name for path in Path("/sys/class/net").iterdir()]
        assert "host0" not in interfaces and SWITCH not in interfaces
    wait_until_gone(found)


def in_shared_memory(host: int) -> list[str]:
    return os.listdir("/dev/shm")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["anonymous", "named"])
def test_killed_ranks_leave_no_shared_memory(kind: str, start_hosts: Callable[..., Hosts]) -> None:
    environment = {"SHARDWEAVE_SEGMENTS": kind, "SHARDWEAVE_TIMEOUT": str(TIMEOUT)}
    with start_hosts(TWO) as hosts:
        hosts.start(calls, 300.0, environment=environment)
        hosts.wait_for("running")
        hosts.signal(1, signal.SIGKILL)
        ends = hosts.ends(TIMEOUT + 60)
        assert [end.error for end in ends[:2]] == ["PeerError"] * 2 and [end.exit_code for end in ends[2:]] == [-9] * 2
        # What was killed cannot clean up: the next ranks of the host do.
        assert len(set(hosts.run(calls, 0.2, environment=environment))) == 1
        assert hosts.run_on_hosts(in_shared_memory) == [[], []]
