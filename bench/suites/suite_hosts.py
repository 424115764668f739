"""Redistributions and token dispatch between hosts, by shardweave and by stock DTensor or torch.distributed's
all-to-alls, on the same ranks: two hosts of two ranks on this machine, with links of 1 and 10 Gbit/s, and other hosts
with links of 1 Gbit/s.

Results are checked first. Bytes are those that enter a host during one call, counted at its link, headers included, of
the host with most; the bound is what has to enter it, of a sum one value, as if the other hosts had added their terms.
All ranks share the cores of this machine, so that at the higher rate the cores, not the links, may limit all sides.
A third side sends as many bytes as shardweave does between hosts, by plain `isend` and `irecv`, after which the ranks
of a host wait for each other, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardweave
from shardweave.bench.baselines.plain_messages import plain_messages
from shardweave.bench.baselines.stock_dtensor import Case, Unsuitable, digest, mesh_for, moves
from shardweave.bench.baselines.token_layers import EXPERTS, expert_scale, faults_of, plain_layer, shardweave_layer
from shardweave.bench.harness.hosts import Hosts
from shardweave.bench.harness.interleaved import time_sides
from shardweave.bench.harness.link_bytes import bytes_received, least_bytes, least_token_bytes
from shardweave.bench.harness.measure import Sink
from shardweave.bench.harness.namespaces import HostsUnavailable, congestion_control
from shardweave.bench.suites.rank_rows import put, result
from shardweave.bench.suites.suite_dispatch import Tokens, inputs_of, run_layer
from shardweave.bench.workloads import Workload, load_workloads
from shardweave.runtime.transports.select import current_transports

SUITE = "hosts"
HOSTS = [[0, 1], [2, 3]]
OTHER_HOSTS = {
    "3 hosts of 2": [[0, 1], [2, 3], [4, 5]],
    "hosts of 1, 2, 2": [[0], [1, 2], [3, 4]],
    "hosts of 3, 1": [[0, 1, 2], [3]],
}
OTHER_GIGABITS = 1.0
ROUNDS = {"full": 7, "quick": 3, "dry": 1}
LAYOUTS = [
    ("S0 S0", "R R"), ("S0 S1", "S1 S0"), ("P P", "R R"), ("P P", "S0 S0"), ("R S0", "S0 S0"), ("S0 R", "S1 R"),
    ("R S0", "R S1"),
]  # fmt: skip
EVERYWHERE = 4  # how many of `LAYOUTS`, the first ones, on all hosts, and beside plain messages
_TURN_SECONDS, _WARM_CALLS, _LONGEST = 0.3, 2, 7200.0
_BYTES_ARE = (
    "received by a host over its link during a call, headers included, of the host with most; of link: the share that "
    "they take of its rate, of which data may take 95.6%, since packets of 1,514 bytes have 1,448 of data"
)
MESSAGES = "isend, irecv"
BY_TORCH = "torch.distributed"
DISPATCHERS = ("ours", BY_TORCH)


@dataclass(frozen=True)
class Setting:
    """Hosts with links of a rate.

    Attributes:
        name: what the names of its cases begin with.
        hosts: the ranks of each, which are numbered host by host.
        is_main: whether everything is measured; otherwise some redistributions.
    """

    name: str
    hosts: list[list[int]]
    gigabits: float
    is_main: bool = True

    @property
    def host_of(self) -> list[int]:
        """The host of each rank."""
        return [host for host, ranks in enumerate(self.hosts) for _ in ranks]


def settings(scale: str) -> list[Setting]:
    main = [Setting(f"{rate:g} Gbit/s", HOSTS, rate) for rate in ((10.0,) if scale == "dry" else (1.0, 10.0))]
    rate = OTHER_GIGABITS
    others = [Setting(f"{name}, {rate:g} Gbit/s", hosts, rate, False) for name, hosts in OTHER_HOSTS.items()]
    return [*main, *others]


def workloads(scale: str, setting: Setting) -> list[Workload]:
    side = 16 if scale == "dry" else 2048
    layouts = LAYOUTS if setting.is_main else LAYOUTS[:EVERYWHERE]
    swept = [
        Workload(f"{source} → {target} {side}×{side} float32", "", (2, 2), ("x", "y"), source, target, "float32",
                 (side, side), (side, side))
        for source, target in (layouts[:1] if scale == "dry" else layouts)
    ]  # fmt: skip
    if not setting.is_main or scale == "dry":
        return swept
    models = [one for one in load_workloads() if moves(one, mesh_for(len(setting.host_of)))]
    return swept + {"full": models, "quick": models[::8]}[scale]


def tokens(scale: str, setting: Setting) -> list[Tokens]:
    if not setting.is_main:
        return []
    if scale == "dry":
        return [Tokens(5, 8, backward) for backward in (False, True)]
    return [Tokens(64, 1024, False), *(Tokens(512, 1024, backward) for backward in (False, True))]


def _has_messages(workload: Workload) -> bool:
    return not workload.model and (workload.source, workload.target) in LAYOUTS[:EVERYWHERE]


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for setting in settings(scale):
        contenders: dict[str, tuple[str, ...]] = {
            one.name: ("ours", "stock", MESSAGES) if _has_messages(one) else ("ours", "stock")
            for one in workloads(scale, setting)
        }
        contenders |= dict.fromkeys(map(str, tokens(scale, setting)), DISPATCHERS)
        found |= {f"{setting.name}: {name}": who for name, who in contenders.items()}
    return found


def test_hosts(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    for setting in settings(scale):
        head = f"{setting.name}: "
        wanted = frozenset(name.removeprefix(head) for name in names if name.startswith(head))
        if not wanted:
            continue
        try:
            with Hosts(setting.hosts, setting.gigabits) as hosts:
                by_rank = hosts.run(rank_main, wanted, scale, setting, timeout=_LONGEST)
        except HostsUnavailable as unavailable:
            for case, contenders in cases(scale).items():
                for contender in contenders:
                    if case in names and case.startswith(head):
                        sink.absent(case, contender, f"no hosts here: {unavailable}")
            continue
        for of_case in zip(*by_rank, strict=True):
            put(sink, of_case, head + of_case[0]["case"], timed_if_wrong=["stock"])


def rank_main(rank: int, names: frozenset[str], scale: str, setting: Setting) -> list[dict[str, Any]]:
    """The results of the cases with these names, which are without that of the setting, on this rank."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    results: list[dict[str, Any]] = []
    meshes: dict[tuple[str, ...], DeviceMesh] = {}
    rounds = ROUNDS[scale]
    host_groups = [dist.new_group(ranks) for ranks in setting.hosts]
    ranks = len(setting.host_of)
    for workload in workloads(scale, setting):
        if workload.name not in names:
            continue
        labels = workload.mesh_names
        if labels not in meshes:
            meshes[labels] = init_device_mesh("cpu", mesh_for(ranks), mesh_dim_names=labels)
        try:
            case = Case(workload, meshes[labels])
        except Unsuitable as error:
            why = dict.fromkeys(("ours", "stock"), str(error))
            results.append({"case": workload.name, **result({}, absent=why)})
            continue
        group = host_groups[setting.host_of[rank]] if _has_messages(workload) else None
        results.append({"case": workload.name, **_redistributed(case, meshes[labels], rounds, rank, setting, group)})
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    for shape in tokens(scale, setting):
        if str(shape) in names:
            results.append({"case": str(shape), **_dispatched(shape, mesh, rounds, rank, setting)})
    return results


def _detail(setting: Setting) -> dict[str, Any]:
    return {"bytes are": f"{_BYTES_ARE}; TCP uses {congestion_control()}", "gigabits": setting.gigabits}


def _redistributed(
    case: Case, mesh: DeviceMesh, rounds: int, rank: int, setting: Setting, host_group: Any
) -> dict[str, Any]:
    """
    Args:
        host_group: the ranks of this rank's host, if plain messages are measured too.
    """
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: shardweave.redistribute(case.source, case.placements),
        "stock": lambda: case.source.redistribute(placements=case.placements),
    }
    outputs = {side: call().to_local() for side, call in sides.items()}
    faults = {side: case.fault(output, pairwise=side == "stock") for side, output in outputs.items()}
    host_of, sizes, itemsize = setting.host_of, tuple(mesh.shape), case.dtype.itemsize
    bound = None
    if "/" not in case.source_text + case.target_text and "P" not in case.target_text:
        texts = case.source_text, case.target_text
        bound = least_bytes(sizes, host_of, case.shape, *texts, itemsize)[host_of[rank]]
    if host_group is not None:
        topology = current_transports().machines.find_topology(tuple(range(dist.get_world_size())), torch.device("cpu"))
        program = shardweave.plan(mesh, case.shape, case.dtype, case.source_text, case.target_text, topology=topology)
        sides[MESSAGES] = plain_messages(program, host_of, rank, itemsize, host_group)
    return result(
        time_sides(sides, rounds, _TURN_SECONDS, warm_calls=_WARM_CALLS),
        faults={side: fault for side, fault in faults.items() if fault},
        digests={"ours": digest(outputs["ours"])},
        box=str([(part.start, part.stop) for part in case.box]),
        bytes={side: bytes_received(call) for side, call in sides.items()},
        bound=bound,
        detail=_detail(setting),
    )


def _dispatched(shape: Tokens, mesh: DeviceMesh, rounds: int, rank: int, setting: Setting) -> dict[str, Any]:
    ranks = mesh.size()
    ours = shardweave_layer(mesh, shape.hidden, shape.tokens)
    layers = dict(zip(DISPATCHERS, (ours, plain_layer), strict=True))
    given = [inputs_of(shape, other) for other in range(ranks)]
    faults = {name: "; ".join(faults_of(layer, expert_scale(rank, ranks), *given[rank])) for name, layer in
              layers.items()}  # fmt: skip
    sides: dict[str, Callable[[], Any]] = {
        name: partial(run_layer, shape, layer, given[rank]) for name, layer in layers.items()
    }
    row = shape.hidden * 4 * (1 + shape.backward)
    return result(
        time_sides(sides, rounds, _TURN_SECONDS, warm_calls=_WARM_CALLS),
        faults={name: fault for name, fault in faults.items() if fault},
        bytes={name: bytes_received(side) for name, side in sides.items()},
        bound=least_token_bytes([ids for _, ids, _, _ in given], setting.host_of, EXPERTS, row)[setting.host_of[rank]],
        detail=_detail(setting),
    )
