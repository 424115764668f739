"""A topology that was found stays: for ranks that join late, ranks that die, and figures that change afterwards."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rank_processes import end_ranks, run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.errors import TransportError
from shardweave.runtime.transports.calibration_cache import keep_calibration, machine_kind

pytestmark = pytest.mark.multi

FOUR, ALL = (0, 1, 2, 3), (0, 1, 2, 3, 4)
NODES = {FOUR: (0, 0, 1, 1), ALL: (0, 0, 1, 1, 2)}
PRETENDED = {"SHARDWEAVE_NODE_SIZE": "2", "SHARDWEAVE_TIMEOUT": "20"}


class Seen(NamedTuple):
    """What a rank plans for ranks that have met."""

    fingerprint: int
    nodes: tuple[int, ...] | None
    call_us: float | None
    explained: str


def sharded(mesh: DeviceMesh) -> DTensor:
    whole = torch.arange(20.0 * 64).view(20, 64)
    part = whole.chunk(mesh.size())[mesh.get_local_rank()].clone()
    return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)


def redistributed(mesh: DeviceMesh) -> None:
    """A call of all ranks of the mesh, whose result is right."""
    gathered = shardweave.redistribute(sharded(mesh), [Replicate()]).to_local()
    assert gathered.equal(torch.arange(20.0 * 64).view(20, 64))


def seen(mesh: DeviceMesh) -> Seen:
    planned = shardweave.plan(mesh, (20, 64), "float32", "S0", "R")
    found = planned.topology
    ranks = mesh.mesh.tolist()
    nodes, call_us = (None, None) if found is None else (tuple(map(found.node_of, ranks)), found.call_us)
    return Seen(planned.digest, nodes, call_us, planned.explain())


def calibrated(rank: int, folder: str, call_us: float) -> None:
    """Let this rank's machine have a figure of its own from now on."""
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    keep_calibration(machine_kind(torch.device("cpu")), {"call_us": call_us})


def joins_late(rank: int, late: int | None, folder: str) -> list[Seen]:
    """What is planned for four ranks, before and after a fifth has joined, and for all five."""
    calibrated(rank, folder, 7.0 if rank == 0 else 90.0)
    four, everyone = DeviceMesh("cpu", list(FOUR)), DeviceMesh("cpu", list(ALL))
    if rank == late:
        time.sleep(1.0)  # has not told anyone where it is
    collected = []
    if rank in FOUR:
        redistributed(four)
        collected.append(seen(four))
        calibrated(rank, folder, 55.0)
    redistributed(everyone)
    if rank in FOUR:
        redistributed(four)
        collected.append(seen(four))
    collected.append(seen(everyone))
    return collected


def check_joined(results: list[list[Seen]]) -> list[Seen]:
    """Assert that all ranks have planned the same before and after; return what a rank of the four has."""
    before, after, of_all = results[0]
    assert before == after and before.nodes == NODES[FOUR] and before.call_us == 7.0
    # Figures are published once, so that those of rank 0 for more ranks are those from before.
    assert of_all.nodes == NODES[ALL] and of_all.call_us == 7.0
    assert all(results[rank] == results[0] for rank in FOUR) and results[4] == [of_all]
    return results[0]


def test_topology_stays_when_a_rank_joins_late(tmp_path: Any) -> None:
    """The fifth rank, on a machine of its own, or one of those that the topology is found for."""
    found = [
        check_joined(run_ranks(joins_late, 5, late, str(tmp_path / str(late)), environment=PRETENDED))
        for late in (None, 4, 3)
    ]
    assert found[0] == found[1] == found[2]


def failed_call(mesh: DeviceMesh) -> str:
    """The error of a call of the mesh's ranks."""
    with pytest.raises(TransportError) as error:
        shardweave.redistribute(sharded(mesh), [Replicate()])
    return f"{type(error.value).__name__}: {error.value}"


def dies(rank: int, gone: int, first_calls: int) -> tuple[Seen, Seen, list[str]]:
    """What is planned for five ranks before and after one has died, and the errors of their next calls.

    Then the others call among themselves: another request, with the nodes of its own ranks. It fails if the transport
    was in use when the rank died.
    """
    left = [r for r in ALL if r != gone]
    everyone, rest = DeviceMesh("cpu", list(ALL)), DeviceMesh("cpu", left)
    for _ in range(first_calls):
        redistributed(everyone)
    # torch raises an error of its own where a rank is gone while it makes the groups of meshes.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"ready/{rank}", "")
    if rank == gone:
        store.wait([f"ready/{other}" for other in ALL])
        os.kill(os.getpid(), signal.SIGKILL)
    before = seen(everyone)
    errors = [failed_call(everyone)]
    after = seen(everyone)
    errors.append(failed_call(everyone))
    if first_calls:
        failed_call(rest)
    else:
        redistributed(rest)
        assert seen(rest).nodes == tuple(NODES[ALL][r] for r in left)
    assert seen(everyone) == before
    return before, after, errors


def check_died(ends: list[Any], gone: int, first_calls: int) -> None:
    left = [end for rank, end in enumerate(ends) if rank != gone]
    assert ends[gone].exit_code == -signal.SIGKILL and all(end.error is None for end in left), ends
    for end in left:
        before, after, errors = end.value
        assert before == after == left[0].value[0]
        assert before.nodes == (NODES[ALL] if first_calls else None)
        for error in errors:
            assert error.startswith(("PeerError: ", "MeetingTimeoutError: ")) and f"rank {gone}" in error, error


@pytest.mark.parametrize(
    "gone, first_calls",
    [(4, 1), (2, 0), pytest.param(0, 1, marks=pytest.mark.long)],
)
def test_dead_rank_is_named_and_no_topology_found_without_it(gone: int, first_calls: int) -> None:
    ends = end_ranks(dies, 5, gone, first_calls, environment={**PRETENDED, "SHARDWEAVE_TIMEOUT": "6"})
    check_died(ends, gone, first_calls)
