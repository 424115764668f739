"""What is asked, read and checked before anything is planned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ArgumentError, LayoutSyntaxError, UnsupportedError, shown
from .dtypes import check_reducible
from .layout import Layout, pairs_of
from .mesh import Mesh, whole_numbers
from .placements import Partial, Placement
from .program import Program
from .topology import Topology

_MOST_ELEMENTS = 1 << 58  # of 16 bytes each, 2**62
_MOST_DIMS = 32  # with 24 of a mesh, as many as an array of numpy may have
_MOST_SPANS = 1 << 22  # that a strided shard falls into


@dataclass(frozen=True)
class Asked:
    """What `plan` is asked besides the meshes, checked."""

    shape: tuple[int, ...]
    dtype: str
    src: Layout
    dst: Layout
    rank: int | None
    topology: Topology | None
    max_bytes: int | None


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = whole_numbers("shape", shape)
    if sizes and min(sizes) < 0:
        raise ArgumentError(f"shape: {shown(sizes)} has a negative size; allowed: 0 and up")
    if len(sizes) > _MOST_DIMS:
        raise ArgumentError(f"shape: {shown(sizes)} has {len(sizes)} dims; allowed: up to {_MOST_DIMS}")
    if math.prod([max(n, 1) for n in sizes]) > _MOST_ELEMENTS:
        raise ArgumentError(f"shape: {shown(sizes)} has more than 2**58 elements; allowed: what 64-bit offsets reach")
    return sizes


def layout_of(argument: str, given: Layout | str, mesh: Mesh) -> Layout:
    if isinstance(given, Layout):
        return given.decoded(mesh.shape) if len(given.placements) == mesh.ndim else given
    if not isinstance(given, str):
        raise ArgumentError(f"{argument}: {shown(given)}; allowed: a Layout or its text form")
    try:
        return Layout.parse(given, mesh.shape)
    except LayoutSyntaxError as error:
        raise LayoutSyntaxError(error.text, error.position, f"{argument}: {error.reason}") from None
    except (ArgumentError, UnsupportedError) as error:
        raise type(error)(f"{argument}: {error}") from None


@lru_cache(maxsize=4096)
def checked(mesh: Mesh, ndim: int, dtype: str, src: Layout, dst: Layout) -> tuple[Layout, ...]:
    """Source and target, of a tensor of `ndim` dims, with mesh dims of size 1 replicated, only one where they are the
    same then."""
    sizes = (1,) * ndim  # any will do
    check_layout("src", src, mesh, sizes, dtype)
    check_layout("dst", dst, mesh, sizes, dtype)
    check_target(dst, src.placements)
    source, target = src.without_size_one(mesh.shape), dst.without_size_one(mesh.shape)
    return (source,) if source == target else (source, target)


def check_layout(name: str, layout: Layout, mesh: Mesh, shape: tuple[int, ...], dtype: str) -> None:
    layout.check(mesh.shape, len(shape), name)
    for tensor_dim, cuts in layout.all_cuts:
        spans = min(sum(split for _, split in pairs_of(cuts) if split > 1), shape[tensor_dim])
        if spans > _MOST_SPANS:
            raise UnsupportedError(
                f"{name}: ({layout}) cuts tensor dim {tensor_dim} of {shape[tensor_dim]} into {spans} pieces; "
                f"allowed: up to {_MOST_SPANS}"
            )
    for mesh_dim, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            try:
                check_reducible(dtype, placement.op)
            except UnsupportedError as error:
                raise UnsupportedError(f"{name}: mesh dim {mesh_dim}: {error}") from None


def check_target(dst: Layout, before: Sequence[Placement | None]) -> None:
    for mesh_dim, (a, b) in enumerate(zip(before, dst.placements, strict=True)):
        if b == Partial("prod") and a != b:
            raise UnsupportedError(f"dst: mesh dim {mesh_dim} becomes a partial product; allowed: sum, avg, max, min")


def check_local_shape(program: Program, position: int, given: Sequence[int], name: str = "local tensor") -> None:
    """Raise ArgumentError unless `given` is the shape of the source shard at a mesh position."""
    needed = program.source_shape(position)
    if tuple(given) != needed:
        raise ArgumentError(
            f"{name}: rank at mesh position {position} gave shape {tuple(given)}; layout {program.src} of global shape "
            f"{program.shape} on mesh {program.source_mesh.shape} allows only {needed}"
        )
