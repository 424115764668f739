"""`python -m shardweave replay TRACE …`: a program's redistributions once more, by torch and by shardweave, in turns.

Each distinct one is made in the ranks of this machine, checked against slices of the whole tensor where nothing is
summed, and against each other where something is; then timed in turns.
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
from ..planner import Layout, Mesh, Partial, Replicate
from ..planner.explanation import format_bytes
from ..runtime.drop_in import stock_redistribute_local_tensor
from ..runtime.redistribution import How, run_redistribution
from ..runtime.specs import spec_of_layout
from ..runtime.trace import Cost, Entry, Trace, merged
from .compare import ROUNDS, time_in_turns
from .ranks import Ranks, RanksFailed, Send
from .workloads import scale

MOST_RANKS = 16
_PLAIN_WIDTH = 170  # of a table that no terminal bounds


@dataclass(frozen=True)
class Replayed:
    """One distinct redistribution, from however many places. Times are seconds of the slowest rank, None: not run."""

    entry: Entry
    cost: Cost
    wheres: tuple[str, ...]
    stock: float | None
    ours: float | None
    notes: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def saved(self) -> float:
        """Seconds over all calls of the program."""
        return 0.0 if self.stock is None or self.ours is None else (self.stock - self.ours) * self.cost.calls

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.entry.to_dict(),
            "calls": self.cost.calls,
            "bytes_received": self.cost.bytes_received,
            "where": list(self.wheres),
            "torch_s": self.stock,
            "shardweave_s": self.ours,
            "notes": list(self.notes),
            "faults": list(self.faults),
        }


def distinct(trace: Trace) -> list[tuple[Entry, Cost, tuple[str, ...]]]:
    """The redistributions, wherever they were asked for; what moves most bytes first."""
    places: dict[Entry, list[tuple[str, Cost]]] = {}
    for entry, cost in trace.heaviest_first():
        places.setdefault(replace(entry, where="", traced=False), []).append((entry.where, cost))
    found = [
        (entry, Cost(sum(cost.calls for _, cost in at), at[0][1].bytes_received), tuple(where for where, _ in at))
        for entry, at in places.items()
    ]
    return sorted(found, key=lambda item: -item[1].bytes_in_all)


def rank_main(rank: int, size: int, config: dict[str, Any], send: Send) -> None:
    """A rank of the replay."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # stock's advice about its own plans, once a rank
    meshes: dict[Mesh, DeviceMesh] = {}
    for number, (entry, _, _) in enumerate(config["cases"]):
        for mesh in (entry.mesh, entry.target_mesh or entry.mesh):
            if mesh not in meshes:  # made by all ranks alike, members or not
                meshes[mesh] = DeviceMesh("cpu", mesh.rank_array.reshape(mesh.shape), mesh_dim_names=mesh.names)
        send({"number": number, **_replay(entry, meshes, config)})


def _replay(entry: Entry, meshes: dict[Mesh, DeviceMesh], config: dict[str, Any]) -> dict[str, Any]:
    """What this rank found: faults, notes, and seconds of each side by round."""
    how = How(world=config["world"])
    shape = tuple(map(scale, entry.shape)) if config["scaled"] else entry.shape
    whole = _whole(shape, getattr(torch, entry.dtype))
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    other = entry.target_mesh or entry.mesh
    layouts = Layout.parse(entry.source, entry.mesh.shape), Layout.parse(entry.target, other.shape)
    source, target = (
        spec_of_layout(layout, meshes[mesh], meta) for layout, mesh in zip(layouts, (entry.mesh, other), strict=True)
    )
    crosses = entry.mesh != other
    takes_part = any(meshes[mesh].get_coordinate() is not None for mesh in (entry.mesh, other))
    mine = _part(whole, layouts[0], entry.mesh, meta, meshes, how)
    terms = math.prod(
        n
        for n, p in zip(entry.mesh.shape, layouts[0].placements, strict=True)
        if isinstance(p, Partial) and p.op == "sum" and entry.dtype != "bool"
    )
    wanted = _part(whole * terms if terms > 1 else whole, layouts[1], other, meta, meshes, how)
    # Terms are all alike, and what becomes partial may be any terms.
    checked = not layouts[1].has_partial and not any(getattr(p, "op", "") == "prod" for p in layouts[0].placements)

    def ours() -> torch.Tensor:
        return run_redistribution(mine, source, target, how) if takes_part else mine

    def stock() -> torch.Tensor:
        return stock_redistribute_local_tensor(mine, source, target) if takes_part else mine

    found, notes = ours(), []
    fault = _fault(found, wanted) if checked else None
    refused = "another mesh" if crosses else None
    try:
        if not crosses and checked and (theirs := _fault(stock(), wanted)):
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


def _whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Powers of two: sums of as many equal ones as there are ranks are exact in every dtype, if those are one too."""
    values = torch.arange(math.prod(shape)).remainder_(4).reshape(shape)
    return values.bool() if dtype is torch.bool else (2.0**values if dtype.is_floating_point else values).to(dtype)


def _part(
    whole: torch.Tensor, layout: Layout, mesh: Mesh, meta: TensorMeta, meshes: dict[Mesh, DeviceMesh], how: How
) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole; all of it where the layout is partial."""
    if meshes[mesh].get_coordinate() is None:
        return whole.new_empty((0,) * max(whole.ndim, 1))
    cut = Layout([Replicate() if isinstance(p, Partial) else p for p in layout.placements], layout.orders)
    replicated = spec_of_layout(Layout([Replicate()] * mesh.ndim), meshes[mesh], meta)
    return run_redistribution(whole, replicated, spec_of_layout(cut, meshes[mesh], meta), how).clone()


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
        ArgumentError: traces that cannot be read, of too many ranks, or with nothing to replay.
    """
    trace = merged([Trace.read(path) for path in paths])
    cases = [case for case in distinct(trace) if only in " ".join((*case[2], case[0].source, case[0].target))][:most]
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
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    gathered: list[dict[int, dict[str, Any]]] = [{} for _ in cases]
    config = {"cases": cases, "world": world, "scaled": scaled, "rounds": ROUNDS}
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
    replayed = [
        _together(*case, [found[r] for r in sorted(found)]) for case, found in zip(cases, gathered, strict=True)
    ]
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


def _together(entry: Entry, cost: Cost, wheres: tuple[str, ...], by_rank: list[dict[str, Any]]) -> Replayed:
    def slowest(side: str) -> float | None:
        if any(found[side] is None for found in by_rank):
            return None
        return statistics.median(map(max, zip(*(found[side] for found in by_rank), strict=True)))

    faults = tuple(f"rank {r}: {text}" for r, found in enumerate(by_rank) for text in found["faults"])
    notes = tuple(dict.fromkeys(text for found in by_rank for text in found["notes"]))
    return Replayed(entry, cost, wheres, slowest("stock"), slowest("ours"), notes, faults)


def _show(console: Console, trace: Trace, replayed: list[Replayed], scaled: bool) -> None:
    table = Table(title_justify="left", header_style="bold", show_edge=False, pad_edge=False)
    for name in ("where", "mesh", "tensor", "layouts"):
        table.add_column(name, overflow="fold")
    for name in ("calls", "received", "torch\nms", "shardweave\nms", "ratio", "saved\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in sorted(replayed, key=lambda one: -(one.stock or 0.0) * one.cost.calls):
        ratio = f"{one.stock / one.ours:.1f}" if one.stock and one.ours else "-"
        mesh = str(one.entry.mesh) if one.entry.target_mesh is None else f"{one.entry.mesh} to {one.entry.target_mesh}"
        table.add_row(
            "\n".join(one.wheres[:3]) + (f"\nand {len(one.wheres) - 3} more" if len(one.wheres) > 3 else ""),
            mesh,
            f"{one.entry.dtype}{list(one.entry.shape)}",
            f"{one.entry.source} → {one.entry.target}",
            str(one.cost.calls),
            format_bytes(one.cost.bytes_received),
            "-" if one.stock is None else f"{one.stock * 1e3:.3f}",
            "-" if one.ours is None else f"{one.ours * 1e3:.3f}",
            ratio,
            f"{one.saved * 1e3:.1f}",
        )
    console.print(table)
    stock = sum((one.stock or 0.0) * one.cost.calls for one in replayed)
    ours = sum((one.ours or 0.0) * one.cost.calls for one in replayed if one.stock is not None)
    size = ", shapes an eighth" if scaled else ""
    console.print(
        f"All calls of a rank, on {trace.world_size} ranks of this machine ({os.cpu_count()} cores{size}): "
        f"torch {stock * 1e3:.1f} ms, shardweave {ours * 1e3:.1f} ms."
    )
    for one in replayed:
        for text in (*one.notes, *(f"shardweave is wrong: {fault}" for fault in one.faults)):
            console.print(f"{one.entry.source} → {one.entry.target} of {list(one.entry.shape)}: {text}", markup=False)
    for why, calls in trace.left_out.items():
        console.print(f"not in the trace: {calls} calls: {why}", markup=False)
