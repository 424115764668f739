"""A mesh of ranks: sizes, names, and which rank stands where."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from ..errors import ArgumentError, shown

Coordinate = tuple[int, ...]
Pair = tuple[int, int]  # size, stride

MOST_RANKS = 1 << 24  # a list of all of them must be possible
_UNREADABLE = 10**60
MOST_DIMS = 24  # with 32 of a tensor, as many as an array of numpy may have


def whole_numbers(argument: str, values: Iterable[int]) -> tuple[int, ...]:
    """`values` as plain integers.

    Raises:
        ArgumentError: no sequence of whole numbers, which True and False are not; one of more than 60 digits, which no
            message could show.
    """
    try:
        given = tuple(values)
        found = tuple(map(operator.index, given))
        # Bytes are numbers to Python, and sets have no order.
        if not isinstance(values, bytes | bytearray | Set | Mapping) and bool not in map(type, given):
            if max(map(abs, found), default=0) < _UNREADABLE:
                return found
    except TypeError:
        pass
    raise ArgumentError(f"{argument}: {shown(values)}; allowed: whole numbers, such as (2, 2)")


@dataclass(frozen=True, init=False)
class Mesh:
    """PricedRanks in row-major order over `shape`.

    Each mesh dim is a row-major list of (size, stride) pairs, as in the layout algebra of CuTe: which rank stands at a
    coordinate is `offset` plus strides times digits, an index into `table` if there is one. So slicing, flattening in
    any order, unflattening and transposing make new pairs and no list of ranks. The planner works in positions; only
    the runtime turns them into ranks. Meshes are equal if they are described alike.

    Args:
        shape: the size of each mesh dim, or of the only one.
        names: one per mesh dim, all different; needed for `mesh["tp"]`, which is the mesh along these dims.
        ranks: the rank at each row-major position; None means `arange`.

    Raises:
        ArgumentError: a size below 1, over 24 dims or 2**24 ranks, names or ranks that do not fit the shape, a rank
            given twice, or from 2**24 on.
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
            raise ArgumentError(
                f"mesh: shape {shown(sizes)} must have at least one dim, and every size must be at least 1"
            )
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
        if len(shape) > MOST_DIMS:
            raise ArgumentError(f"mesh: shape {shown(shape)} has {len(shape)} dims; allowed: up to {MOST_DIMS}")
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
        # Meshes are keys of many tables. Of numbers alone: another process would hash names otherwise.
        object.__setattr__(self, "_hash", hash((dims, offset, table or ())))
        return self

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or self._described == other._described

    @property
    def _described(self) -> tuple[Any, ...]:
        return self.shape, self.names, self.dims, self.offset, self.table

    def _derived(self, dims: Iterable[Sequence[Pair]], names: Sequence[str] | None, offset: int | None = None) -> Mesh:
        return Mesh.__new__(Mesh)._set(dims, names, self.offset if offset is None else offset, self.table)

    @cached_property
    def ranks(self) -> tuple[int, ...] | None:
        """The rank at each row-major position; None where that is `arange`."""
        whole = _coalesced([pair for pairs in self.dims for pair in pairs])
        if self.table is None and self.offset == 0 and whole == _coalesced([(self.size, 1)]):
            return None
        return tuple(self.rank_array.tolist())

    @cached_property
    def rank_array(self) -> np.ndarray:
        """[size] the rank at each row-major position."""
        index = _sums(self.offset, [pair for pairs in self.dims for pair in pairs])
        return index if self.table is None else np.array(self.table)[index]

    def dim(self, given: int | str) -> int:
        """The index of a mesh dim given by name or index.

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
            raise ArgumentError(f"mesh dims: {shown(given)}; allowed: names or numbers of mesh dims") from None
        found = [self.dim(d) for d in dims]
        if len(set(found)) != len(found):
            raise ArgumentError(f"mesh dims: {shown(given)} names one twice; allowed: each once")
        return found

    def __getitem__(self, dims: str | tuple[str, ...]) -> Mesh:
        """The mesh along some dims, in the order given, through the first rank; `submesh` goes through any."""
        return self.submesh(0, dims)

    def submesh(self, position: int, dims: Sequence[int | str] | int | str) -> Mesh:
        """The mesh along `dims`, in the order given, through the rank at a position."""
        found = self._dims(dims)
        offset = self.offset
        for d, c in enumerate(self.coordinate(position)):
            if d not in found:
                for n, stride in reversed(self.dims[d]):
                    c, digit = divmod(c, n)
                    offset += digit * stride
        return self._derived([self.dims[d] for d in found], self._names(found), offset)

    def submeshes(self, dims: Sequence[int | str] | int | str) -> list[Mesh]:
        """All meshes along `dims`, in row-major order of the other coordinates: every rank is in exactly one."""
        found = self._dims(dims)
        starts = np.arange(self.size).reshape(self.shape)
        for d in found:
            starts = starts.take([0], axis=d)
        return [self.submesh(position, dims) for position in starts.reshape(-1).tolist()]

    def transpose(self, dims: Sequence[int | str]) -> Mesh:
        """The same ranks with the mesh dims in another order."""
        found = self._dims(dims)
        if len(found) != self.ndim:
            raise ArgumentError(f"mesh dims: {shown(dims)}; allowed: all {self.ndim}, each once")
        return self._derived([self.dims[d] for d in found], self._names(found))

    def flatten(self, dims: Sequence[int | str], name: str | None = None) -> Mesh:
        """One mesh dim in place of several, neighbours or not, the first given slowest, where the leftmost stood.

        `name` is needed where the mesh has names.
        """
        found = self._dims(dims)
        if not found:
            raise ArgumentError("mesh dims: none given; allowed: one or more")
        new: list[Sequence[Pair]] = []
        names: list[str | None] = []
        for d in range(self.ndim):
            if d == min(found):
                new.append([pair for f in found for pair in self.dims[f]])
                names.append(name)
            elif d not in found:
                new.append(self.dims[d])
                names.append(self.names[d] if self.names else None)
        return self._derived(new, names if self.names or name is not None else None)  # type: ignore[arg-type]

    def unflatten(self, dim: int | str, sizes: Sequence[int], names: Sequence[str] | None = None) -> Mesh:
        """Several mesh dims of `sizes`, row-major, in place of one; `names` are needed where the mesh has names.

        Raises:
            ArgumentError: sizes that do not make up the dim, or that cut across one that was flattened of others.
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
                        f"sizes: {wanted} cut across the dims that mesh dim {d} was flattened of, of sizes "
                        f"{tuple(n for n, _ in self.dims[d])}; allowed: sizes that divide these or are made of them"
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
        """The mesh, of one dim, of the ranks that this one may begin at so that its copies tile `range(world_size)`.

        Raises:
            ArgumentError: no copies of it tile the world: it has a table, strides that leave gaps of another size, or
                steps that overlap.
        """
        pairs = sorted((pair for dim in self.dims for pair in dim), key=lambda pair: pair[1])
        gaps: list[Pair] = []
        covered = 1
        for n, stride in pairs:
            if self.table is not None or self.offset or stride % covered or stride < covered:
                raise ArgumentError(f"world_size: copies of mesh {self} tile no world")
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
        """Whether the same rank stands at each coordinate: meshes that differ at most in names."""
        return self is other or self.shape == other.shape and bool((self.rank_array == other.rank_array).all())

    def overlaps(self, other: Mesh) -> bool:
        """Whether a rank is in both meshes."""
        return bool(np.isin(self.rank_array, other.rank_array).any())

    def _names(self, dims: Sequence[int]) -> tuple[str, ...] | None:
        return None if self.names is None else tuple(self.names[d] for d in dims)

    @property
    def ndim(self) -> int:
        """Mesh dims."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """PricedRanks."""
        return math.prod(self.shape)

    def coordinate(self, position: int) -> Coordinate:
        """The coordinate of a row-major position.

        Raises:
            ArgumentError: there is no such position.
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
            ArgumentError: there is no such coordinate.
        """
        given = whole_numbers("coordinate", coordinate)
        if len(given) != self.ndim or any(not 0 <= c < n for c, n in zip(given, self.shape, strict=True)):
            raise ArgumentError(f"coordinate: {shown(given)}; allowed: {self.ndim} numbers, each below {self.shape}")
        position = 0
        for n, c in zip(self.shape, coordinate, strict=True):
            position = position * n + c
        return position

    def rank_at(self, position: int) -> int:
        """The rank at a row-major position.

        Raises:
            ArgumentError: there is no such position.
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
        """[mesh dims] what a step along each adds to a position."""
        return np.array([math.prod(self.shape[d + 1 :]) for d in range(self.ndim)], dtype=np.int64)

    @cached_property
    def _positions(self) -> np.ndarray:
        """[ranks] the position of each rank up to the last, -1 for those that are not in the mesh."""
        positions = np.full(self.rank_array.max() + 1, -1)
        positions[self.rank_array] = np.arange(self.size)
        return positions

    def positions_of(self, ranks: np.ndarray) -> np.ndarray:
        """The position of each of some ranks, -1 for those that are not in the mesh."""
        if self.ranks is None:
            return np.where(ranks < self.size, ranks, -1)
        return np.where(ranks < len(self._positions), self._positions[np.minimum(ranks, len(self._positions) - 1)], -1)

    @cached_property
    def _by_rank(self) -> tuple[np.ndarray, np.ndarray]:
        """[size] the ranks, ascending, and the position of each."""
        positions = np.argsort(self.rank_array)
        return self.rank_array[positions], positions

    def on_node_of(self, ranks: np.ndarray, node_size: int) -> np.ndarray:
        """The positions on the same nodes of `node_size` consecutive ranks, in the order of ranks, then -1 for none:
        [n, most of a node, at least 1]."""
        numbers, positions = self._by_rank
        first = ranks // node_size * node_size
        low, high = np.searchsorted(numbers, first), np.searchsorted(numbers, first + node_size)
        at = low[:, None] + np.arange(max(1, (high - low).max(initial=0)))
        return np.where(at < high[:, None], positions[np.minimum(at, len(positions) - 1)], -1)

    def subgroup(self, position: int, dims: Sequence[int]) -> tuple[int, ...]:
        """The positions reached from `position` by moving along `dims`, row-major.

        Raises:
            ArgumentError: there is no such position.
        """
        if not 0 <= position < self.size:
            self.coordinate(position)  # says so
        along = [(self.shape[d], math.prod(self.shape[d + 1 :])) for d in sorted(dims)]
        positions = [position - sum(position // stride % n * stride for n, stride in along)]
        for n, stride in along:
            positions = [p + i * stride for p in positions for i in range(n)]
        return tuple(positions)

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) + (f" ({', '.join(self.names)})" if self.names else "")


def _coalesced(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Row-major pairs with those of size 1 left out, and those that run on into each other made one."""
    found: list[Pair] = []
    for n, stride in pairs:
        if found and n > 1 and found[-1][1] == n * stride:
            found[-1] = found[-1][0] * n, stride
        elif n > 1:
            found.append((n, stride))
    return tuple(found)


def _sums(offset: int, pairs: Sequence[Pair]) -> np.ndarray:
    """`offset` plus strides times digits, for all digits, row-major."""
    index = np.array([offset])
    for n, stride in pairs:
        index = (index[:, None] + np.arange(n) * stride).reshape(-1)
    return index
