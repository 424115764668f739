"""Redistributions and token dispatch between hosts, by shardweave and by stock DTensor or torch.distributed's
all-to-alls, on the same ranks: two hosts of two ranks on this machine, with links of 1 and 10 Gbit/s.

Results are checked first. Bytes are those that enter a host during one call, counted at its link, headers included, of
the host with most; the bound is what has to enter it. All ranks share the cores of this machine, so that at the higher
rate the cores, not the links, may limit both sides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardweave
from shardweave.bench.baselines.stock_dtensor import Case, Unsuitable, digest, mesh_for, moves
from shardweave.bench.baselines.token_layers import EXPERTS, expert_scale, faults_of, plain_layer, shardweave_layer
from shardweave.bench.harness.hosts import Hosts
from shardweave.bench.harness.interleaved import time_sides
from shardweave.bench.harness.link_bytes import bytes_received, least_bytes, least_token_bytes, planned_bytes
from shardweave.bench.harness.measure import Sink
from shardweave.bench.harness.namespaces import HostsUnavailable
from shardweave.bench.suites.rank_rows import put, result
from shardweave.bench.suites.suite_dispatch import Tokens, inputs_of
from shardweave.bench.workloads import Workload, load_workloads
from shardweave.runtime.transports.select import current_transports

SUITE = "hosts"
HOSTS = [[0, 1], [2, 3]]
RANKS = sum(map(len, HOSTS))
GIGABITS = {"full": (1.0, 10.0), "quick": (1.0, 10.0), "dry": (10.0,)}
ROUNDS = {"full": 7, "quick": 3, "dry": 1}
SIDES = {"full": 2048, "quick": 2048, "dry": 16}
LAYOUTS = [
    ("S0 S0", "R R"), ("S0 S1", "S1 S0"), ("P P", "R R"), ("P P", "S0 S0"), ("R S0", "S0 S0"), ("S0 R", "S1 R"),
    ("R S0", "R S1"),
]  # fmt: skip
_TURN_SECONDS, _WARM_CALLS, _LONGEST = 0.3, 2, 7200.0
_BYTES_ARE = (
    "received by a host over its link during a call, headers included, of the host with most; of link: the share that "
    "they take of its rate, of which data may take 95.6%, since packets of 1,514 bytes have 1,448 of data"
)
_HOST_OF = [host for host, ranks in enumerate(HOSTS) for _ in ranks]


@dataclass(frozen=True)
class _Selected:
    """What the ranks measure at one rate, by names without the rate."""

    names: frozenset[str]
    scale: str
    gigabits: float


def workloads(scale: str) -> list[Workload]:
    side = SIDES[scale]
    swept = [
        Workload(f"{source} → {target} {side}×{side} float32", "", (2, 2), ("x", "y"), source, target, "float32",
                 (side, side), (side, side))
        for source, target in (LAYOUTS[:1] if scale == "dry" else LAYOUTS)
    ]  # fmt: skip
    models = [one for one in load_workloads() if moves(one, mesh_for(RANKS))]
    return swept + {"full": models, "quick": models[::8], "dry": []}[scale]


def tokens(scale: str) -> list[Tokens]:
    count, hidden = (5, 8) if scale == "dry" else (512, 1024)
    return [Tokens(count, hidden, backward) for backward in (False, True)]


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    contenders = {one.name: ("ours", "stock") for one in workloads(scale)}
    contenders |= {str(one): ("ours", "torch.distributed") for one in tokens(scale)}
    return {f"{rate:g} Gbit/s: {name}": who for rate in GIGABITS[scale] for name, who in contenders.items()}


def test_hosts(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    for rate in GIGABITS[scale]:
        head = f"{rate:g} Gbit/s: "
        wanted = frozenset(name.removeprefix(head) for name in names if name.startswith(head))
        try:
            with Hosts(HOSTS, rate) as hosts:
                by_rank = hosts.run(rank_main, _Selected(wanted, scale, rate), timeout=_LONGEST) if wanted else []
        except HostsUnavailable as unavailable:
            for case, contenders in cases(scale).items():
                for contender in contenders:
                    if case in names and case.startswith(head):
                        sink.absent(case, contender, f"no hosts here: {unavailable}")
            continue
        for of_case in zip(*by_rank, strict=True):
            put(sink, of_case, head + of_case[0]["case"], timed_if_wrong=["stock"])


def rank_main(rank: int, selected: _Selected) -> list[dict[str, Any]]:
    """The results of each case on this rank."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    results: list[dict[str, Any]] = []
    meshes: dict[tuple[str, ...], DeviceMesh] = {}
    rounds, detail = ROUNDS[selected.scale], {"bytes are": _BYTES_ARE, "gigabits": selected.gigabits}
    for workload in workloads(selected.scale):
        if workload.name not in selected.names:
            continue
        labels = workload.mesh_names
        if labels not in meshes:
            meshes[labels] = init_device_mesh("cpu", mesh_for(RANKS), mesh_dim_names=labels)
        try:
            case = Case(workload, meshes[labels])
        except Unsuitable as error:
            why = dict.fromkeys(("ours", "stock"), str(error))
            results.append({"case": workload.name, **result({}, absent=why)})
            continue
        results.append({"case": workload.name, **_redistributed(case, meshes[labels], rounds, rank, detail)})
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    for shape in tokens(selected.scale):
        if str(shape) in selected.names:
            results.append({"case": str(shape), **_dispatched(shape, mesh, rounds, rank, detail)})
    return results


def _redistributed(case: Case, mesh: DeviceMesh, rounds: int, rank: int, detail: dict[str, Any]) -> dict[str, Any]:
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: shardweave.redistribute(case.source, case.placements),
        "stock": lambda: case.source.redistribute(placements=case.placements),
    }
    outputs = {side: call().to_local() for side, call in sides.items()}
    faults = {side: case.fault(output, pairwise=side == "stock") for side, output in outputs.items()}
    host, sizes, itemsize = _HOST_OF[rank], tuple(mesh.shape), case.dtype.itemsize
    bound = None
    if "/" not in case.source_text + case.target_text and "P" not in case.target_text:
        texts = case.source_text, case.target_text
        bound = least_bytes(sizes, _HOST_OF, case.shape, *texts, itemsize)[host]
    topology = current_transports().machines.find_topology(tuple(range(dist.get_world_size())), torch.device("cpu"))
    program = shardweave.plan(mesh, case.shape, case.dtype, case.source_text, case.target_text, topology=topology)
    return result(
        time_sides(sides, rounds, _TURN_SECONDS, warm_calls=_WARM_CALLS),
        faults={side: fault for side, fault in faults.items() if fault},
        digests={"ours": digest(outputs["ours"])},
        box=str([(part.start, part.stop) for part in case.box]),
        bytes={side: bytes_received(call) for side, call in sides.items()},
        bound=bound,
        detail=detail | {
            "mesh": list(sizes), "source": case.source_text, "target": case.target_text, "shape": list(case.shape),
            "dtype": str(case.dtype).removeprefix("torch."), "tensor_bytes": math.prod(case.shape) * itemsize,
            "planned_bytes": max(planned_bytes(program, _HOST_OF, itemsize)),
        },
    )  # fmt: skip


def _dispatched(shape: Tokens, mesh: DeviceMesh, rounds: int, rank: int, detail: dict[str, Any]) -> dict[str, Any]:
    layers = {"ours": shardweave_layer(mesh, shape.hidden, shape.tokens), "torch.distributed": plain_layer}
    given = [inputs_of(shape, other) for other in range(RANKS)]
    faults = {name: "; ".join(faults_of(layer, expert_scale(rank, RANKS), *given[rank])) for name, layer in
              layers.items()}  # fmt: skip

    def call(name: str) -> Any:
        x, ids, weights, gradient = given[rank]
        if shape.backward:
            return torch.autograd.grad(layers[name](x, ids, weights, None), (x, weights), gradient)
        with torch.no_grad():
            return layers[name](x, ids, weights, None)

    sides: dict[str, Callable[[], Any]] = {name: partial(call, name) for name in layers}
    passes = 1 + shape.backward
    row = shape.hidden * 4 * passes
    return result(
        time_sides(sides, rounds, _TURN_SECONDS, warm_calls=_WARM_CALLS),
        faults={name: fault for name, fault in faults.items() if fault},
        bytes={name: bytes_received(side) for name, side in sides.items()},
        bound=least_token_bytes([ids for _, ids, _, _ in given], _HOST_OF, EXPERTS, row)[_HOST_OF[rank]],
        detail=detail | {"tokens": shape.tokens, "hidden": shape.hidden},
    )
