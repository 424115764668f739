"""Checks of the arguments of a request: shapes, layouts, target placements, local shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from ..errors import ArgumentError, UnsupportedError, shown, with_prefix
from .layouts.dtypes import check_reducible
from .layouts.layout import Layout, pairs_of
from .layouts.mesh import Mesh, whole_numbers
from .layouts.placements import Partial, Placement
from .program_base import ProgramBase

_MAX_ELEMENTS = 1 << 58  # at 16 bytes each this is 2**62 bytes
_MAX_DIMS = 32  # together with 24 mesh dims, numpy's limit on array dims
_MAX_SPANS = 1 << 22  # of a strided shard along one tensor dim


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` as a tuple of plain ints.

    Raises:
        ArgumentError: it is not a sequence of whole numbers, a size is negative, there are over 32 dims or over 2**58
            elements.
    """
    sizes = whole_numbers("shape", shape)
    if sizes and min(sizes) < 0:
        raise ArgumentError(f"shape: {shown(sizes)} has a negative size; allowed: 0 and up")
    if len(sizes) > _MAX_DIMS:
        raise ArgumentError(f"shape: {shown(sizes)} has {len(sizes)} dims; allowed: up to {_MAX_DIMS}")
    if math.prod([max(n, 1) for n in sizes]) > _MAX_ELEMENTS:
        raise ArgumentError(f"shape: {shown(sizes)} has more than 2**58 elements; allowed: up to 2**58")
    return sizes


def resolve_layout(argument: str, layout: Layout | str, mesh: Mesh) -> Layout:
    """A layout, or its text form, as a layout in which strided shards are shard orders wherever possible.

    Raises:
        ArgumentError, LayoutSyntaxError, UnsupportedError: it is not a valid layout; the message begins with
            `argument`.
    """
    if isinstance(layout, Layout):
        return layout.decoded(mesh.shape) if len(layout.placements) == mesh.ndim else layout
    if not isinstance(layout, str):
        raise ArgumentError(f"{argument}: {shown(layout)}; allowed: a Layout or its text form")
    try:
        return Layout.parse(layout, mesh.shape)
    except (ArgumentError, UnsupportedError) as error:
        raise with_prefix(error, argument) from None


@lru_cache(maxsize=4096)
def normalized_layouts(mesh: Mesh, ndim: int, dtype: str, source: Layout, target: Layout) -> tuple[Layout, ...]:
    """Check the layouts of a tensor of `ndim` dims, and return them with mesh dims of size 1 replicated.

    Returns:
        (source, target), or (source,) if they are equal.
    """
    sizes = (1,) * ndim  # the checks do not depend on the sizes
    check_layout("source", source, mesh, sizes, dtype)
    check_layout("target", target, mesh, sizes, dtype)
    check_target(target, source.placements)
    before, after = source.without_size_one(mesh.shape), target.without_size_one(mesh.shape)
    return (before,) if before == after else (before, after)


def check_layout(name: str, layout: Layout, mesh: Mesh, shape: tuple[int, ...], dtype: str) -> None:
    """Check that a layout fits a mesh, a shape and a dtype.

    Raises:
        ArgumentError: the number of placements is not the number of mesh dims, or a sharded tensor dim does not exist.
        UnsupportedError: a strided shard has over 2**22 spans, or a partial op is not defined for the dtype.
    """
    layout.check(mesh.shape, len(shape), name)
    for tensor_dim, cuts in layout.all_cuts:
        spans = min(sum(split for _, split in pairs_of(cuts) if split > 1), shape[tensor_dim])
        if spans > _MAX_SPANS:
            raise UnsupportedError(
                f"{name}: ({layout}) cuts tensor dim {tensor_dim} of {shape[tensor_dim]} into {spans} pieces; "
                f"allowed: up to {_MAX_SPANS}"
            )
    for mesh_dim, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            try:
                check_reducible(dtype, placement.op)
            except UnsupportedError as error:
                raise with_prefix(error, f"{name}: mesh dim {mesh_dim}") from None


def check_target(target: Layout, source_placements: Sequence[Placement | None]) -> None:
    """Raise UnsupportedError if a mesh dim becomes a partial product."""
    for mesh_dim, (before, after) in enumerate(zip(source_placements, target.placements, strict=True)):
        if after == Partial("prod") and before != after:
            raise UnsupportedError(
                f"target: mesh dim {mesh_dim} becomes a partial product; allowed: sum, avg, max, min"
            )


def check_local_shape(
    program: ProgramBase, position: int, local_shape: Sequence[int], name: str = "local tensor"
) -> None:
    """Raise ArgumentError unless `local_shape` is the shape of the source shard at a mesh position."""
    expected = program.source_shape(position)
    if tuple(local_shape) != expected:
        raise ArgumentError(
            f"{name}: rank at mesh position {position} gave shape {tuple(local_shape)}; layout {program.source} of "
            f"global shape {program.shape} on mesh {program.source_mesh.shape} allows only {expected}"
        )
