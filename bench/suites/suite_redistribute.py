"""Redistributions on ranks of this machine: by shardweave, stock DTensor, one packed all-to-all as COSTA does it, and
the one call of torch.distributed that is meant for it.

The demo's cases (weights and activations of real models' sizes, scaled, placed as a sharding solver places them), and
sweeps over sizes; every result is checked before it is timed. Then tensors of a new length in every call: requests for
whose shape neither side has anything ready. Sources rotate past the last-level cache; outputs are new tensors, kept for
some calls. Bytes are those of the rank that receives most, of stock and plain calls as gloo moves them; the ceiling is
a bare copy of the bytes that a rank has to receive, by all ranks at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardweave
from shardweave.bench.baselines.packed_all_to_all import PackedAllToAll
from shardweave.bench.baselines.stock_dtensor import Case, Unsuitable, digest, held, mesh_for
from shardweave.bench.baselines.stock_plans import count_stock, planned
from shardweave.bench.harness.interleaved import Rotation, copies, in_order, rotated, rotating, time_sides
from shardweave.bench.harness.measure import Sink
from shardweave.bench.harness.ranks import Send, run_ranks
from shardweave.bench.suites.rank_rows import put, result
from shardweave.bench.workloads import Workload, load_workloads

RANKS = 4
SUITE = "redistribute"
SWEEPS = {"all-gather": ("S0", "R"), "re-shard": ("S0", "S1"), "reduce-scatter": ("P", "S0")}
PACKED, PLAIN = "packed all-to-all", "torch.distributed"
BY_DTENSOR = ("ours", "ours, on gloo", "stock")
SIDES = {"full": (64, 128, 256, 512, 1024, 2048, 4096), "quick": (128, 512, 2048), "dry": (12,)}
ROUNDS = {"full": 15, "quick": 9, "dry": 1}
NEW_LENGTHS = ("S0", "R"), ("R", "S0"), ("S0", "S1"), ("P", "S0"), ("P", "R")
_SHORTEST, _COLUMNS, _FIRST_ROUNDS = 1001, {"full": 1024, "quick": 1024, "dry": 8}, 3
_TURN_SECONDS = {"full": 0.03, "quick": 0.02, "dry": 0.0}
_BYTES_ARE = "received, by the rank that receives most"


def _workload(title: str, model: str, source: str, target: str, shape: tuple[int, int]) -> Workload:
    return Workload(title, model, (RANKS,), ("x",), source, target, "float32", shape, shape)


def sweep(scale: str) -> list[Workload]:
    return [
        _workload(f"{name} {n}×{n} float32", name, *layouts, (n, n))
        for name, layouts in SWEEPS.items()
        for n in SIDES[scale]
    ]


def new_lengths(scale: str) -> list[Workload]:
    """The first of the tensors of each case whose length is another in every call."""
    columns = _COLUMNS[scale]
    return [
        _workload(
            f"a new length in each call, {source} → {target}, n×{columns} float32", "new lengths", source, target,
            (_SHORTEST + 1000 * number, columns),
        )
        for number, (source, target) in enumerate(NEW_LENGTHS[:1] if scale == "dry" else NEW_LENGTHS)
    ]  # fmt: skip


def workloads(scale: str) -> list[Workload]:
    models = load_workloads()
    if scale == "quick":
        # One in six of each kind, and always the same ones.
        models = models[::6]
    return (models[:1] if scale == "dry" else models) + sweep(scale)


def cases(scale: str) -> dict[str, tuple[str, ...]]:
    swept = {one.name for one in sweep(scale)}
    contenders = {}
    for one in workloads(scale):
        by_hand = [PACKED] * (not one.partial) + [PLAIN] * (one.name in swept)
        contenders[one.name] = (*BY_DTENSOR, *by_hand, "copy")
    return contenders | {one.name: BY_DTENSOR for one in new_lengths(scale)}


def test_redistribute(record: Callable[[], None]) -> None:
    record()


def measure(names: Sequence[str], scale: str, sink: Sink) -> None:
    wanted = [one for one in workloads(scale) if one.name in names]
    changing = [one for one in new_lengths(scale) if one.name in names]
    config = {"workloads": wanted, "new_lengths": changing, "scale": scale, "contenders": cases(scale)}
    # Stock's faults are no reason not to time it: they are noted.
    run_ranks(rank_main, RANKS, config, lambda case, by_rank: put(sink, by_rank, case, timed_if_wrong=["stock"]))


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = {}
    for workload in config["workloads"]:
        sizes = (size,) if len(workload.mesh) == 1 else mesh_for(size)
        key = (sizes, workload.mesh_names)
        if key not in meshes:
            meshes[key] = init_device_mesh("cpu", sizes, mesh_dim_names=workload.mesh_names)
        try:
            case = Case(workload, meshes[key])
        except Unsuitable as reason:
            absent = dict.fromkeys(config["contenders"][workload.name], str(reason))
            send({"case": workload.name, **result({}, absent=absent)})
            continue
        send({"case": workload.name, **measure_case(case, meshes[key], config["scale"])})
    for workload in config["new_lengths"]:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=workload.mesh_names)
        send({"case": workload.name, **measure_new_lengths(workload, mesh, ROUNDS[config["scale"]])})


def measure_new_lengths(first: Workload, mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    """Time the sides in turns, each time with a length that neither side has seen; the first rounds do not count."""
    length, columns = first.shape
    faults: dict[str, str] = {}
    seconds: dict[str, list[float]] = {side: [] for side in BY_DTENSOR}
    for number in range(_FIRST_ROUNDS + rounds):
        for side in in_order(seconds, number):
            length += 1
            case = Case(replace(first, shape=(length, columns), full_shape=(length, columns)), mesh)
            call = redistribute_calls(case)[side]
            dist.barrier()
            began = time.perf_counter()
            output = call(case.source)
            took = time.perf_counter() - began
            if number >= _FIRST_ROUNDS:
                seconds[side].append(took)
            if fault := case.fault(output.to_local(), pairwise=side == "stock"):
                faults[side] = fault
    return result(seconds, faults=faults)


def measure_case(case: Case, mesh: DeviceMesh, scale: str) -> dict[str, Any]:
    program = shardweave.plan(
        mesh, case.shape, str(case.dtype).removeprefix("torch."), case.source_text, case.target_text
    )
    calls = calls_of(case, mesh, program)
    faults, digests = {}, {}
    for contender, call in calls.items():
        output = call(case.source)
        local = output.to_local() if isinstance(output, DTensor) else output
        fault = case.fault(local, pairwise=contender in ("stock", PLAIN))
        if fault:
            faults[contender] = fault
        if contender.startswith("ours"):
            digests[contender] = digest(local)
        del output, local
    received = max(program.bytes_received)
    sets, rotation = rotated(case.source, 1 if scale == "dry" else None)
    sides = {contender: rotating(call, sets) for contender, call in calls.items()}
    sides["copy"] = copies(received, Rotation.of(received, mesh.size(), 1 if scale == "dry" else None))
    return result(
        time_sides(sides, ROUNDS[scale], _TURN_SECONDS[scale]),
        faults=faults,
        digests=digests,
        box=str([(part.start, part.stop) for part in case.box]),
        bytes=bytes_of(case, program),
        bound=None if program.bytes_bound is None else max(program.bytes_bound),
        detail={"bytes are": _BYTES_ARE, "cold": rotation.cold},
    )


def redistribute_calls(case: Case) -> dict[str, Callable[[DTensor], Any]]:
    return {
        "ours": lambda x: shardweave.redistribute(x, case.placements),
        "ours, on gloo": lambda x: shardweave.redistribute(x, case.placements, transport="process_group"),
        "stock": lambda x: x.redistribute(placements=case.placements),
    }


def calls_of(case: Case, mesh: DeviceMesh, program: shardweave.Program) -> dict[str, Callable[[DTensor], Any]]:
    """Each contender's call, from the source on this rank to a DTensor, or to this rank's part of it."""
    calls = redistribute_calls(case)
    if "P" not in case.source_text + case.target_text:
        calls[PACKED] = partial(_of_local, _packed(case, program.mesh))
    plain = _plain(case, mesh)
    if plain is not None:
        calls[PLAIN] = partial(_of_local, plain)
    return calls


def bytes_of(case: Case, program: shardweave.Program) -> dict[str, int]:
    """Bytes that the rank with most receives, by contender. Stock's are not known for shard orders."""
    received = dict.fromkeys(("ours", "ours, on gloo", PACKED, PLAIN, "copy"), max(program.bytes_received))
    if "/" not in case.source_text + case.target_text:
        layouts = shardweave.Layout.parse(case.source_text), shardweave.Layout.parse(case.target_text)
        counted = count_stock(program.mesh, case.shape, planned(program.mesh.shape, case.shape, *layouts), gloo=True)
        received["stock"] = counted.received // 4 * case.dtype.itemsize
    if case.source_text == "P":  # reduced whole by gloo for stock and for the plain call alike
        received[PLAIN] = received["stock"]
    return received


def _of_local(by_hand: Callable[[torch.Tensor], torch.Tensor], x: DTensor) -> torch.Tensor:
    return by_hand(x.to_local())


def _packed(case: Case, mesh: shardweave.Mesh) -> PackedAllToAll:
    before, after = (
        [held(text, mesh.shape, mesh.coordinate(rank), case.shape) for rank in range(mesh.size)]
        for text in (case.source_text, case.target_text)
    )
    return PackedAllToAll(before, after, case.dtype)


def _plain(case: Case, mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The one call of torch.distributed that is meant for it, where shards are even."""
    layouts, n = (case.source_text, case.target_text), mesh.size()
    if mesh.ndim > 1 or any(size % n for size in case.shape) or layouts not in SWEEPS.values():
        return None
    group, (rows, columns) = mesh.get_group(0), case.shape
    if layouts == SWEEPS["re-shard"]:

        def re_shard(x: torch.Tensor) -> torch.Tensor:
            packed = x.view(rows // n, n, columns // n).transpose(0, 1).contiguous()
            out = torch.empty_like(packed)
            dist.all_to_all_single(out, packed, group=group)
            return out.view(rows, columns // n)

        return re_shard
    # Newer versions of torch have other names for both.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    collective, length = (gather, rows) if layouts == SWEEPS["all-gather"] else (reduce, rows // n)

    def call(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(length, columns)
        collective(out, x, group=group)
        return out

    return call
