"""A rank of a replay: makes each case's values, checks both sides to the bit, and times them in turns.

Elements and ranks' terms of them differ (`replay_values`), and what a rank is to end with is made without either side.
Where the target is partial nothing is checked, since its terms may be any, and the notes say so.
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

from ..bench.harness.interleaved import rotating, rotation_of, time_sides
from ..bench.harness.ranks import Send
from ..bench.workloads.trace_cases import Case, meshes_of
from ..planner import Layout, Mesh
from ..runtime.convert_specs import spec_of_layout
from ..runtime.dtensor.local import run_redistribution
from ..runtime.dtensor.redistribute_local_tensor import stock_redistribute_local_tensor
from ..runtime.dtensor.redistribute_options import RedistributeOptions
from ..runtime.tracing.trace import Entry
from .replay_values import Values

Call = Callable[[torch.Tensor], torch.Tensor]
_REFUSALS = (RuntimeError, ValueError, AssertionError, IndexError)


@dataclass(frozen=True)
class Setting:
    """What a replay is run with.

    Attributes:
        device: "cpu" or "cuda".
        transport: asked for by name; None: as the library chooses.
        rounds: of timing.
        cache_bytes: of the last level that ranks on CPUs share; a GPU says its own.
    """

    cases: Sequence[Case]
    device: str
    transport: str | None
    rounds: int
    cache_bytes: int

    def cache(self, ranks: int) -> tuple[int, int]:
        """Of so many ranks, those that share a cache, and its bytes."""
        if self.device == "cpu":
            return ranks, self.cache_bytes
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return -(-ranks // torch.cuda.device_count()), properties.L2_cache_size


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank of the replay."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    setting: Setting = config["setting"]
    meshes: dict[Mesh, DeviceMesh] = {}
    for number, case in enumerate(setting.cases):
        for mesh in (mesh for entry in case.entries for mesh in meshes_of(entry)):
            if mesh not in meshes:  # made by all ranks alike, members or not
                table = mesh.rank_array.reshape(mesh.shape)
                meshes[mesh] = DeviceMesh(setting.device, table, mesh_dim_names=mesh.names)
        send({"case": str(number), **_replay(case, case.of_rank(rank), meshes, setting)})


def _replay(case: Case, entry: Entry, meshes: dict[Mesh, DeviceMesh], setting: Setting) -> dict[str, Any]:
    """What this rank found: faults, notes, and seconds of each side by round."""
    source, target = _specs(case, entry, meshes)
    at, ends_at = source.mesh.get_coordinate(), target.mesh.get_coordinate()
    how = RedistributeOptions(transport=setting.transport)

    def carried_out(x: torch.Tensor) -> torch.Tensor:
        return run_redistribution(x, source, target, how)

    takes_part = at is not None or ends_at is not None
    ours, stock = (call if takes_part else _nothing for call in (carried_out, _stock(case, source, target)))
    mesh, other = meshes_of(entry)
    values = Values.of(case.shape, getattr(torch, entry.dtype), entry.source, mesh.shape)
    mine = values.source(entry.source, at).to(setting.device)
    unchecked = _why_not_checked(entry, values)

    def fault_of(found: torch.Tensor) -> str | None:
        # Made anew each time: nothing but the source is there while it is timed.
        return None if unchecked else _fault(found.cpu(), values.target(entry.target, other.shape, ends_at))

    fault = fault_of(ours(mine))
    notes = [f"not checked: {unchecked}"] if unchecked else []
    refused = "another mesh" if mesh != other else None
    try:
        if not refused and (theirs := fault_of(stock(mine.clone()))):
            notes.append(f"torch is wrong: {theirs}")
    except _REFUSALS as error:
        refused = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # All ranks time torch, or none: what it refuses to one of them, the others cannot do alone.
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, refused)
    because = next((text for text in said if text), None)
    if because:
        notes.append(f"torch refuses: {because}")
    timed = _timed(case, mine, ours, None if because else stock, setting)
    return {"faults": [fault] if fault else [], "notes": notes, **timed}


def _specs(case: Case, entry: Entry, meshes: dict[Mesh, DeviceMesh]) -> tuple[DTensorSpec, DTensorSpec]:
    """The source's and the target's."""
    stride = torch.empty(case.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(case.shape), stride, getattr(torch, entry.dtype))
    mesh, other = meshes_of(entry)
    return (
        spec_of_layout(Layout.parse(entry.source, mesh.shape), meshes[mesh], meta),
        spec_of_layout(Layout.parse(entry.target, other.shape), meshes[other], meta),
    )


def _why_not_checked(entry: Entry, values: Values) -> str | None:
    if Layout.parse(entry.target).has_partial:
        return "what becomes partial may be any terms"
    return None if values.exact else f"what becomes of {values.terms} terms is not exact in {entry.dtype}"


def _timed(case: Case, mine: torch.Tensor, ours: Call, stock: Call | None, setting: Setting) -> dict[str, Any]:
    """Seconds of each side by round, on sources that take turns."""
    rotation = rotation_of(mine, *setting.cache(case.ranks))
    sets = [mine, *(mine.clone() for _ in range(rotation.sets - 1))]
    sides = {"ours": rotating(ours, sets)}
    if stock is not None:
        own = [x.clone() for x in sets] if case.collective == "all_reduce" else sets  # what it sums in place
        sides = {"stock": rotating(stock, own), **sides}
    finish = torch.cuda.synchronize if setting.device == "cuda" else (lambda: None)
    return {"cold": rotation.cold, "seconds": time_sides(sides, setting.rounds, finish=finish)}


def _nothing(x: torch.Tensor) -> torch.Tensor:
    return x


def _stock(case: Case, source: DTensorSpec, target: DTensorSpec) -> Call:
    """What the program does without shardweave: DTensor's redistribution, or what FSDP2 calls on a flat tensor."""

    def redistributed(x: torch.Tensor) -> torch.Tensor:
        return stock_redistribute_local_tensor(x, source, target)

    # Newer versions of torch have other names for both.
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


def _fault(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"has {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if found.dtype.itemsize == 1 and found.dtype.is_floating_point:
        found, wanted = found.float(), wanted.float()
    differ = int((found != wanted).sum())
    return f"{differ} of {found.numel()} elements differ" if differ else None
