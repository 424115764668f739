"""A mesh of ranks: its sizes, the names of its dims, and the rank at each coordinate."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np

from ...errors import ArgumentError, shown

Coordinate = tuple[int, ...]
Pair = tuple[int, int]  # size, stride

MOST_RANKS = 1 << 24  # lists of all ranks must fit in memory
_MAX_SHOWN = 10**60  # larger numbers would make messages unreadable
_NOT_NUMBERS = (bytes, bytearray, Set, Mapping)
MAX_DIMS = 24  # together with 32 tensor dims, numpy's limit on array dims


def whole_numbers(argument: str, values: Iterable[int]) -> tuple[int, ...]:
    """`values` as plain ints.

    Raises:
        ArgumentError: not a sequence of whole numbers (bool is not accepted), or a number has more than 60 digits.
    """
    try:
        items = tuple(values)
        numbers = tuple(map(operator.index, items))
        # Bytes would pass as numbers, and sets have no order.
        if (isinstance(values, tuple) or not isinstance(values, _NOT_NUMBERS)) and bool not in map(type, items):
            if max(map(abs, numbers), default=0) < _MAX_SHOWN:
                return numbers
    except TypeError:
        pass
    raise ArgumentError(f"{argument}: {shown(values)}; allowed: whole numbers, such as (2, 2)")


@dataclass(frozen=True, init=False)
class Mesh:
    """A mesh of ranks in row-major order over `shape`.

    Each mesh dim is a row-major list of (size, stride) pairs, as in the layout algebra of CuTe. The rank at a
    coordinate is `offset` plus strides times digits, which indexes `table` if there is one. Slicing, flattening in any
    order, unflattening and transposing therefore never build a list of ranks. The planner works in row-major positions;
    the runtime converts these to ranks. Meshes are equal if all their fields are.

    Args:
        shape: the size of each mesh dim, or one int for a mesh of one dim.
        names: one distinct name per mesh dim; needed for `mesh["tp"]`, the submesh along these dims.
        ranks: the rank at each row-major position; default: `arange`.

    Raises:
        ArgumentError: a size is below 1, there are over 24 dims or 2**24 ranks, names or ranks do not fit the shape, or
            a rank is repeated, negative, or 2**24 or more.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    dims: tuple[tuple[Pair, ...], ...]
    offset: int
    table: tuple[int, ...] | None

    def __init__(
        self, shape: Sequence[int] | int, names: Sequence[str] | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        sizes = whole_numbers("mesh", (shape,) if isinstance(shape, int) else shape)
        if not sizes or any(n < 1 for n in sizes):
            raise ArgumentError(f"mesh: shape {shown(sizes)}; allowed: at least one dim, every size at least 1")
        if math.prod(sizes) > MOST_RANKS:
            raise ArgumentError(
                f"mesh: shape {shown(sizes)} has {shown(math.prod(sizes))} ranks; allowed: up to {MOST_RANKS}"
            )
        strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
        offset, table = 0, None
        if ranks is not None:
            if not isinstance(ranks, Iterable):
                raise ArgumentError(f"mesh: ranks {shown(ranks)}; allowed: a rank for each position, or None")
            first = (
                ranks
                if isinstance(ranks, bytes | bytearray | Set | Mapping)
                else tuple(islice(ranks, math.prod(sizes) + 1))
            )
            ranks = whole_numbers("mesh: ranks", first)
            if len(ranks) != math.prod(sizes) or len(set(ranks)) != len(ranks) or min(ranks) < 0:
                raise ArgumentError(
                    f"mesh: ranks {shown(ranks)} must be {math.prod(sizes)} different ranks >= 0 for shape {sizes}"
                )
            if max(ranks) >= MOST_RANKS:
                raise ArgumentError(f"mesh: ranks {shown(ranks)}; allowed: ranks below {MOST_RANKS}")
            steps = [ranks[step] - ranks[0] if n > 1 else 0 for n, step in zip(sizes, strides, strict=True)]
            if (_sums(ranks[0], list(zip(sizes, steps, strict=True))) == np.array(ranks)).all():
                offset, strides = ranks[0], steps
            else:
                table = ranks
        self._set([((n, step),) for n, step in zip(sizes, strides, strict=True)], names, offset, table)

    def _set(
        self,
        dims: Iterable[Sequence[Pair]],
        names: Sequence[str] | None,
        offset: int,
        table: tuple[int, ...] | None,
    ) -> Mesh:
        dims = tuple(map(_coalesced, dims))
        shape = tuple(math.prod(n for n, _ in pairs) for pairs in dims)
        if len(shape) > MAX_DIMS:
            raise ArgumentError(f"mesh: shape {shown(shape)} has {len(shape)} dims; allowed: up to {MAX_DIMS}")
        if names is not None and (
            isinstance(names, str)
            or not isinstance(names, Sequence)
            or not all(isinstance(name, str) for name in names)
            or len(names) != len(shape)
            or len(set(names)) != len(shape)
        ):
            given = tuple(names) if isinstance(names, list | tuple) else names
            raise ArgumentError(f"mesh: names {shown(given)}; allowed: {len(shape)} different names, one per mesh dim")
        fields = {"shape": shape, "names": None if names is None else tuple(names), "dims": dims, "offset": offset}
        for name, value in {**fields, "table": table}.items():
            object.__setattr__(self, name, value)
        # Cached, as meshes are keys of many caches. Names are left out: their hashes differ between processes.
        object.__setattr__(self, "_hash", hash((dims, offset, table or ())))
        return self

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or self._fields == other._fields

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.shape, self.names, self.dims, self.offset, self.table

    def _derived(self, dims: Iterable[Sequence[Pair]], names: Sequence[str] | None, offset: int | None = None) -> Mesh:
        return Mesh.__new__(Mesh)._set(dims, names, self.offset if offset is None else offset, self.table)

    @cached_property
    def ranks(self) -> tuple[int, ...] | None:
        """The rank at each row-major position; None for `arange`."""
        whole = _coalesced([pair for pairs in self.dims for pair in pairs])
        if self.table is None and self.offset == 0 and whole == _coalesced([(self.size, 1)]):
            return None
        return tuple(self.rank_array.tolist())

    @cached_property
    def rank_array(self) -> np.ndarray:
        """[size] the rank at each row-major position."""
        index = _sums(self.offset, _coalesced([pair for pairs in self.dims for pair in pairs]))
        return index if self.table is None else np.array(self.table)[index]

    def dim(self, given: int | str) -> int:
        """The index of a mesh dim that is given by name or index.

        Raises:
            ArgumentError: there is no such mesh dim.
        """
        if isinstance(given, str) and given in (self.names or ()):
            assert self.names is not None
            return self.names.index(given)
        if isinstance(given, int) and not isinstance(given, bool) and -self.ndim <= given < self.ndim:
            return given % self.ndim
        allowed = [*range(self.ndim), *(self.names or ())]
        raise ArgumentError(f"mesh dim: {shown(given)}; allowed: {', '.join(map(str, allowed))}")

    def _dims(self, given: Sequence[int | str] | int | str) -> list[int]:
        try:
            dims = [given] if isinstance(given, int | str) else list(given)
        except TypeError:
            raise ArgumentError(f"mesh dims: {shown(given)}; allowed: names or indices of mesh dims") from None
        indices = [self.dim(d) for d in dims]
        if len(set(indices)) != len(indices):
            raise ArgumentError(f"mesh dims: {shown(given)} repeats a dim; allowed: each dim once")
        return indices

    def __getitem__(self, dims: str | tuple[str, ...]) -> Mesh:
        """The submesh along `dims`, in the order given, that contains the first rank; see `submesh` for other ranks."""
        return self.submesh(0, dims)

    def submesh(self, position: int, dims: Sequence[int | str] | int | str) -> Mesh:
        """The submesh along `dims`, in the order given, that contains the rank at `position`."""
        indices = self._dims(dims)
        offset = self.offset
        for d, c in enumerate(self.coordinate(position)):
            if d not in indices:
                for n, stride in reversed(self.dims[d]):
                    c, digit = divmod(c, n)
                    offset += digit * stride
        return self._derived([self.dims[d] for d in indices], self._names(indices), offset)

    def submeshes(self, dims: Sequence[int | str] | int | str) -> list[Mesh]:
        """All submeshes along `dims`, in row-major order of the other coordinates. Each rank is in exactly one."""
        indices = self._dims(dims)
        starts = np.arange(self.size).reshape(self.shape)
        for d in indices:
            starts = starts.take([0], axis=d)
        return [self.submesh(position, dims) for position in starts.reshape(-1).tolist()]

    def transpose(self, dims: Sequence[int | str]) -> Mesh:
        """The mesh with its dims in another order."""
        indices = self._dims(dims)
        if len(indices) != self.ndim:
            raise ArgumentError(f"mesh dims: {shown(dims)}; allowed: all {self.ndim} dims, each once")
        return self._derived([self.dims[d] for d in indices], self._names(indices))

    def flatten(self, dims: Sequence[int | str], name: str | None = None) -> Mesh:
        """The mesh with several dims, adjacent or not, flattened into one at the place of the leftmost.

        Args:
            dims: the dims to flatten, the slowest-varying first.
            name: the name of the new dim; needed if the mesh has names.
        """
        indices = self._dims(dims)
        if not indices:
            raise ArgumentError(f"mesh dims: {shown(dims)}; allowed: one or more")
        new: list[Sequence[Pair]] = []
        names: list[str | None] = []
        for d in range(self.ndim):
            if d == min(indices):
                new.append([pair for f in indices for pair in self.dims[f]])
                names.append(name)
            elif d not in indices:
                new.append(self.dims[d])
                names.append(self.names[d] if self.names else None)
        return self._derived(new, names if self.names or name is not None else None)  # type: ignore[arg-type]

    def unflatten(self, dim: int | str, sizes: Sequence[int], names: Sequence[str] | None = None) -> Mesh:
        """The mesh with one dim replaced by several of the given sizes, in row-major order.

        Args:
            names: the names of the new dims; needed if the mesh has names.

        Raises:
            ArgumentError: the product of `sizes` is not the size of the dim, or they cut across the dims that it was
                flattened from.
        """
        d, wanted = self.dim(dim), whole_numbers("sizes", sizes)
        pairs = list(self.dims[d])
        if not wanted or any(n < 1 for n in wanted) or math.prod(wanted) != self.shape[d]:
            raise ArgumentError(
                f"sizes: {shown(wanted)}; allowed: sizes whose product is that of the mesh dim, {self.shape[d]}"
            )
        new: list[list[Pair]] = []
        for size in reversed(wanted):
            taken: list[Pair] = []
            left = size
            while left > 1:
                n, stride = pairs.pop()
                part = math.gcd(n, left)
                if part == 1 or (n != part and left != part):
                    raise ArgumentError(
                        f"sizes: {wanted} cut across the dims that mesh dim {d} was flattened from, of sizes "
                        f"{tuple(n for n, _ in self.dims[d])}; allowed: divisors or products of these"
                    )
                taken.insert(0, (part, stride))
                if n != part:
                    pairs.append((n // part, stride * part))
                left //= part
            new.insert(0, taken)
        mine = self.names[d : d + 1] if self.names else None
        given = names if names is not None else (mine if len(wanted) == 1 else None)
        if self.names and given is None:
            raise ArgumentError(f"mesh: names None; allowed: {len(wanted)} names for what mesh dim {d} becomes")
        around = None
        if given is not None:
            before = self.names or tuple(f"dim{i}" for i in range(self.ndim))
            around = (*before[:d], *given, *before[d + 1 :])
        return self._derived([*self.dims[:d], *new, *self.dims[d + 1 :]], around)

    def complement(self, world_size: int) -> Mesh:
        """The one-dim mesh of the offsets at which copies of this mesh tile `range(world_size)`.

        Raises:
            ArgumentError: copies of this mesh cannot tile `range(world_size)`: its ranks are irregular, or their gaps
                differ in size.
        """
        pairs = sorted((pair for dim in self.dims for pair in dim), key=lambda pair: pair[1])
        gaps: list[Pair] = []
        covered = 1
        for n, stride in pairs:
            if self.table is not None or self.offset or stride % covered or stride < covered:
                raise ArgumentError(
                    f"world_size: {shown(world_size)}; copies of mesh {self} cannot tile any world size"
                )
            gaps.insert(0, (stride // covered, covered))
            covered = n * stride
        (world_size,) = whole_numbers("world_size", [world_size])
        if world_size < 1 or world_size % covered or world_size > MOST_RANKS:
            raise ArgumentError(
                f"world_size: {shown(world_size)}; allowed: a multiple of {covered}, up to {MOST_RANKS}"
            )
        gaps.insert(0, (world_size // covered, covered))
        return self._derived([gaps], None)

    def same_ranks(self, other: Mesh) -> bool:
        """Whether both meshes have the same shape and the same rank at each coordinate; names may differ."""
        return self is other or self.shape == other.shape and bool((self.rank_array == other.rank_array).all())

    def overlaps(self, other: Mesh) -> bool:
        """Whether any rank is in both meshes."""
        return bool(np.isin(self.rank_array, other.rank_array).any())

    def _names(self, dims: Sequence[int]) -> tuple[str, ...] | None:
        return None if self.names is None else tuple(self.names[d] for d in dims)

    @property
    def ndim(self) -> int:
        """The number of mesh dims."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    def coordinate(self, position: int) -> Coordinate:
        """The coordinate of a row-major position.

        Raises:
            ArgumentError: `position` is outside the mesh.
        """
        if type(position) is not int:
            (position,) = whole_numbers("rank: position", [position])
        if not 0 <= position < self.size:
            raise ArgumentError(
                f"rank: position {shown(position)} is outside the mesh {self.shape}; allowed: 0..{self.size - 1}"
            )
        out = []
        for n in reversed(self.shape):
            position, c = divmod(position, n)
            out.append(c)
        return tuple(reversed(out))

    def position(self, coordinate: Sequence[int]) -> int:
        """The row-major position of a coordinate.

        Raises:
            ArgumentError: `coordinate` is outside the mesh.
        """
        numbers = whole_numbers("coordinate", coordinate)
        if len(numbers) != self.ndim or any(not 0 <= c < n for c, n in zip(numbers, self.shape, strict=True)):
            raise ArgumentError(f"coordinate: {shown(numbers)}; allowed: {self.ndim} numbers, each below {self.shape}")
        position = 0
        for n, c in zip(self.shape, coordinate, strict=True):
            position = position * n + c
        return position

    def rank_at(self, position: int) -> int:
        """The rank at a row-major position.

        Raises:
            ArgumentError: `position` is outside the mesh.
        """
        if type(position) is not int:
            (position,) = whole_numbers("position", [position])
        if not 0 <= position < self.size:
            raise ArgumentError(f"position: {shown(position)}; allowed: 0..{self.size - 1}")
        if self.ranks is None:
            return position
        index = self.offset
        for pairs in reversed(self.dims):
            for n, stride in reversed(pairs):
                position, digit = divmod(position, n)
                index += digit * stride
        return index if self.table is None else self.table[index]

    @cached_property
    def coordinates(self) -> np.ndarray:
        """[mesh dims, size] the coordinate of each position."""
        return np.stack(np.unravel_index(np.arange(self.size), self.shape))

    @cached_property
    def strides(self) -> np.ndarray:
        """[mesh dims] the difference in position of one step along each dim."""
        return np.array([math.prod(self.shape[d + 1 :]) for d in range(self.ndim)], dtype=np.int64)

    @cached_property
    def _positions(self) -> np.ndarray:
        """[largest rank + 1] the position of each rank; -1 if it is not in the mesh."""
        positions = np.full(self.rank_array.max() + 1, -1)
        positions[self.rank_array] = np.arange(self.size)
        return positions

    def positions_of(self, ranks: np.ndarray) -> np.ndarray:
        """The position of each of `ranks`; -1 if it is not in the mesh."""
        if self.ranks is None:
            return np.where(ranks < self.size, ranks, -1)
        return np.where(ranks < len(self._positions), self._positions[np.minimum(ranks, len(self._positions) - 1)], -1)

    def coordinate_of(self, position: int, mesh: Mesh) -> Coordinate | None:
        """The coordinate in this mesh of the rank at `position` of another; None if the rank is not in this mesh."""
        if mesh is self:
            return self.coordinate(position)
        (own,) = self.positions_of(np.array([mesh.rank_at(position)])).tolist()
        return None if own < 0 else self.coordinate(own)

    def subgroup(self, position: int, dims: Sequence[int]) -> tuple[int, ...]:
        """The positions along `dims` through `position`, in row-major order.

        Raises:
            ArgumentError: `position` is outside the mesh.
        """
        if not 0 <= position < self.size:
            self.coordinate(position)  # raises
        along = [(self.shape[d], math.prod(self.shape[d + 1 :])) for d in sorted(dims)]
        positions = [position - sum(position // stride % n * stride for n, stride in along)]
        for n, stride in along:
            positions = [p + i * stride for p in positions for i in range(n)]
        return tuple(positions)

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) + (f" ({', '.join(self.names)})" if self.names else "")


@lru_cache(maxsize=256)
def union_mesh(source_mesh: Mesh, target_mesh: Mesh) -> Mesh:
    """The ranks of both meshes: the source mesh if both are the same, otherwise one mesh dim of the ranks of the source
    mesh in their order, then those that are in the target mesh only."""
    if source_mesh.same_ranks(target_mesh):
        return source_mesh
    source_ranks = source_mesh.rank_array
    target_only = target_mesh.rank_array[source_mesh.positions_of(target_mesh.rank_array) < 0]
    size = len(source_ranks) + len(target_only)
    if not len(target_only) and source_mesh.table is None:
        flat = source_mesh._derived([[pair for pairs in source_mesh.dims for pair in pairs]], ("ranks",))
        if len(flat.dims[0]) == 1:
            return flat
    return Mesh((size,), ("ranks",), np.concatenate([source_ranks, target_only]).tolist())


@lru_cache(maxsize=1024)
def position_of(rank: int, source_mesh: Mesh, target_mesh: Mesh) -> int:
    """The position of a rank in the union of two meshes; -1 if it is in neither."""
    return int(union_mesh(source_mesh, target_mesh).positions_of(np.array([rank]))[0])


def _coalesced(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Row-major (size, stride) pairs without those of size 1, and with contiguous neighbours merged."""
    merged: list[Pair] = []
    for n, stride in pairs:
        if merged and n > 1 and merged[-1][1] == n * stride:
            merged[-1] = merged[-1][0] * n, stride
        elif n > 1:
            merged.append((n, stride))
    return tuple(merged)


def _sums(offset: int, pairs: Sequence[Pair]) -> np.ndarray:
    """`offset` plus strides times digits, for all digits in row-major order."""
    if not pairs:
        return np.array([offset])
    (n, stride), *others = pairs
    # One array where the ranks are evenly spaced, as those of most meshes are.
    index = np.arange(offset, offset + n * stride, stride) if stride else np.full(n, offset)
    for n, stride in others:
        index = (index[:, None] + np.arange(n) * stride).reshape(-1)
    return index
