"""Bytes received, by formula, are those that come: ranks in a network of their own, whose loopback counts them."""

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
from shardweave.bench.baselines.token_layers import plain_layer, shardweave_layer
from shardweave.bench.harness.ranks import Send, messages_of
from shardweave.bench.suites.suite_dispatch import Tokens, inputs_of
from shardweave.bench.suites.suite_dispatch import bytes_of as bytes_of_tokens
from shardweave.bench.suites.suite_redistribute import bytes_of, calls_of
from shardweave.bench.workloads import Workload

RANKS, SIDE = 4, 1024
SHARED_MEMORY = "ours"
# Redistributions in which every rank receives the same number of bytes.
CASES = [((4,), "S0", "R"), ((4,), "S0", "S1"), ((4,), "P", "S0"), ((4,), "P", "R"), ((2, 2), "S0 S1", "R R")]
# Headers of packets, of 64 KiB on a loopback; gloo's messages beside the data and those of two barriers.
MOST_HEADERS, MOST_BESIDE = 0.01, 1 << 14
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41


@pytest.mark.multi
@pytest.mark.long
def test_bytes_by_formula_are_those_on_the_wire() -> None:
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    done = subprocess.run([*alone, sys.executable, __file__], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout.splitlines()[-1])
    assert len(messages) == len(CASES) + 1
    for message in messages:
        for contender, (formula, received) in message["contenders"].items():
            expected = 0 if contender == SHARED_MEMORY else formula
            most = expected * (1 + MOST_HEADERS) + MOST_BESIDE
            assert expected <= received <= most, f"{message['case']}, {contender}: {expected} expected, {received}"


def main() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
    print(json.dumps(messages_of(rank_main, RANKS, {})[0]))


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    for sizes, source, target in CASES:
        names = tuple("xy"[: len(sizes)])
        mesh, shape = init_device_mesh("cpu", sizes, mesh_dim_names=names), (SIDE, SIDE)
        name = f"{source} → {target}"
        case = Case(Workload(name, "", sizes, names, source, target, "float32", shape, shape), mesh)
        program = shardweave.plan(mesh, shape, "float32", source, target)
        formula = bytes_of(case, program)
        calls = {contender: partial(call, case.source) for contender, call in calls_of(case, mesh, program).items()}
        send({"case": name, "contenders": {c: (formula[c], received_by(call, size)) for c, call in calls.items()}})
    # Of token dispatch ranks do not receive the same number of bytes: the mean.
    mesh, tokens = init_device_mesh("cpu", (size,)), Tokens(tokens=256, hidden=512, backward=False)
    x, ids, weights, _ = inputs_of(tokens, rank)
    total = torch.tensor(bytes_of_tokens(tokens, ids, rank, size)[0])
    dist.all_reduce(total)
    layers = {
        "ours, on gloo": shardweave_layer(mesh, tokens.hidden, tokens.tokens, "process_group"),
        "torch.distributed": plain_layer,
    }
    with torch.no_grad():
        received = {c: received_by(partial(layer, x, ids, weights, None), size) for c, layer in layers.items()}
    send({"case": "dispatch", "contenders": {c: (int(total) // size, nbytes) for c, nbytes in received.items()}})


def received_by(call: Callable[[], Any], ranks: int) -> float:
    """The bytes that a call receives on a rank."""
    call()  # connections are made, programs bound
    counts = []
    for action in (lambda: None, call):
        dist.barrier()  # nothing moves until all have read
        action()
        dist.barrier()
        counts.append(received_on_loopback())
    dist.barrier()
    return (counts[1] - counts[0]) / ranks


def received_on_loopback() -> int:
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (loopback,) = (line for line in lines if line.lstrip().startswith("lo:"))
    return int(loopback.partition(":")[2].split()[0])


if __name__ == "__main__":
    main()
