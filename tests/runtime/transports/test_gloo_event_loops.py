"""The scheduling policy of gloo's event loops."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardweave
from shardweave.errors import ArgumentError, DisagreementError
from shardweave.runtime.transports import gloo_event_loops
from shardweave.runtime.transports.gloo_event_loops import default_policy, schedule_event_loops

SCHED_BATCH, SCHED_IDLE, SCHED_OTHER = 3, 5, 0  # of Linux
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch gives gloo's threads no names before 2.13"),
]


def policies() -> dict[str, list[int]]:
    """The policies of gloo's event loops, and of all other threads of this process."""
    found: dict[str, list[int]] = {"loops": [], "others": []}
    for task in Path("/proc/self/task").iterdir():
        kind = "loops" if (task / "comm").read_text().startswith("gloo_tcp_loop") else "others"
        found[kind].append(os.sched_getscheduler(int(task.name)))
    return found


def move(group: dist.ProcessGroup | None = None) -> None:
    """One exchange, of uneven shards, by gloo."""
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    full = torch.arange(7.0 * 3).view(7, 3)
    source = distribute_tensor(full, mesh, [Shard(0)])
    moved = shardweave.redistribute(source, [Replicate()], transport="process_group")
    assert torch.equal(moved.to_local(), full)


def of_all_groups(rank: int) -> list[dict[str, list[int]]]:
    found = [policies()]
    move()
    found.append(policies())
    group = dist.new_group([0, 1])
    assert group is not None
    move(group)
    return [*found, policies()]


def test_all_groups_that_are_used() -> None:
    for before, after, with_group in run_ranks(of_all_groups, 2):
        assert before["loops"] == [SCHED_OTHER]  # torch names its thread so, and leaves its policy
        assert after["loops"] == [SCHED_BATCH]
        assert with_group["loops"] == [SCHED_BATCH] * 2
        assert set(with_group["others"]) == {SCHED_OTHER}  # no other thread


def unchanged(rank: int, value: str) -> list[dict[str, list[int]]]:
    os.environ["SHARDWEAVE_GLOO_SCHED_BATCH"] = value
    move()
    return [policies()]


@pytest.mark.parametrize(("value", "expected"), [("0", SCHED_OTHER), ("1", SCHED_BATCH), ("", SCHED_BATCH)])
def test_switch(value: str, expected: int) -> None:
    for (found,) in run_ranks(unchanged, 2, value):
        assert found["loops"] == [expected]


def test_switch_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWEAVE_GLOO_SCHED_BATCH", "yes")
    with pytest.raises(ArgumentError, match="SHARDWEAVE_GLOO_SCHED_BATCH: 'yes'; allowed: 0, 1"):
        schedule_event_loops()


def with_other_policy(rank: int) -> list[dict[str, list[int]]]:
    (loop,) = gloo_event_loops._event_loops()
    os.sched_setscheduler(loop, SCHED_IDLE, os.sched_param(0))
    move()
    with default_policy():
        return [policies()]


def test_policies_of_users_are_kept() -> None:
    for (found,) in run_ranks(with_other_policy, 2):
        assert found["loops"] == [SCHED_IDLE]


def in_turns(rank: int) -> list[dict[str, list[int]]]:
    found = []
    for _ in range(2):
        move()
        with default_policy():
            found.append(policies())
            move()  # nothing sets it again meanwhile
            found.append(policies())
        found.append(policies())
    return found


def test_policy_of_torch_in_turns() -> None:
    for found in run_ranks(in_turns, 2):
        assert [one["loops"] for one in found] == [[SCHED_OTHER], [SCHED_OTHER], [SCHED_BATCH]] * 2


def waiting(rank: int) -> list[dict[str, list[int]]]:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    source = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    for _ in range(2):
        if rank == 1:
            time.sleep(0.5)  # longer than a rank waits before it looks whether its peer is still there
        shardweave.redistribute(source, [Replicate()], transport="shared_memory")
    return [policies()]


def test_waits_in_shared_memory_change_nothing() -> None:
    for (found,) in run_ranks(waiting, 2):
        assert found["loops"] == [SCHED_OTHER]


def test_ids_of_another_pid_namespace_are_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/comm").write_text("gloo_tcp_loop\n")
    monkeypatch.setattr(gloo_event_loops, "_TASKS", tmp_path)
    assert list(gloo_event_loops._event_loops()) == []
    (tmp_path / str(threading.get_native_id())).mkdir()
    assert list(gloo_event_loops._event_loops()) == [1]


def different(rank: int) -> str:
    os.environ["SHARDWEAVE_GLOO_SCHED_BATCH"] = str(rank + 1)
    try:
        move()
    except (ArgumentError, DisagreementError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_value_that_one_rank_refuses() -> None:
    """The other rank is told at once."""
    told, refused = run_ranks(different, 2)
    text = "SHARDWEAVE_GLOO_SCHED_BATCH: '2'; allowed: 0, 1"
    assert refused == f"ArgumentError: {text}" and told.startswith("DisagreementError: ") and text in told


def refused(rank: int) -> list[dict[str, list[int]]]:
    def refuse(*given: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.sched_setscheduler = refuse
    move()
    return [policies()]


def test_calls_where_policies_may_not_be_set() -> None:
    for (found,) in run_ranks(refused, 2):
        assert found["loops"] == [SCHED_OTHER]
