"""A rank of a replay: makes the values of each case, checks both sides bitwise, and times them in turns.

The expected results are made by `replay_values`, independently of both sides. Where the target is partial nothing is
checked, since many terms are valid; the notes say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..bench.harness.gather_json import all_gather_json
from ..bench.harness.interleaved import rotating, rotation_of, time_sides
from ..bench.harness.ranks import Send
from ..bench.workloads.trace_cases import Case, meshes_of
from ..planner import Layout, Mesh
from ..runtime.convert_specs import spec_of_layout
from ..runtime.dtensor.drop_in import stock_redistribute_local_tensor
from ..runtime.dtensor.local import run_redistribution
from ..runtime.dtensor.redistribute_options import RedistributeOptions
from ..runtime.tracing.trace_file import Entry
from ..runtime.transports.choose_transport import TransportName
from .replay_values import Values, difference

Call = Callable[[torch.Tensor], torch.Tensor]
_REFUSALS = (RuntimeError, ValueError, AssertionError, IndexError)


@dataclass(frozen=True)
class Setting:
    """The parameters of a replay.

    Attributes:
        device: "cpu" or "cuda".
        transport: the name of a transport; None: chosen by the library.
        rounds: the number of timing rounds.
        cache_bytes: the size of the last-level cache that ranks on CPUs share; for GPUs it is read from the device.
    """

    cases: Sequence[Case]
    device: str
    transport: TransportName | None
    rounds: int
    cache_bytes: int

    def cache(self, ranks: int) -> tuple[int, int]:
        """The number of ranks that share a cache, out of `ranks`, and the size of the cache in bytes."""
        if self.device == "cpu":
            return ranks, self.cache_bytes
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return -(-ranks // torch.cuda.device_count()), properties.L2_cache_size


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """Run all cases on this rank."""
    # torch logs advice about its own plans on every rank.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    setting: Setting = config["setting"]
    meshes: dict[Mesh, DeviceMesh] = {}
    for number, case in enumerate(setting.cases):
        for mesh in (mesh for entry in case.entries for mesh in meshes_of(entry)):
            if mesh not in meshes:  # collective: every rank makes it, member or not
                table = mesh.rank_array.reshape(mesh.shape)
                meshes[mesh] = DeviceMesh(setting.device, table, mesh_dim_names=mesh.names)
        send({"case": str(number), **_replay(case, case.of_rank(rank), meshes, setting)})


def _replay(case: Case, entry: Entry, meshes: dict[Mesh, DeviceMesh], setting: Setting) -> dict[str, Any]:
    """The results of this rank: faults, notes, and the seconds of each side by round."""
    source, target = _specs(case, entry, meshes)
    at, target_at = source.mesh.get_coordinate(), target.mesh.get_coordinate()
    options = RedistributeOptions(transport=setting.transport)

    def redistribute(x: torch.Tensor) -> torch.Tensor:
        return run_redistribution(x, source, target, options)

    participates = at is not None or target_at is not None
    ours, stock = (call if participates else _identity for call in (redistribute, _stock(case, source, target)))
    mesh, other = meshes_of(entry)
    values = Values.of(case.shape, getattr(torch, entry.dtype), entry.source, mesh.shape)
    mine = values.source(entry.source, at).to(setting.device)
    unchecked = _why_not_checked(entry, values)

    def fault_of(result: torch.Tensor) -> str | None:
        # The expected values are made each time, so that they do not take memory while the case is timed.
        return None if unchecked else difference(result.cpu(), values.target(entry.target, other.shape, target_at))

    fault = fault_of(ours(mine))
    notes = [f"not checked: {unchecked}"] if unchecked else []
    refused = "another mesh" if mesh != other else None
    try:
        if not refused and (theirs := fault_of(stock(mine.clone()))):
            notes.append(f"torch is wrong: {theirs}")
    except _REFUSALS as error:
        refused = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # If torch refuses on one rank, no rank times it.
    refusal = next((text for text in all_gather_json(refused) if text), None)
    if refusal:
        notes.append(f"torch refuses: {refusal}")
    times = _time(case, mine, ours, None if refusal else stock, setting)
    return {"faults": [fault] if fault else [], "notes": notes, **times}


def _specs(case: Case, entry: Entry, meshes: dict[Mesh, DeviceMesh]) -> tuple[DTensorSpec, DTensorSpec]:
    """The specs of source and target."""
    stride = torch.empty(case.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(case.shape), stride, getattr(torch, entry.dtype))
    mesh, other = meshes_of(entry)
    return (
        spec_of_layout(Layout.parse(entry.source, mesh.shape), meshes[mesh], meta),
        spec_of_layout(Layout.parse(entry.target, other.shape), meshes[other], meta),
    )


def _why_not_checked(entry: Entry, values: Values) -> str | None:
    if Layout.parse(entry.target).has_partial:
        return "the target is partial, and many terms are valid"
    return None if values.exact else f"the reduction of {values.terms} terms is not exact in {entry.dtype}"


def _time(case: Case, mine: torch.Tensor, ours: Call, stock: Call | None, setting: Setting) -> dict[str, Any]:
    """The seconds of each side by round, on alternating copies of the source."""
    rotation = rotation_of(mine, *setting.cache(case.ranks))
    sets = [mine, *(mine.clone() for _ in range(rotation.sets - 1))]
    sides = {"ours": rotating(ours, sets)}
    if stock is not None:
        own = [x.clone() for x in sets] if case.collective == "all_reduce" else sets  # it works in place
        sides = {"stock": rotating(stock, own), **sides}
    finish = torch.cuda.synchronize if setting.device == "cuda" else (lambda: None)
    return {"cold": rotation.cold, "seconds": time_sides(sides, setting.rounds, finish=finish)}


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _stock(case: Case, source: DTensorSpec, target: DTensorSpec) -> Call:
    """The program's call without shardweave: DTensor's redistribution, or FSDP2's collective of a flat tensor."""

    def redistributed(x: torch.Tensor) -> torch.Tensor:
        return stock_redistribute_local_tensor(x, source, target)

    # Both have new names in newer versions of torch.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    op = dist.ReduceOp.AVG if case.entry.source.startswith("Pavg") else dist.ReduceOp.SUM

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.numel() * group.size())
        gather(out, x, group=group)
        return out

    def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.numel() // group.size())
        scatter(out, x, op=op, group=group)
        return out

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, op=op, group=group)
        return x

    if case.collective is None or source.mesh.get_coordinate() is None:
        return redistributed
    group = source.mesh.get_group(0)
    return {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}[case.collective]
