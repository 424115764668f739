"""`plan`, `plan_batch` and `redistribute_cost` for people who hold torch objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ...errors import ArgumentError, UnsupportedError, with_prefix
from ...planner import NVLINK_NODE, Batch, Layout, Mesh, Program, Request, Topology, check_shape
from ...planner import plan as plan_on_mesh
from ...planner import plan_batch as plan_batch_on_meshes
from ...planner import redistribute_cost as cost_on_mesh
from ..cache import forget_dead_groups, kept_with_group
from ..convert import dtype_name, layout_given, mesh_of


def plan(
    mesh: Mesh | DeviceMesh | Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | str,
    src: Layout | str | Sequence[Placement],
    dst: Layout | str | Sequence[Placement],
    *,
    target_mesh: Mesh | DeviceMesh | Sequence[int] | None = None,
    rank: int | None = None,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Program:
    """The program that takes a tensor of the global `shape` from layout `src` to layout `dst`.

    Args:
        mesh: a shape, a `Mesh` or a `DeviceMesh`.
        shape: of the whole tensor, over all ranks.
        dtype: a torch dtype or its name.
        src, dst: layouts, their text form such as "S0 S1" (`Layout.parse`), or torch's placements, one per mesh dim; a
            `_StridedShard` among these is read as an order where there is one.
        target_mesh: the mesh that `dst` is on, if it is another: of the same ranks, of some of them, of none. Positions
            are then counted over everyone, the ranks of `mesh` first (`Program.mesh`).
        rank: a row-major position in the mesh: only its own program. None: the program of all ranks.
        topology: what the ranks are linked by; the steps are those that are found to take least time on it. None: all
            ranks reach each other alike, and bytes alone decide.
        max_bytes: what a rank may hold at most at any time: input, output, and what lies between.

    Raises:
        ArgumentError: something does not fit, or no plan that was found keeps to `max_bytes`; the text names the
            argument, its value and what is allowed.
        UnsupportedError: a reduction that has no meaning for the dtype, or a target that is refused.
    """
    *asked, there = _request(mesh, shape, dtype, src, dst, target_mesh).fields()
    return plan_on_mesh(*asked, target_mesh=there, rank=rank, topology=topology, max_bytes=max_bytes)


def plan_batch(
    requests: Sequence[Request | tuple],
    *,
    rank: int | None = None,
    topology: Topology | None = None,
    max_bytes: int | None = None,
) -> Batch:
    """The programs of several tensors, to be carried out together: a refit, an optimizer's step.

    In each round ranks meet once, or exchange one message per pair, whatever the number of tensors.

    Args:
        requests: tuples (mesh, shape, dtype, src, dst) or (mesh, shape, dtype, src, dst, target_mesh), each as for
            `plan`; meshes and dtypes may differ.
        rank: only this rank's part (a rank, not a position: meshes may differ), None: of all ranks.
        topology: as for `plan`; a round's latency is shared by all tensors.
        max_bytes: what a rank may hold of all tensors together at any time; where that is less than they ask for, each
            is planned with as much less.

    Raises:
        ArgumentError: as for `plan`, with the number of the request in front; no plans were found that keep to
            `max_bytes` together.
        UnsupportedError: as for `plan`.
    """
    if not isinstance(requests, Sequence):
        raise ArgumentError(f"requests: {requests!r}; allowed: a list of requests")
    found = []
    for number, given in enumerate(requests):
        fields = given.fields() if isinstance(given, Request) else given
        if not isinstance(fields, tuple | list) or not 5 <= len(fields) <= 6:
            raise ArgumentError(
                f"requests[{number}]: {given!r}; allowed: mesh, shape, dtype, src, dst and perhaps target_mesh"
            )
        try:
            found.append(_request(*fields))
        except (ArgumentError, UnsupportedError) as error:
            raise with_prefix(error, f"requests[{number}]") from None
    return plan_batch_on_meshes(found, rank=rank, topology=topology, max_bytes=max_bytes)


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
    asked = _request(mesh, shape, dtype, src, dst)
    price = cost_on_mesh(asked.mesh, asked.shape, asked.dtype, asked.src, asked.dst, topology)
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


def _request(mesh: Any, shape: Any, dtype: Any, src: Any, dst: Any, target_mesh: Any = None) -> Request:
    """A request in the planner's own terms."""
    here = _mesh(mesh)
    there = here if target_mesh is None else _mesh(target_mesh)
    shape = check_shape(shape)
    source, target = layout_given("src", src, here, len(shape)), layout_given("dst", dst, there, len(shape))
    return Request(here, shape, dtype_name(dtype), source, target, None if target_mesh is None else there)


def _mesh(given: Any) -> Mesh:
    if isinstance(given, Mesh):
        return given
    return mesh_of(given) if isinstance(given, DeviceMesh) else Mesh(given)
