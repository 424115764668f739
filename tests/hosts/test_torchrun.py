"""A program that `torchrun` starts on two hosts, with one agent each, which meet by c10d."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from shardweave.bench.harness.hosts import Hosts
from shardweave.bench.harness.namespaces import SHARED

PROGRAM = """
import json, os, socket
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
import shardweave

dist.init_process_group("gloo")
rank, whole = dist.get_rank(), torch.arange(96.0).view(12, 8)
mesh = init_device_mesh("cpu", (2, 2))
x = DTensor.from_local(whole.chunk(4)[rank].clone(), mesh, [Shard(0), Shard(0)], run_check=False)
with shardweave.installed():
    columns = x.redistribute(placements=[Replicate(), Shard(1)]).to_local()
right = columns.equal(whole.chunk(2, 1)[mesh.get_local_rank(1)])
dispatcher = shardweave.TokenDispatcher(num_experts=8, top_k=2, hidden=8, max_tokens=3, dtype=torch.float32)
rows, ids = x.to_local(), torch.tensor([[0, 7], [2, 5], [6, 1]])
routed = dispatcher.dispatch(rows, ids, torch.full((3, 2), 0.5))
right = right and dispatcher.combine(routed.x.clone(), routed).equal(rows)
found = [right, socket.gethostname(), shardweave.stats().transports[0, 1, 2, 3], dict(shardweave.stats().delegations)]
with open(f"{os.environ['OUT']}/{rank}", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


def agent(host: int) -> str:
    """Run one agent of torchrun. Returns what it printed, if it failed."""
    (SHARED / f"program{host}.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400", "--rdzv-id=1", f"--local-addr=host{host}"]
    environment = {"OUT": str(SHARED), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*command, str(SHARED / f"program{host}.py")], capture_output=True, text=True, timeout=300, env=environment
    )
    return (done.stdout + done.stderr)[-4000:] if done.returncode else ""


def results(host: int) -> list[list[object]]:
    return [json.loads((SHARED / str(rank)).read_text()) for rank in range(4)]


@pytest.mark.multi
@pytest.mark.long
def test_torchrun_on_two_hosts(start_hosts: Callable[..., Hosts]) -> None:
    with start_hosts([[0, 1], [2, 3]]) as hosts:
        assert hosts.run_on_hosts(agent, timeout=320) == ["", ""]
        found, _ = hosts.run_on_hosts(results)
        into = [received for received, _ in hosts.bytes()]
    for rank, (right, name, transport, delegations) in enumerate(found):
        assert right and name in ("host0", "host1"), (rank, found)
        assert transport == "hierarchical: 4 ranks are on 2 machines" and not delegations
    assert sorted(name for _, name, *_ in found) == ["host0", "host0", "host1", "host1"] and min(into) > 0
