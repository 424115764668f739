"""`plan` and `redistribute_cost` for people who hold torch objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ..errors import ArgumentError
from ..planner import NVLINK_NODE, Layout, Mesh, Program, Topology, check_shape
from ..planner import plan as plan_on_mesh
from ..planner import redistribute_cost as cost_on_mesh
from .dtypes import dtype_name
from .group_caches import forget_dead_groups, kept_with_group
from .specs import layout_given, mesh_of


def plan(
    mesh: Mesh | DeviceMesh | Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | str,
    src: Layout | str | Sequence[Placement],
    dst: Layout | str | Sequence[Placement],
    *,
    rank: int | None = None,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Program:
    """The program that takes a tensor of the global `shape` from layout `src` to layout `dst`.

    Args:
        mesh: a shape, a `Mesh` or a `DeviceMesh`.
        dtype: a torch dtype or its name.
        src, dst: layouts, their text form such as "S0 S1" (`Layout.parse`), or torch's placements, one per mesh dim; a
            `_StridedShard` among these is read as an order.
        rank: a row-major position in the mesh: only its own program. None: the program of all ranks.
        topology: what the ranks are linked by; the steps are those that take least time on it. None: all ranks reach
            each other alike, and bytes alone decide.
        max_bytes: what a rank may hold at most at any time: input, output, and what lies between.

    Raises:
        ArgumentError: something does not fit, or no plan that was found keeps to `max_bytes`; the text names the
            argument, its value and what is allowed.
        UnsupportedError: a reduction that has no meaning for the dtype, a target that is refused, strided shards that
            are no order.
    """
    request = _request(mesh, shape, dtype, src, dst)
    return plan_on_mesh(*request, rank=rank, topology=topology, max_bytes=max_bytes)


def redistribute_cost(
    mesh: Mesh | DeviceMesh | Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | str,
    src: Layout | str | Sequence[Placement],
    dst: Layout | str | Sequence[Placement],
    topology: Topology = NVLINK_NODE,
) -> float:
    """Microseconds that the cheapest program takes on the rank that takes longest; no program is made.

    Answers are kept: asking again costs a look-up, which is for solvers that ask the same many times.

    Args:
        mesh, shape, dtype, src, dst: as for `plan`.
        topology: what the ranks are linked by, and so what a byte, a message and a step cost.

    Returns:
        0 where nothing is to be done. A change that needs no communication costs what its copies do.

    Raises:
        ArgumentError: something does not fit; the text names the argument, its value and what is allowed.
        UnsupportedError: as for `plan`.
    """
    key: tuple[Any, ...] | None = (mesh, shape, dtype, src, dst, topology)
    try:
        return _prices[key]  # type: ignore[index]
    except KeyError:
        pass
    except TypeError:
        key = _hashable(mesh, shape, dtype, src, dst, topology)
        if key in _prices:
            return _prices[key]
    if not isinstance(topology, Topology):
        raise ArgumentError(f"topology: {topology!r}; allowed: a Topology")
    forget_dead_groups()
    price = cost_on_mesh(*_request(mesh, shape, dtype, src, dst), topology)
    if key is not None:
        if len(_prices) >= _KEPT_PRICES:
            _prices.clear()
        _prices[key] = price
    return price


_KEPT_PRICES = 65536
_prices: dict[tuple[Any, ...] | None, float] = kept_with_group({})


def _hashable(*arguments: Any) -> tuple[Any, ...] | None:
    """The arguments with lists as tuples; None where that is not enough."""
    key = tuple(tuple(argument) if isinstance(argument, list) else argument for argument in arguments)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _request(
    mesh: Any, shape: Any, dtype: Any, src: Any, dst: Any
) -> tuple[Mesh, tuple[int, ...], str, Layout | str, Layout | str]:
    """A request in the planner's own terms."""
    if not isinstance(mesh, Mesh):
        mesh = mesh_of(mesh) if isinstance(mesh, DeviceMesh) else Mesh(mesh)
    shape = check_shape(shape)
    source, target = (layout_given(name, x, mesh, len(shape)) for name, x in (("src", src), ("dst", dst)))
    return mesh, shape, dtype_name(dtype), source, target
