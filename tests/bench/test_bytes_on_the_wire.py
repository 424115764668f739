"""Bytes received, by formula, equal those on the wire: ranks in a network of their own, whose loopback counts them."""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardweave
from shardweave.bench.baselines.stock_dtensor import Case
from shardweave.bench.baselines.stock_plans import Stock
from shardweave.bench.baselines.token_layers import plain_layer, shardweave_layer
from shardweave.bench.harness.collect import run_ranks
from shardweave.bench.harness.ranks import Send
from shardweave.bench.suites.suite_dispatch import Tokens, inputs_of
from shardweave.bench.suites.suite_dispatch import bytes_of as bytes_of_tokens
from shardweave.bench.suites.suite_redistribute import bytes_of, calls_of
from shardweave.bench.workloads import Workload

RANKS, SIDE = 4, 1024
SHARED_MEMORY = "ours"
# Redistributions in which every rank receives as many.
CASES = [((4,), "S0", "R"), ((4,), "S0", "S1"), ((4,), "P", "S0"), ((4,), "P", "R"), ((2, 2), "S0 S1", "R R")]
# Headers of packets, of 64 KiB on a loopback, and what gloo says beside the data; and of two barriers.
MOST_HEADERS, MOST_BESIDE = 0.01, 1 << 14
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41


@pytest.mark.multi
def test_bytes_by_formula_are_those_on_the_wire() -> None:
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    done = subprocess.run([*alone, sys.executable, __file__], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert len(cases) == len(CASES) + 1
    for case, contenders in cases.items():
        for contender, (formula, measured) in contenders.items():
            formula *= contender != SHARED_MEMORY
            most = formula * (1 + MOST_HEADERS) + MOST_BESIDE
            assert formula <= measured <= most, f"{case}, {contender}: {formula} by formula, {measured} measured"


def main() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
    cases: dict[str, dict[str, tuple[int, float]]] = {}
    run_ranks(rank_main, RANKS, {}, lambda case, by_rank: cases.update({case: by_rank[0]["bytes"]}))
    print(json.dumps(cases))


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    del config
    for sizes, source, target in CASES:
        names = tuple("xy"[: len(sizes)])
        mesh, shape = init_device_mesh("cpu", sizes, mesh_dim_names=names), (SIDE, SIDE)
        name = f"{source} → {target}"
        case = Case(Workload(name, "", sizes, names, source, target, "float32", shape, shape), mesh)
        program = shardweave.plan(mesh, shape, "float32", source, target)
        formula = bytes_of(case, Stock(sizes, graph=False), program)
        calls = calls_of(case, mesh, program).items()
        send(
            {
                "case": name,
                "bytes": {c: (formula[c], received_by(partial(call, case.source), size)) for c, call in calls},
            }
        )
    send({"case": "dispatch", "bytes": dispatched(rank, size)})


def dispatched(rank: int, size: int) -> dict[str, tuple[int, float]]:
    """By all ranks, which do not receive as many: the mean."""
    mesh, shape = init_device_mesh("cpu", (size,)), Tokens(tokens=256, hidden=512, backward=False)
    x, ids, weights, _ = inputs_of(shape, rank)
    formula = torch.tensor(bytes_of_tokens(shape, ids, rank, size)[0])
    dist.all_reduce(formula)
    layers = {
        "ours, on gloo": shardweave_layer(mesh, shape.hidden, shape.tokens, "process_group"),
        "torch.distributed": plain_layer,
    }
    with torch.no_grad():
        return {
            contender: (int(formula) // size, received_by(lambda layer=layer: layer(x, ids, weights, None), size))
            for contender, layer in layers.items()
        }


def received_by(call: Callable[[], Any], ranks: int) -> float:
    """Bytes a rank and call."""
    call()  # connections are made, programs bound
    dist.barrier()
    before = received()
    dist.barrier()  # nothing moves until all have read
    call()
    dist.barrier()
    after = received()
    dist.barrier()
    return (after - before) / ranks


def received() -> int:
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (loopback,) = (line for line in lines if line.lstrip().startswith("lo:"))
    return int(loopback.partition(":")[2].split()[0])


if __name__ == "__main__":
    main()
