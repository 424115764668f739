"""Segments of another user, of a process that has ended, and of nobody: none is mapped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import end_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardweave
from shardweave.runtime.transports import shared_memory
from shardweave.runtime.transports.select import current_transports
from shardweave.runtime.transports.shared_memory.segments import Segment, SegmentKey, open_segment, process_token

NOBODY = 65534
KINDS = ("anonymous", "named")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

ATTACKS = """
import ctypes, json, os, sys
path, user, pid, fd, address = sys.argv[1], *map(int, sys.argv[2:6])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)  # a process that root starts as another user, with nothing that was open

def pidfd_getfd():
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    if syscall(438, os.pidfd_open(pid), fd, 0) < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")

def write_memory():
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(b"attack")

attacks = {
    "read": lambda: os.open(path, os.O_RDONLY), "write": lambda: os.open(path, os.O_RDWR),
    "truncate": lambda: os.truncate(path, 0), "unlink": lambda: os.unlink(path),
    "list": lambda: os.listdir(f"/proc/{pid}/fd"), "map file": lambda: os.listdir(f"/proc/{pid}/map_files"),
    "memory": write_memory, "descriptor": pidfd_getfd,
}
ends = {}
for name in sys.argv[6:] or attacks:
    try:
        attacks[name]()
        ends[name] = "done"
    except PermissionError:
        ends[name] = "refused"
print(json.dumps(ends))
"""


@pytest.mark.plan
@as_root
@pytest.mark.parametrize("kind", KINDS)
def test_other_user_can_neither_map_nor_write_a_segment(kind: str) -> None:
    segment = Segment("shardweave-test", 4096, kind == "named")
    segment.bytes.fill_(7)
    key = segment.key

    def attacked(user: int, *names: str) -> dict[str, str]:
        arguments = [key.path, *map(str, (user, key.pid, segment._descriptor, segment.address)), *names]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ATTACKS, *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    ends = attacked(NOBODY)
    assert len(ends) == 8 and set(ends.values()) == {"refused"}
    assert (segment.bytes == 7).all() and os.stat(key.path).st_size == 4096
    # On a process of one's own they work: those above fail because it is another user's.
    names = "read", "write", "list", "memory", "descriptor"
    assert attacked(os.geteuid(), *names) == dict.fromkeys(names, "done")
    assert bytes(segment.bytes[:7].tolist()) == b"attack\7"


@contextmanager
def replaced(kind: str) -> Iterator[SegmentKey]:
    """The key of a segment of this process, in whose place there is something else."""
    segment = Segment("shardweave-test", 4096, kind.endswith("named"))
    key, opened = segment.key, []
    if kind == "directory":
        opened = [os.open("/", os.O_RDONLY)]
    elif kind == "socket":
        opened = list(map(socket.socket.detach, socket.socketpair()))
    elif kind == "pipe":
        opened = list(os.pipe())
    elif kind == "file":
        opened = [os.open(__file__, os.O_RDONLY)]
    elif kind == "other segment":
        opened = [os.memfd_create(f"shardweave-control-{'0' * 16}")]
    elif kind == "closed":
        os.close(segment._descriptor)
    elif kind == "other user's, named":
        os.chown(key.path, NOBODY, NOBODY)
    elif kind == "other user's":
        os.fchown(segment._descriptor, NOBODY, NOBODY)
    elif kind == "other process, named":
        key = key._replace(token="0" * 16)
    if opened:
        os.dup2(opened[0], segment._descriptor, inheritable=False)
    try:
        yield key
    finally:
        for descriptor in opened:
            os.close(descriptor)


@pytest.mark.plan
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("directory", FileNotFoundError), ("socket", FileNotFoundError), ("pipe", FileNotFoundError),
        ("file", FileNotFoundError), ("other segment", FileNotFoundError), ("closed", FileNotFoundError),
        ("other process, named", FileNotFoundError),
        pytest.param("other user's", PermissionError, marks=as_root),
        pytest.param("other user's, named", PermissionError, marks=as_root),
    ],
)  # fmt: skip
def test_what_is_not_the_segment_is_not_mapped(kind: str, error: type[OSError]) -> None:
    content = Path(__file__).read_bytes()
    with replaced(kind) as key, pytest.raises(error):
        open_segment(key)
    assert Path(__file__).read_bytes() == content


@pytest.mark.plan
def test_keys_are_parsed_strictly() -> None:
    key = SegmentKey(12, 3, True, "0123456789abcdef")
    assert str(key) == "12 3 named 0123456789abcdef" and SegmentKey.parse(str(key)) == key
    assert process_token() == process_token() and SegmentKey.parse(f"1 2 anonymous {process_token()}")
    wrong = ["", "12 3 named", "12 3 wooden 0123456789abcdef", "12 3 named ../../../etc/pass", f"{key}\n"]
    for text in wrong + [f"{pid} 3 named {key.token}" for pid in ("-1", "1" * 20, "\u0661", "", "0x1")]:
        assert SegmentKey.parse(text) is None, text


def stale_control(rank: int) -> torch.Tensor:
    """Where the control page of rank 1 was, there is memory of something else when rank 0 first maps it."""
    transport = current_transports()._shared_memory()
    victim = os.memfd_create("victim")
    os.ftruncate(victim, 1 << 20)
    if rank == 1:
        os.dup2(victim, transport._control._descriptor, inheritable=False)
    return _redistributed_beside(victim)


def stale_pool(rank: int) -> torch.Tensor:
    """The same with the memory of outputs, of which the control page, which is mapped, gives the descriptor."""
    pool = current_transports()._shared_memory()._pool
    kept = pool.empty((5,), torch.float32)  # the first segment
    victim = os.memfd_create("victim")
    os.ftruncate(victim, pool.segments[0].nbytes)
    if rank == 1:
        os.dup2(victim, pool.segments[0]._descriptor, inheritable=False)
    result = _redistributed_beside(victim)
    return result + 0 * kept.nan_to_num(0, 0, 0).sum()


def failed_pool(rank: int) -> torch.Tensor:
    """Rank 1 has failed because of another rank, and has removed the names of memory that rank 0 has not mapped."""
    pool = current_transports()._shared_memory()._pool
    pool.empty((5,), torch.float32)
    if rank == 1:
        current_transports().rendezvous.reports.fail("rank 1 failed: rank 7 is the cause")
        os.unlink(pool.segments[0].key.path)
    return _redistributed_beside(None)


def foreign_key(rank: int) -> torch.Tensor:
    """Rank 1 writes the key of another process to the store."""
    transport = current_transports()._shared_memory()
    if rank == 1:
        key = transport._control.key
        rendezvous = current_transports().rendezvous
        rendezvous.write(shared_memory.transport._process_key(1), str(key._replace(token="f" * 16)))
    dist.distributed_c10d._get_default_store().set(f"written/{rank}", "")
    dist.distributed_c10d._get_default_store().wait(["written/0", "written/1"])
    return _redistributed_beside(None)


def _redistributed_beside(victim: int | None) -> torch.Tensor:
    try:
        x = DTensor.from_local(torch.full((2, 3), 1.0), DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False)
        return shardweave.redistribute(x, [Replicate()], transport="shared_memory").to_local()
    finally:
        if victim is not None:
            with open(victim, "rb") as file:
                assert not any(file.read()), "memory of something else was written"


@pytest.mark.multi
@pytest.mark.parametrize("function", [stale_control, stale_pool, foreign_key], ids=lambda function: function.__name__)
def test_stale_and_foreign_segments_are_refused(function: Callable[[int], torch.Tensor]) -> None:
    environment = {"SHARDWEAVE_TIMEOUT": "10", "SHARDWEAVE_SEGMENTS": "anonymous"}
    ends = end_ranks(function, 2, environment=environment)
    assert ends[0].error == "PeerError" and "gone" in ends[0].message, ends
    assert "victim" in ends[0].message or function is foreign_key, ends
    assert ends[1].error in ("PeerError", "MeetingTimeoutError"), ends
    assert all("AssertionError" not in end.message for end in ends), ends


@pytest.mark.multi
def test_error_names_the_cause_where_a_failed_peer_has_removed_its_memory() -> None:
    ends = end_ranks(failed_pool, 2, environment={"SHARDWEAVE_TIMEOUT": "10", "SHARDWEAVE_SEGMENTS": "named"})
    assert ends[0].error == "PeerError" and "rank 7 is the cause" in ends[0].message, ends
