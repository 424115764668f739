"""Hosts that vanish, links that stall or drop packets, a slow host, clocks apart: named in time, nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.bench.harness.hosts import Hosts, RankEnd, report

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
    dispatcher = shardweave.TokenDispatcher(num_experts=8, top_k=2, hidden=64, max_tokens=ROWS)
    ids = torch.arange(2 * len(x.to_local())).view(-1, 2) % 8
    done, start, go_on = 0, time.monotonic(), True
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
        time.sleep(every)
    return done


def fault(
    start_hosts: Callable[..., Hosts], action: Callable[[Hosts], None], kind: str = "redistribute"
) -> tuple[Hosts, list[RankEnd], float]:
    """The ends of ranks after `action`, and the seconds from then on. The hosts are still there."""
    hosts = start_hosts(TWO)
    try:
        hosts.start(calls, 300.0, 0.01, kind, environment={"SHARDWEAVE_TIMEOUT": str(TIMEOUT)})
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
@pytest.mark.parametrize("kind", ["redistribute", "dispatch"])
@pytest.mark.parametrize("how", ["killed", "powered off", "cut off"])
@pytest.mark.parametrize("host", [0, 1])
def test_vanished_host_is_named(host: int, how: str, kind: str, start_hosts: Callable[..., Hosts]) -> None:
    hosts, ends, seconds = fault(start_hosts, vanish(host, how), kind)
    with hosts:
        left, gone = TWO[1 - host], TWO[host]
        check_named(ends, left, gone, seconds)
        if how == "cut off":
            check_named(ends, gone, left, seconds)
            hosts.set_link(host, True)
            assert len(set(hosts.run(calls, 0.5))) == 1  # what came back goes on


def check_named(ends: list[RankEnd], left: list[int], gone: list[int], seconds: float) -> None:
    """Those that are left have raised in time, and at least one of each host names a rank that is gone."""
    assert seconds < TIMEOUT + SLACK, [end.error for end in ends]
    errors = {rank: ends[rank] for rank in left}
    assert {end.error for end in errors.values()} <= {"PeerError", "MeetingTimeoutError"}, errors
    assert any(f"rank {rank}" in end.message.splitlines()[0] for end in errors.values() for rank in gone), errors
