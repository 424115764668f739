"""Parses programs from plain values.

Only the source and target layouts of each step are taken from the input. Everything else is planned again from these
and must equal the input, so that no number from the input reaches the runtime.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...errors import ArgumentError, ShardweaveError, shown
from ..arguments import check_layout, check_shape, check_target
from ..cost.topology import Topology
from ..exchange.build_steps import build_step
from ..exchange.node_change import layout_change
from ..exchange.steps import Step
from ..layouts.dtypes import check_dtype
from ..layouts.index_sets import held_box
from ..layouts.layout import Layout, pairs_of
from ..layouts.mesh import Mesh, union_mesh
from ..layouts.node_layout import MAX_RANKS, NodeLayout, parse_node_layout
from ..layouts.nodes import Nodes
from ..layouts.placements import Shard
from ..mesh_split import on_parts
from ..path import Path
from ..program_base import ProgramBase, Requested
from .program_to_json import TOTALS, step_to_dict

_MAX_SPANS = 1 << 22  # common spans of all pairs of shards along a strided tensor dim
_MAX_NUMBER = 1 << 100  # microseconds or bytes of a path, above any sum over its steps
_PRICE_TOLERANCE = 1e-6  # relative; numpy may add in another order
_ENDS = ("mesh", "target_mesh", "source", "target")
_KEYS = (*_ENDS, "shape", "dtype", "rank", "requested", "steps", "topology", "others", *TOTALS)
_STEP_KEYS = ("kind", "source", "target", "meshes", "group", "reduce", "fill", "boxes")
T = TypeVar("T")
AnyProgram = TypeVar("AnyProgram", bound=ProgramBase)


class _LayoutOnMesh(NamedTuple):
    mesh: Mesh
    layout: Layout


def parse_program(kind: type[AnyProgram], data: Any) -> AnyProgram:
    """The program, of class `kind`, whose `to_dict` is `data`.

    Raises:
        ArgumentError: `data` is not an output of `to_dict`; the message gives the place, the value and what is allowed.
    """
    _check_keys("", data, _KEYS)
    mesh = _mesh("mesh", data["mesh"])
    other = mesh if data["target_mesh"] is None else _mesh("target_mesh", data["target_mesh"])
    if data["target_mesh"] is not None and mesh.same_ranks(other):
        raise _wrong("target_mesh", data["target_mesh"], "null if the ranks and positions are those of mesh")
    shape = _made("shape", check_shape, _list("shape", data["shape"]))
    dtype = _made("dtype", check_dtype, data["dtype"])
    union, rank = union_mesh(mesh, other), data["rank"]
    if rank is not None and (type(rank) is not int or not 0 <= rank < union.size):
        raise _wrong("rank", rank, f"0..{union.size - 1}, or null")
    source = _layout("source", data["source"], mesh, shape, dtype)
    target = _layout("target", data["target"], other, shape, dtype)
    topology = None if data["topology"] is None else _made("topology", Topology.from_dict, data["topology"])
    # One number per rank is required, so that a short input cannot describe a mesh that takes long to plan.
    _list("bytes_received", data["bytes_received"], union.size if rank is None else 1)
    requested = None
    if data["requested"] is not None:
        requested = _requested(data["requested"], (mesh, source), (other, target), shape, dtype)
    program = kind(union, shape, dtype, source, target, (), rank, topology, (), mesh, other, requested)
    at = _LayoutOnMesh(mesh, source.without_size_one(mesh.shape))
    end = _LayoutOnMesh(other, target.without_size_one(other.shape))
    steps: list[Step] = []
    for number, entry in enumerate(_list("steps", data["steps"])):
        step = _step(f"steps[{number}]", entry, program, at)
        _check_same(f"steps[{number}]", entry, step_to_dict(program, step))
        steps.append(step)
        at = _LayoutOnMesh(step.target_mesh, step.target)
    if at != end:
        raise _refused("steps", f"{len(steps)} steps that end at ({at.layout})", f"steps that end at ({end.layout})")
    others = tuple(_path(f"others[{i}]", entry) for i, entry in enumerate(_list("others", data["others"])))
    program = replace(program, steps=tuple(steps), others=others)
    for name in TOTALS:
        _check_same(name, data[name], getattr(program, name))
    return program


def _requested(
    data: Any, before: tuple[Mesh, Layout], after: tuple[Mesh, Layout], shape: tuple[int, ...], dtype: str
) -> Requested:
    """The request of a program between these ends, made of those of the request by splitting mesh dims."""
    _check_keys("requested", data, _ENDS)
    ends: list[Any] = []
    for (on, name), (mesh, layout) in zip(
        (("mesh", "source"), ("target_mesh", "target")), (before, after), strict=True
    ):
        given = _mesh(f"requested.{on}", data[on])
        if given.rank_array.ravel().tolist() != mesh.rank_array.ravel().tolist():
            raise _wrong(f"requested.{on}", data[on], f"a mesh with the ranks of {on}, in the same order")
        asked = _layout(f"requested.{name}", data[name], given, shape, dtype)
        made = on_parts(given, asked, mesh)
        if made is None:
            raise _wrong(f"requested.{on}", data[on], f"a mesh of which some dims are split in {on}")
        if made != layout:
            raise _refused(f"requested.{name}", f"{asked}, which is ({made}) on {on}", f"what is ({layout}) there")
        ends += [given, asked]
    if ends[0] == before[0] and ends[2] == after[0]:
        raise _wrong("requested", data, "null if no mesh dim is split")
    return Requested(*ends)


def _step(place: str, entry: Any, program: ProgramBase, before: _LayoutOnMesh) -> Step:
    """The step planned between the layouts of `entry`, which must begin at `before`."""
    _check_keys(place, entry, _STEP_KEYS)
    meshes = {"source": program.source_mesh} | ({"target": program.target_mesh} if program.is_cross_mesh else {})
    ends = []
    for name, on in zip(("source", "target"), _list(f"{place}.meshes", entry["meshes"], 2), strict=True):
        if not isinstance(on, str) or on not in meshes:
            raise _wrong(f"{place}.meshes", entry["meshes"], f"two of {', '.join(meshes)}")
        nodes = None if program.topology is None else program.topology.rank_nodes
        layout = _layout(f"{place}.{name}", entry[name], meshes[on], program.shape, program.dtype, nodes)
        ends.append(_LayoutOnMesh(meshes[on], layout))
    source, target = ends
    if source != before:
        raise _refused(
            f"{place}.source", str(source.layout), f"({before.layout}) on mesh {before.mesh}, where the program is"
        )
    plain = target.layout.without_size_one(target.mesh.shape)
    if target.layout != plain or target == source:
        raise _refused(
            f"{place}.target", str(target.layout), "a layout other than the source, with R along mesh dims of size 1"
        )
    if source.mesh == target.mesh:
        _made(f"{place}.target", lambda _: check_target(target.layout, source.layout.placements), None)
    elif source.layout.has_partial or target.layout.has_partial:
        raise _refused(f"{place}.target", str(target.layout), "layouts without partial between two meshes")
    _check_rows(f"{place}.boxes", entry["boxes"], program, source, target)
    return _made(f"{place}.target", lambda _: _build(program, source, target), None)


def _build(program: ProgramBase, source: _LayoutOnMesh, target: _LayoutOnMesh) -> Step:
    nodes = None if program.topology is None else program.topology.rank_nodes
    change = layout_change(source.mesh, program.dtype, source.layout, target.layout, nodes, target.mesh, program.mesh)
    return build_step(change, program.shape, program.rank)


def _check_rows(place: str, boxes: Any, program: ProgramBase, source: _LayoutOnMesh, target: _LayoutOnMesh) -> None:
    """Check that the input has as many boxes as the step has at least, so that planning the step takes memory in
    proportion to the input."""
    if not isinstance(boxes, Mapping) or not {"receiver", "sender"} <= set(boxes):
        raise _wrong(place, boxes, "an object of receiver, sender, …")
    number = len(_list(f"{place}.receiver", boxes["receiver"]))
    if isinstance(source.layout, NodeLayout) or isinstance(target.layout, NodeLayout):
        return  # of few ranks
    pairs = zip(source.mesh.shape, source.layout.placements, strict=True)
    terms = math.prod(
        n for m, (n, p) in enumerate(pairs) if m in source.layout.partial_dims and target.layout.placements[m] != p
    )
    senders = _list(f"{place}.sender", boxes["sender"], number)
    if not all(isinstance(row, list | tuple) and len(row) == terms for row in senders):
        raise _wrong(f"{place}.sender", boxes["sender"], f"lists of {terms}, one for each of {number} boxes")
    least = _least_rows(place, program, source, target)
    if number < least:
        raise _refused(f"{place}.receiver", f"{number} boxes", f"at least {least} for these layouts")


def _least_rows(place: str, program: ProgramBase, source: _LayoutOnMesh, target: _LayoutOnMesh) -> int:
    """The number of boxes that a step has at least; exact for a program of all ranks without strided shards.

    Each receiver has one box for each piece into which the source's cuts divide its target shard.
    """
    at = None if program.rank is None else program.coordinate_in(target.mesh, program.rank)
    if 0 in program.shape or (at is None and program.rank is not None):
        return 0
    box = None if at is None else held_box(program.shape, target.layout, target.mesh.shape, at)
    rows = 1
    if box is None:
        placed = zip(target.mesh.shape, target.layout.placements, strict=True)
        rows = math.prod(n for n, p in placed if not isinstance(p, Shard))
    strided = {*source.layout.strided_dims, *target.layout.strided_dims}
    for d, extent in enumerate(program.shape):
        cuts = [
            [(held.mesh.shape[m], split) for m, split in pairs_of(held.layout.cuts(d))] for held in (source, target)
        ]
        if d in strided:
            pieces = min(sum(split for _, split in cuts[0] + cuts[1]), extent) * math.prod(
                n for n, _ in cuts[0] + cuts[1]
            )
            if pieces > _MAX_SPANS:
                raise _refused(place, f"up to {pieces} pieces along strided tensor dim {d}", f"up to {_MAX_SPANS}")
            continue
        starts = [_starts(extent, [n for n, _ in of_end]) for of_end in cuts]
        if box is None:
            rows *= len(np.union1d(*starts))
        else:
            low, high = box[d]
            within = starts[0][(low < starts[0]) & (starts[0] < high)]
            rows *= len(within) + 1 if low < high else 0
    return rows


def _starts(extent: int, sizes: Sequence[int]) -> np.ndarray:
    """The starts of the non-empty shards of a tensor dim that mesh dims of the given sizes cut one after the other."""
    start, stop = np.zeros(1, dtype=np.int64), np.full(1, extent, dtype=np.int64)
    for n in sizes:
        size = -(-(stop - start) // n)
        begin = start[:, None] + np.arange(n) * size[:, None]
        end = np.minimum(begin + size[:, None], stop[:, None])
        start, stop = begin[begin < end], end[begin < end]
    return start


def _mesh(place: str, given: Any) -> Mesh:
    _check_keys(place, given, ("shape", "names", "ranks"))
    for name in ("shape", "names", "ranks"):
        if given[name] is not None or name == "shape":
            _list(f"{place}.{name}", given[name])
    mesh = _made(place, lambda values: Mesh(**values), given)
    _check_same(f"{place}.ranks", given["ranks"], mesh.ranks)
    return mesh


def _layout(
    place: str, given: Any, mesh: Mesh, shape: tuple[int, ...], dtype: str, nodes: Nodes | None = None
) -> Layout:
    layout: Layout | None = None
    if nodes is not None and isinstance(given, str) and len(shape):
        layout = _made(place, lambda text: parse_node_layout(text, mesh, nodes), given)
        if isinstance(layout, NodeLayout) and (layout.tensor_dim >= len(shape) or mesh.size > MAX_RANKS):
            raise _wrong(place, given, f"a cut of tensor dims 0..{len(shape) - 1} on up to {MAX_RANKS} ranks")
    if layout is None:
        layout = _made(place, lambda text: Layout.parse(text, mesh.shape), given)
    _made(place, lambda parsed: check_layout("layout", parsed, mesh, shape, dtype), layout)
    _check_same(place, given, str(layout))
    return layout


def _path(place: str, given: Any) -> Path:
    """A rejected path, which is only shown."""
    _check_keys(place, given, ("layouts", "us", "peak_bytes", "over_max_bytes"))
    layouts = [
        _made(f"{place}.layouts[{i}]", Layout.parse, text.partition(" | ")[0] if isinstance(text, str) else text)
        for i, text in enumerate(_list(f"{place}.layouts", given["layouts"]))
    ]
    if type(given["us"]) not in (int, float) or not (0 <= given["us"] < _MAX_NUMBER or given["us"] == math.inf):
        raise _wrong(f"{place}.us", given["us"], "microseconds, 0 or more")
    if type(given["peak_bytes"]) is not int or not 0 <= given["peak_bytes"] < _MAX_NUMBER:
        raise _wrong(f"{place}.peak_bytes", given["peak_bytes"], "bytes, 0 or more")
    if type(given["over_max_bytes"]) is not bool:
        raise _wrong(f"{place}.over_max_bytes", given["over_max_bytes"], "true, false")
    return Path(tuple(layouts), given["us"], given["peak_bytes"], over_max_bytes=given["over_max_bytes"])


def _wrong(place: str, given: object, allowed: str) -> ArgumentError:
    return _refused(place, shown(given), allowed)


def _refused(place: str, value: str, allowed: str) -> ArgumentError:
    return ArgumentError(f"program: {place}{': ' if place else ''}{value}; allowed: {allowed}")


def _made(place: str, make: Callable[[Any], T], given: Any) -> T:
    """`make(given)`, with the place in front of the message of what it raises."""
    try:
        return make(given)
    except ShardweaveError as error:
        message = str(error)
        raise ArgumentError(f"program: {'' if message.startswith(f'{place}: ') else f'{place}: '}{message}") from None


def _check_keys(place: str, given: Any, keys: Sequence[str]) -> None:
    if not isinstance(given, Mapping):
        raise _wrong(place, given, f"an object of {', '.join(keys)}")
    for key in keys:
        if key not in given:
            raise ArgumentError(f"program: {place}{'.' if place else ''}{key}: missing; allowed: an output of to_dict")
    for key in given:
        if key not in keys:
            raise _refused(place, f"unknown key {shown(key)}", f"an object of {', '.join(keys)}")


def _list(place: str, given: Any, number: int | None = None) -> Sequence[Any]:
    if not isinstance(given, list | tuple) or (number is not None and len(given) != number):
        raise _wrong(place, given, "a list" if number is None else f"a list of {number}")
    return given


def _check_same(place: str, given: Any, wanted: Any) -> None:
    """Check that a value is what `to_dict` makes, apart from the last digits of prices."""
    try:
        if json.dumps(given, sort_keys=True) == json.dumps(wanted, sort_keys=True):
            return
    except (TypeError, ValueError, RecursionError):
        pass  # not JSON values; `_find_difference` finds the place
    _find_difference(place, given, wanted)


def _find_difference(place: str, given: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        _check_keys(place, given, tuple(wanted))
        for key, value in wanted.items():
            _find_difference(f"{place}.{key}", given[key], value)
    elif isinstance(wanted, list | tuple):
        for i, value in enumerate(wanted):
            if i < len(_list(place, given)):
                _find_difference(f"{place}[{i}]", given[i], value)
        _list(place, given, len(wanted))
    elif isinstance(wanted, float):
        if type(given) not in (int, float) or not math.isclose(given, wanted, rel_tol=_PRICE_TOLERANCE):
            raise _wrong(place, given, f"{wanted!r}, which follows from the rest")
    elif type(given) is not type(wanted) or given != wanted:
        raise _wrong(place, given, f"{'null' if wanted is None else repr(wanted)}, which follows from the rest")
