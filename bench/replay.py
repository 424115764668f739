"""`python -m shardweave replay TRACE …`: a program's redistributions once more, by torch and by shardweave, in turns.

Each distinct one is made in the ranks of this machine and both sides are checked, to the bit: elements and ranks' terms
of them differ (`replay_values`), and what a rank is to end with is made without either side. Where the target is
partial nothing is checked, since its terms may be any, and the notes say so. Then both are timed in turns.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import TensorMeta

from ..errors import ArgumentError
from ..planner import Layout, Mesh, plan
from ..planner.dtypes import ITEMSIZE
from ..planner.explanation import format_bytes
from ..planner.index_sets import held_sizes
from ..runtime.drop_in import stock_redistribute_local_tensor
from ..runtime.redistribution import How, run_redistribution
from ..runtime.specs import spec_of_layout
from ..runtime.trace import Cost, Entry, Trace, merged
from .against_stock import ROUNDS, time_in_turns
from .machine import available_memory
from .ranks import Ranks, RanksFailed, Send
from .replay_values import Values
from .turns import KEPT
from .workloads import scale

MOST_RANKS = 16
_PLAIN_WIDTH = 170  # of a table that no terminal bounds
_MOST_EXPENSIVE = 3


@dataclass(frozen=True)
class Case:
    """One distinct redistribution, from however many places.

    Attributes:
        entries: one, or one for each of several meshes that are alike and have no rank in common, as those along a dim
            of a larger mesh: in the program their ranks do it at the same time, and so they do here.
        cost: calls of a rank, and the bytes that it receives in each, as they were recorded.
        shape, bytes_received: as they are here: the recorded ones, or scaled.
    """

    entries: tuple[Entry, ...]
    cost: Cost
    wheres: tuple[str, ...]
    shape: tuple[int, ...]
    bytes_received: int

    def of_rank(self, rank: int) -> Entry:
        """The entry of the mesh that a rank is in; any where it is in none."""
        return next((entry for entry in self.entries if rank in entry.mesh.rank_array), self.entries[0])

    def scaled(self) -> Case:
        """With an eighth of every size of 64 and more, and the bytes that the rank that gets most of those receives."""
        entry, shape = self.entries[0], tuple(map(scale, self.shape))
        other = entry.target_mesh or entry.mesh
        program = plan(entry.mesh, shape, entry.dtype, entry.source, entry.target, target_mesh=other)
        return replace(self, shape=shape, bytes_received=max(program.bytes_received))


@dataclass(frozen=True)
class Replayed:
    """A case, and seconds of the slowest rank; None: not run."""

    case: Case
    stock: float | None
    ours: float | None
    notes: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def entry(self) -> Entry:
        """The first of them."""
        return self.case.entries[0]

    @property
    def cost(self) -> Cost:
        return self.case.cost

    @property
    def wheres(self) -> tuple[str, ...]:
        return self.case.wheres

    @property
    def seconds(self) -> float:
        """Of all calls of the program as it is: by torch, or by shardweave where torch refuses."""
        return ((self.ours if self.stock is None else self.stock) or 0.0) * self.cost.calls

    @property
    def saved(self) -> float:
        """Seconds over all calls of the program."""
        return 0.0 if self.stock is None or self.ours is None else (self.stock - self.ours) * self.cost.calls

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.entry.to_dict(),
            "meshes": len(self.case.entries),
            "calls": self.cost.calls,
            "bytes_received": self.cost.bytes_received,
            "replayed_shape": list(self.case.shape),
            "replayed_bytes_received": self.case.bytes_received,
            "where": list(self.wheres),
            "torch_s": self.stock,
            "shardweave_s": self.ours,
            "notes": list(self.notes),
            "faults": list(self.faults),
        }


def distinct(trace: Trace) -> list[Case]:
    """The redistributions, wherever they were asked for, and by whichever of several meshes alike; what moves most
    bytes first."""
    families: dict[Entry, dict[Entry, list[tuple[str, Cost]]]] = {}
    for entry, cost in trace.heaviest_first():
        one = replace(entry, where="", traced=False)
        alike = one if one.target_mesh else replace(one, mesh=Mesh(one.mesh.shape, one.mesh.names))
        families.setdefault(alike, {}).setdefault(one, []).append((entry.where, cost))
    found = []
    for family in families.values():
        ranks = [rank for one in family for rank in one.mesh.rank_array.tolist()]
        together = len(ranks) == len(set(ranks))
        found += [_case(family)] if together else [_case({one: at}) for one, at in family.items()]
    return sorted(found, key=lambda case: -case.cost.bytes_in_all)


def _case(family: dict[Entry, list[tuple[str, Cost]]]) -> Case:
    costs = [[cost for _, cost in at] for at in family.values()]
    calls = max(sum(cost.calls for cost in of_mesh) for of_mesh in costs)
    wheres = dict.fromkeys(where for at in family.values() for where, _ in at)
    received = max(cost.bytes_received for of_mesh in costs for cost in of_mesh)
    return Case(tuple(family), Cost(calls, received), tuple(wheres), next(iter(family)).shape, received)


def check_memory(cases: Sequence[Case]) -> None:
    """Refuse what would have ranks killed; cases come one after the other, so each counts alone.

    Raises:
        ArgumentError: a case needs more than there is.
    """
    there = available_memory()
    needed, case = max(((_bytes_needed(case), case) for case in cases), key=lambda pair: pair[0])
    if needed > there:
        one = case.entries[0]
        raise ArgumentError(
            f"TRACE: {one.source} → {one.target} of {one.dtype}{list(case.shape)}, {case.wheres[0]}, takes some "
            f"{format_bytes(needed)} of memory on all ranks together; allowed: up to {format_bytes(there)}, what is "
            f"free here. --scaled takes an eighth of the sizes, --only TEXT and --most N leave cases out"
        )


def _bytes_needed(case: Case) -> int:
    """Of all ranks together, with what is alive while they are timed: the source and a copy of it for peers; of either
    side `KEPT` outputs, one that is being made, and what it is made of."""
    needed = 0
    for entry in case.entries:
        for mesh, text, copies in (
            (entry.mesh, entry.source, 2),
            (entry.target_mesh or entry.mesh, entry.target, 2 * KEPT + 2),
        ):
            shard = held_sizes(case.shape, Layout.parse(text, mesh.shape), mesh.shape, (0,) * mesh.ndim)
            needed += mesh.size * math.prod(shard) * ITEMSIZE[entry.dtype] * copies
    return needed


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank of the replay."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    meshes: dict[Mesh, DeviceMesh] = {}
    for number, case in enumerate(config["cases"]):
        for mesh in (mesh for entry in case.entries for mesh in (entry.mesh, entry.target_mesh or entry.mesh)):
            if mesh not in meshes:  # made by all ranks alike, members or not
                meshes[mesh] = DeviceMesh("cpu", mesh.rank_array.reshape(mesh.shape), mesh_dim_names=mesh.names)
        send({"number": number, **_replay(case.of_rank(rank), case.shape, meshes, config)})


def _replay(
    entry: Entry, shape: tuple[int, ...], meshes: dict[Mesh, DeviceMesh], config: dict[str, Any]
) -> dict[str, Any]:
    """What this rank found: faults, notes, and seconds of each side by round."""
    how = How(world=config["world"])
    dtype = getattr(torch, entry.dtype)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    other = entry.target_mesh or entry.mesh
    layouts = Layout.parse(entry.source, entry.mesh.shape), Layout.parse(entry.target, other.shape)
    source, target = (
        spec_of_layout(layout, meshes[mesh], meta) for layout, mesh in zip(layouts, (entry.mesh, other), strict=True)
    )
    crosses = entry.mesh != other
    at, ends_at = (meshes[mesh].get_coordinate() for mesh in (entry.mesh, other))
    takes_part = at is not None or ends_at is not None
    values = Values.of(shape, dtype, entry.source, entry.mesh.shape)
    mine = values.source(entry.source, at)
    unchecked = "what becomes partial may be any terms" if layouts[1].has_partial else None
    if unchecked is None and not values.exact:
        unchecked = f"what becomes of {values.terms} terms is not exact in {entry.dtype}"

    def ours() -> torch.Tensor:
        return run_redistribution(mine, source, target, how) if takes_part else mine

    def stock() -> torch.Tensor:
        return stock_redistribute_local_tensor(mine, source, target) if takes_part else mine

    def fault_of(found: torch.Tensor) -> str | None:
        # Made anew each time: nothing but the source is there while it is timed.
        return None if unchecked else _fault(found, values.target(entry.target, other.shape, ends_at))

    fault = fault_of(ours())
    notes = [f"not checked: {unchecked}"] if unchecked else []
    refused = "another mesh" if crosses else None
    try:
        if not crosses and (theirs := fault_of(stock())):
            notes.append(f"torch is wrong: {theirs}")
    except (RuntimeError, ValueError, AssertionError, IndexError) as error:
        refused = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # All ranks time torch, or none: what it refuses to one of them, the others cannot do alone.
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, refused)
    because = next((text for text in said if text), None)
    seconds = time_in_turns(ours if because else stock, ours, 0, config["rounds"])
    return {
        "faults": [fault] if fault else [],
        "notes": notes + ([f"torch refuses: {because}"] if because else []),
        "stock": None if because else seconds["stock"],
        "ours": seconds["ours"],
    }


def _fault(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"has {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if found.dtype.itemsize == 1 and found.dtype.is_floating_point:
        found, wanted = found.float(), wanted.float()
    differ = int((found != wanted).sum())
    return f"{differ} of {found.numel()} elements differ" if differ else None


def run(paths: Sequence[Path], world: str | None, scaled: bool, only: str, most: int, json_path: Path | None) -> int:
    """Replay traces of one program's ranks, show the table; 1 where shardweave is wrong or a rank died.

    Raises:
        ArgumentError: traces that cannot be read, of too many ranks, with nothing to replay, or with what takes more
            memory than is free.
    """
    trace = merged([Trace.read(path) for path in paths])
    cases = [
        case
        for case in distinct(trace)
        if only in " ".join((*case.wheres, case.entries[0].source, case.entries[0].target))
    ][:most]
    if not cases:
        raise ArgumentError(
            f"TRACE, --only: {len(trace.found)} redistributions, none with {only!r}; allowed: one or more"
        )
    if trace.world_size > MOST_RANKS:
        raise ArgumentError(
            f"TRACE: of a program of {trace.world_size} ranks; allowed: up to {MOST_RANKS}, which start on this machine"
        )
    if json_path is not None and not os.access(json_path.absolute().parent, os.W_OK):
        raise ArgumentError(f"--json: {str(json_path)!r} cannot be written; allowed: a file in a folder that is there")
    if scaled:
        cases = [case.scaled() for case in cases]
    check_memory(cases)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    gathered: list[dict[int, dict[str, Any]]] = [{} for _ in cases]
    config = {"cases": cases, "world": world, "rounds": ROUNDS}
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    task = progress.add_task("replaying", total=len(cases))

    def message(rank: int, found: dict[str, Any]) -> None:
        by_rank = gathered[found["number"]]
        by_rank[rank] = found
        if len(by_rank) == trace.world_size:
            progress.update(task, advance=1)

    def output(rank: int, line: str) -> None:
        if line.strip() and not line.startswith("[Gloo]"):
            progress.console.print(f"rank {rank}: {line}", markup=False)

    try:
        with Ranks(rank_main, trace.world_size, config) as children, progress:
            children.supervise(message, output)
    except RanksFailed as failure:
        print(f"error: the replay ends: {failure}", file=sys.stderr)
        return 1
    replayed = [_together(case, [found[r] for r in sorted(found)]) for case, found in zip(cases, gathered, strict=True)]
    _show(console, trace, replayed, scaled)
    if json_path is not None:
        report = {
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "scaled": scaled,
            "rounds": ROUNDS,
            "world_size": trace.world_size,
            "redistributions": [one.to_dict() for one in replayed],
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(one.faults for one in replayed))


def _together(case: Case, by_rank: list[dict[str, Any]]) -> Replayed:
    def slowest(side: str) -> float | None:
        if any(found[side] is None for found in by_rank):
            return None
        return statistics.median(map(max, zip(*(found[side] for found in by_rank), strict=True)))

    faults = tuple(f"rank {r}: {text}" for r, found in enumerate(by_rank) for text in found["faults"])
    notes = tuple(dict.fromkeys(text for found in by_rank for text in found["notes"]))
    return Replayed(case, slowest("stock"), slowest("ours"), notes, faults)


def _show(console: Console, trace: Trace, replayed: list[Replayed], scaled: bool) -> None:
    size = " (sizes an eighth)" if scaled else ""
    title = f"{len(replayed)} redistribution{'' if len(replayed) == 1 else 's'}{size}"
    table = Table(title=title, title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for name in ("where", "mesh", "tensor", "layouts"):
        table.add_column(name, overflow="fold")
    for name in ("calls", "received", "torch\nms", "shardweave\nms", "ratio", "saved\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in sorted(replayed, key=lambda one: -one.seconds):
        ratio = f"{one.stock / one.ours:.1f}" if one.stock and one.ours else "-"
        mesh = str(one.entry.mesh) if one.entry.target_mesh is None else f"{one.entry.mesh} to {one.entry.target_mesh}"
        if len(one.case.entries) > 1:
            mesh += f", {len(one.case.entries)} at once"
        table.add_row(
            "\n".join(one.wheres[:3]) + (f"\nand {len(one.wheres) - 3} more" if len(one.wheres) > 3 else ""),
            mesh,
            f"{one.entry.dtype}{list(one.case.shape)}",
            f"{one.entry.source} → {one.entry.target}",
            str(one.cost.calls),
            format_bytes(one.case.bytes_received),
            "-" if one.stock is None else f"{one.stock * 1e3:.3f}",
            "-" if one.ours is None else f"{one.ours * 1e3:.3f}",
            ratio,
            f"{one.saved * 1e3:.1f}",
        )
    console.print(table)
    stock = sum((one.stock or 0.0) * one.cost.calls for one in replayed)
    ours = sum((one.ours or 0.0) * one.cost.calls for one in replayed if one.stock is not None)
    console.print(
        f"All calls of a rank, on {trace.world_size} ranks of this machine ({os.cpu_count()} cores){size}: "
        f"torch {stock * 1e3:.1f} ms, shardweave {ours * 1e3:.1f} ms."
    )
    if any(where.startswith("FSDP") for one in replayed for where in one.wheres):
        console.print(
            "What FSDP2 issues itself is a redistribution of its flat tensor here, on torch's side by DTensor."
        )
    for one in replayed:
        for text in (*one.notes, *(f"shardweave is wrong: {fault}" for fault in one.faults)):
            console.print(f"{one.entry.source} → {one.entry.target} of {list(one.case.shape)}: {text}", markup=False)
    for why, calls in trace.left_out.items():
        console.print(f"not in the trace: {calls} calls: {why}", markup=False)
    for line in _most_expensive(replayed, size):
        console.print(line, markup=False)


def _most_expensive(replayed: list[Replayed], size: str = "") -> list[str]:
    """What a program is to look at first: place, request, and what all calls cost by either."""
    shown = sorted(replayed, key=lambda one: -one.seconds)[:_MOST_EXPENSIVE]
    number = f"{len(shown)} most expensive redistributions" if len(shown) > 1 else "most expensive redistribution"
    lines = [f"\nThe {number} of a rank, all calls together{size}:"]
    for place, one in enumerate(shown, 1):
        entry, calls = one.entry, one.cost.calls
        more = f" and {len(one.wheres) - 1} more" if len(one.wheres) > 1 else ""
        stock = "torch refuses" if one.stock is None else f"torch {one.stock * calls * 1e3:.2f} ms"
        ours = "not run" if one.ours is None else f"{one.ours * calls * 1e3:.2f} ms"
        lines += [
            f" {place}. {entry.source} → {entry.target} of {entry.dtype}{list(one.case.shape)}, {one.wheres[0]}{more}",
            f"    {calls} call{'' if calls == 1 else 's'} of {format_bytes(one.case.bytes_received)}: {stock}, "
            f"shardweave {ours}",
        ]
    return lines
