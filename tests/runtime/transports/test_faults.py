"""Failures between ranks: errors name the rank and are raised in time."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from dead_segments import segments_of_the_dead
from rank_processes import end_ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import ArgumentError

pytestmark = pytest.mark.multi
TRANSPORTS = ("shared_memory", "process_group", "hierarchical")


def environment_of(transport: str, timeout: int) -> dict[str, str]:
    return {"SHARDWEAVE_TIMEOUT": str(timeout), "SHARDWEAVE_NODE_SIZE": "2" if transport == "hierarchical" else ""}


def disagree(rank: int, transport: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    rows = 8 if rank != 2 else 12  # as of uneven shards without their global shape
    d = DTensor.from_local(torch.full((rows // 4, 4), float(rank)), mesh, [Shard(0)], run_check=False)
    shardweave.redistribute(d, [Shard(1)], transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_different_requests_raise(transport: str) -> None:
    ends = end_ranks(disagree, 4, transport, environment=environment_of(transport, 20), timeout=60)
    assert ends[2].error == "DisagreementError"
    assert "made different requests" in ends[2].message and "rank 2" in ends[2].message
    assert all(end.error is not None for end in ends)
    error_texts = [end for end in ends if end.error == "DisagreementError"]
    assert all("no tensor of yours was written" in end.message for end in error_texts)
    assert "only sizes differ: is shape= of DTensor.from_local missing" in ends[2].message
    if transport != "process_group":
        assert {end.error for end in ends} <= {"DisagreementError", "PeerError"}


def misfit_on_one(rank: int, transport: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    # Ranks that share a session can read the text of a rank even after it has ended.
    shardweave.redistribute(distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)]), [Shard(1)], transport=transport)
    rows = 3 if rank == 2 else 2
    d = DTensor.from_local(
        torch.zeros(rows, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 4)), stride=(4, 1)
    )
    shardweave.redistribute(d, [Replicate()], transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_wrong_local_shape_on_one_rank_raises_on_peers(transport: str) -> None:
    start = time.monotonic()
    ends = end_ranks(misfit_on_one, 4, transport, environment=environment_of(transport, 60), timeout=60)
    assert time.monotonic() - start < 45
    assert ends[2].error == "ArgumentError" and "gave shape (3, 4)" in ends[2].message
    others = [end for rank, end in enumerate(ends) if rank != 2]
    assert any(end.error == "DisagreementError" and "rank 2" in end.message for end in others)
    assert {end.error for end in others} <= {"DisagreementError", "PeerError"}


def one_rank_alone(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(24.0).view(4, 6)
    if rank == 3:
        d = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
        assert torch.equal(shardweave.redistribute(d, [Shard(0), Shard(1)]).to_local(), whole[2:, 3:])


def test_local_program_needs_no_peers() -> None:
    run_ranks(one_rank_alone, 4, environment={"SHARDWEAVE_TIMEOUT": "5"})


def die_or_wait(rank: int, failure: str, transport: str = "shared_memory") -> None:
    mesh = init_device_mesh("cpu", (4,))
    d = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])
    for call in range(50):
        if rank == 1 and call == 30:
            if failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if failure == "exit":
                os._exit(0)
            time.sleep(5)
        shardweave.redistribute(d, [Shard(1)], transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("failure", ["killed", "exit"])
def test_dead_rank_is_named(failure: str, transport: str) -> None:
    start = time.monotonic()
    ends = end_ranks(die_or_wait, 4, failure, transport, environment=environment_of(transport, 60), timeout=60)
    # Far below the timeout: the death itself was noticed.
    assert time.monotonic() - start < 45
    others = [end for r, end in enumerate(ends) if r != 1]
    assert any("rank 1" in end.message for end in others) and {end.error for end in others} == {"PeerError"}
    # Each names the call that it was waiting in.
    assert all(" of ranks (0, 1, 2, 3): S0 → S1 float32[8, 8] on 4" in end.message for end in others), others


def await_one(rank: int, call: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False)
    if rank == 3:
        time.sleep(1.2)
    elif call == "redistribute":
        shardweave.redistribute(x, [Shard(1)])
    elif call == "redistribute on a given topology":
        shardweave.redistribute(x, [Shard(1)], topology="nvlink")
    elif call == "redistribute_batch":
        shardweave.redistribute_batch([x], ["S1"])
    elif call == "prepare":
        shardweave.prepare(mesh, 1000)
    else:
        shardweave.TokenDispatcher(mesh, num_experts=8, top_k=2, hidden=16, max_tokens=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("redistribute", r"finding the topology for Spec\(f32\[8, 4\]\(S\(0\)\)\) to Spec\(f32\[8, 4\]\(S\(1\)\)\)"),
        ("redistribute on a given topology", r"Spec\(f32\[8, 4\]\(S\(0\)\)\) to Spec\(f32\[8, 4\]\(S\(1\)\)\)"),
        ("redistribute_batch", r"finding the topology for Spec\(f32\[8, 4\]\(S\(0\)\)\) to "),
        ("prepare", r"prepare\(max_bytes=1000, "),
        ("TokenDispatcher", "making a token dispatcher of 8 experts, top 2, hidden 16"),
    ],
)
def test_first_call_without_one_rank_names_the_request(call: str, text: str) -> None:
    environment = {"SHARDWEAVE_TIMEOUT": "1", "SHARDWEAVE_NODE_SIZE": "2" if call == "redistribute" else ""}
    ends = end_ranks(await_one, 4, call, environment=environment, timeout=30)
    assert ends[3].error is None
    for end in ends[:3]:
        assert end.error in ("MeetingTimeoutError", "PeerError")
        assert re.search(rf"; rank \d was waiting for it in call 1 of ranks \(0, 1, 2, 3\): {text}", end.message), end


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stalled_rank_times_out(transport: str) -> None:
    ends = end_ranks(die_or_wait, 4, "stall", transport, environment=environment_of(transport, 2), timeout=30)
    errors = [end for r, end in enumerate(ends) if r != 1]
    assert any(end.error == "MeetingTimeoutError" and "rank 1" in end.message for end in errors)
    assert {end.error for end in errors} <= {"MeetingTimeoutError", "PeerError"}


def bad_arguments(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    d = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0), Shard(1)])

    def refused(kind: type[Exception], *parts: str):
        return pytest.raises(kind, match="(?s)" + ".*".join(parts))

    with refused(ArgumentError, "placements", "mesh dim 1", "tensor dim 2", "allowed: -2..1"):
        shardweave.redistribute(d, [Shard(0), Shard(2)])
    with refused(ArgumentError, "placements", "1 given", "mesh of 2"):
        shardweave.redistribute(d, [Shard(0)])
    with refused(ArgumentError, "shard_order", "tensor dim 0", r"\(0, 0\)", "allowed", r"\(0, 1\)"):
        shardweave.redistribute(d, [Shard(0), Shard(0)], shard_order={0: (0, 0)})
    with refused(ArgumentError, "transport", "smoke", "shared_memory"):
        shardweave.redistribute(d, [Shard(1), Shard(0)], transport="smoke")
    misfit = DTensor.from_local(
        torch.zeros(3, 3), mesh, [Shard(0), Shard(1)], run_check=False, shape=torch.Size((4, 6)), stride=(6, 1)
    )
    with refused(ArgumentError, "local tensor", r"\(3, 3\)", r"allows only \(2, 3\)"):
        shardweave.redistribute(misfit, [Replicate(), Replicate()])
    # The ranks still agree after all of these errors.
    assert torch.equal(shardweave.redistribute(d, [Replicate(), Replicate()]).to_local(), torch.arange(24.0).view(4, 6))


def test_bad_arguments_raise_before_communication() -> None:
    run_ranks(bad_arguments, 4)


@pytest.mark.parametrize("kind", ["anonymous", "named"])
def test_shared_memory_segments_are_removed(kind: str) -> None:
    before = segments_of_the_dead()
    ends = end_ranks(die_or_wait, 4, "killed", environment={"SHARDWEAVE_SEGMENTS": kind}, timeout=60)
    assert all(end.error == "PeerError" for r, end in enumerate(ends) if r != 1)
    assert segments_of_the_dead() - before == set()


def use_named_segments(rank: int) -> int:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(3e6).view(1500, 2000)
    kept = [shardweave.redistribute(distribute_tensor(whole, mesh, [Shard(0)] * 2), [Shard(1), Replicate()])]
    kept.append(shardweave.redistribute(kept[0], [Replicate(), Replicate()]))
    assert torch.equal(kept[1].to_local(), whole)
    return sum(f"-{os.getpid()}-" in name for name in os.listdir("/dev/shm"))


def test_named_segments_work_and_are_removed_at_exit() -> None:
    before = segments_of_the_dead()
    assert all(named >= 2 for named in run_ranks(use_named_segments, 4, environment={"SHARDWEAVE_SEGMENTS": "named"}))
    assert segments_of_the_dead() - before == set()


def ask_for_unknown_segments(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ArgumentError, match="SHARDWEAVE_SEGMENTS: 'wooden'; allowed: anonymous, named"):
        shardweave.redistribute(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]), [Replicate()])


def test_unknown_segment_kind_raises() -> None:
    run_ranks(ask_for_unknown_segments, 2, environment={"SHARDWEAVE_SEGMENTS": "wooden"})
