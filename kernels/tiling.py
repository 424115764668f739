"""Cut boxes into tiles, one per program, each described by a row of int64.

A row (`DESCRIPTOR` for one contributor, 64 bytes) holds, for K contributors: K source ids, the target id, K source
offsets, the target offset, K source row strides, the target row stride, rows left, columns left; all but the ids count
words. A row of a packed launch holds: source id, target id, the box's source offset, the tile's target offset, words
left, and for each axis, innermost first, its extent, the coordinate at which the tile begins, and the source stride.
Everything is NumPy over all boxes or all tiles at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..errors import ArgumentError
from .boxes import StridedBoxes, classify, coalesce, take

DESCRIPTOR = (
    "source",
    "target",
    "source_offset",
    "target_offset",
    "source_row_stride",
    "target_row_stride",
    "rows",
    "columns",
)
VECTOR = 16  # bytes of the widest access
# From this size on, boxes of 16-byte alignment get their own launch, so that an unaligned box does not narrow their
# accesses; for less, another launch costs more than narrow accesses.
WIDE_BYTES = 1 << 20
PROCESSORS = 132  # assumed number of SMs where there is no GPU
LEAST_RUN = 512  # minimum bytes of a row in a tile, if the row is that long
_PACKED_AXES = 6  # each of them costs a division for each word
_PACKED_EXTENT = 1 << 30  # coordinates are int32


@dataclass(frozen=True)
class LaunchConfig:
    """How boxes are cut into tiles. `for_copy` and `for_reduction` return the defaults."""

    tile_bytes: int = 16384  # per program with 16-byte accesses
    accesses_per_thread: int = 16  # maximum of loads and of stores: more would spill registers
    num_warps: int = 4

    def __post_init__(self) -> None:
        for name in ("tile_bytes", "accesses_per_thread", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ArgumentError(f"LaunchConfig: {name} is {value}; allowed: a power of two")

    @classmethod
    def for_copy(cls, nbytes: int, processors: int = PROCESSORS) -> LaunchConfig:
        """Tiles of 16 KiB, smaller if `nbytes` would give fewer than about 2 programs per SM."""
        return cls(tile_bytes=_clamped_tile(nbytes, 16384, processors))

    @classmethod
    def for_window(cls, nbytes: int, programs: int) -> LaunchConfig:
        """Tiles of 32 KiB for a launch of at most `programs`, about one per SM; smaller if there would be fewer."""
        tile = _clamped_tile(nbytes, 32768, max(programs // 2, 1))
        return cls(tile_bytes=tile, num_warps=8 if tile > 16384 else 4)

    @classmethod
    def for_reduction(cls, nbytes: int, contributors: int, itemsize: int, processors: int = PROCESSORS) -> LaunchConfig:
        """As for a copy of `nbytes`, but a tile's accumulator and the loads of all contributors fit in registers."""
        most = 16384 // max(_power_of_two(contributors) // 2, 1) // (2 if itemsize == 1 else 1)
        return cls(tile_bytes=_clamped_tile(nbytes, most, processors), accesses_per_thread=8)


def _clamped_tile(nbytes: int, most: int, processors: int) -> int:
    programs = 1 << (2 * processors).bit_length() - 1
    # Below 4 KiB there is less than one vector per thread of 128 (256 on AMD).
    return max(min(1 << max(nbytes // programs, 1).bit_length() - 1, most), 4096)


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch: descriptors and compile-time constants."""

    kind: str  # "straight", "strided" (one column per row), "transposed" or "packed" (`pack_boxes`)
    descriptors: np.ndarray  # int64 [tiles, 3 * contributors + 5]; [tiles, 5 + 3 * axes] if packed
    source_word: int  # bytes
    target_word: int  # bytes
    source_vector: int  # words; source offsets and row strides are multiples of it, and so are the columns
    target_vector: int  # words; likewise, but for the rows in place of the columns where transposed
    rows: int  # of a tile, a power of two
    columns: int  # of a tile, a power of two
    num_warps: int
    has_fill: bool
    axes: int = 0  # that a packed launch divides by; 0 for other kinds


def tile_launches(
    boxes: StridedBoxes,
    source_size: int,
    target_size: int,
    source_align: int,
    target_align: int,
    config: LaunchConfig,
    widen: bool = False,
    pieces: bool = False,
) -> list[Launch]:
    """Return the launches for `boxes`: one per kind of box, usually one in all.

    Args:
        source_size, target_size: bytes per element.
        source_align, target_align: alignment of all base addresses in bytes, 1 to 16.
        widen: use words as wide as offsets, strides and extents allow, up to 8 bytes; needs equal sizes.
        pieces: boxes without a fill, contiguous in targets aligned to 16 bytes, begin at multiples of 16 bytes and are
            followed by unused bytes up to the next one: those not aligned to 16 bytes in all they access are packed.
    """
    coalesced = coalesce(boxes)
    kind, boxes = classify(coalesced)
    # The lowest bit of all terms of an address, except the step within a vector, is its alignment.
    source_bits = _bits(boxes.source_offset) | _bits(boxes.source_stride[:, :, 1:])
    target_bits = boxes.target_offset | _bits(boxes.target_stride[:, 2:])
    target_bits |= np.where(kind == 2, boxes.target_stride[:, 0], boxes.target_stride[:, 1])
    source_bits, target_bits = source_bits * source_size | source_align, target_bits * target_size | target_align
    columns = boxes.extent[:, 0]
    launches = []
    if pieces:
        inner = np.where(kind == 2, boxes.extent[:, 1] * target_size, columns * source_size | source_bits)
        packs = (kind == 1) | ((target_bits | inner) % VECTOR != 0)
        if packs.any() and boxes.extent[~packs].prod(axis=1).sum() * target_size < WIDE_BYTES:
            packs[:] = True
        packed = packed_launch(take(coalesced, np.flatnonzero(packs)), target_size, source_align, config)
        if packed is not None:
            launches.append(packed)
            kind = np.where(packs, -1, kind)
    straight = np.flatnonzero(kind == 0)
    bits = (source_bits | columns * source_size | target_bits | columns * target_size)[straight]
    wide, narrow = straight[bits % VECTOR == 0], straight[bits % VECTOR != 0]
    if len(wide) and len(narrow) and boxes.extent[wide].prod(axis=1).sum() * target_size < WIDE_BYTES:
        wide, narrow = wide[:0], straight
    groups = {
        "wide": wide,
        "straight": narrow,
        "strided": np.flatnonzero(kind == 1),
        "transposed": np.flatnonzero(kind == 2),
    }
    for name, index in groups.items():
        if len(index) == 0:
            continue
        part, transposed = take(boxes, index), name == "transposed"
        source, target = _alignment(source_bits[index]), _alignment(target_bits[index])
        column, row = _alignment(part.extent[:, 0]), _alignment(part.extent[:, 1])
        factor = 1
        if widen and not transposed:
            factor = max(min(8, source, target, column * source_size) // source_size, 1)
            part, column = _widened(part, factor), column // factor
        words = source_size * factor, target_size * factor
        vectors = (
            max(min(source // words[0], column), 1),
            max(min(target // words[1], row if transposed else column), 1),
        )
        shaped = config
        if min(vectors) == 1 and config.accesses_per_thread > 8:
            # One address per word fills the registers: fewer accesses per thread, more threads.
            shaped = replace(
                config, accesses_per_thread=8, num_warps=config.num_warps * config.accesses_per_thread // 8
            )
        rows, cols = _tile_shape(part, name, max(words), vectors, shaped)
        launches.append(
            Launch(
                kind="straight" if name == "wide" else name,
                descriptors=_descriptors(part, transposed, rows, cols),
                source_word=words[0],
                target_word=words[1],
                source_vector=vectors[0],
                target_vector=vectors[1],
                rows=rows,
                columns=cols,
                num_warps=shaped.num_warps,
                has_fill=part.has_fill,
            )
        )
    return launches


def packed_launch(boxes: StridedBoxes, size: int, source_align: int, config: LaunchConfig) -> Launch | None:
    """The launch by `pack_boxes` for coalesced boxes that are contiguous in targets aligned to 16 bytes; None if there
    are none, or if they have too many axes or too long ones.

    Args:
        size: bytes of an element, at most 8.
        source_align: of all sources, in bytes.
    """
    long = boxes.extent > 1
    used = max(int((long * np.arange(1, boxes.axes + 1)).max(initial=1)), 1)
    if not len(boxes) or used > _PACKED_AXES or int(boxes.extent.max()) > _PACKED_EXTENT:
        return None
    factor = 1
    if bool(((boxes.source_stride[:, 0, 0] == 1) | ~long.any(axis=1)).all()):
        bits = _bits(boxes.source_offset) | _bits(boxes.source_stride[:, :, 1:]) | boxes.extent[:, 0]
        factor = max(min(8, _alignment(bits * size | source_align)) // size, 1)
        boxes = _widened(boxes, factor)
    word = size * factor
    # The address and the coordinates of each word fill the registers.
    words = min(config.tile_bytes // word, (16 if used < 3 else 8) * 32 * config.num_warps)
    count, extent = boxes.extent.prod(axis=1), boxes.extent
    tiles = -(-count // words)
    box = np.repeat(np.arange(len(boxes)), tiles)  # [tiles]
    first = (np.arange(len(box)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * words
    columns = [boxes.source[box, 0], boxes.target[box], boxes.source_offset[box, 0], boxes.target_offset[box] + first]
    columns.append(np.minimum(count[box] - first, words))
    for axis in range(used):
        first, start = np.divmod(first, extent[box, axis])
        columns += [extent[box, axis], start, boxes.source_stride[box, 0, axis]]
    return Launch(
        kind="packed",
        descriptors=np.stack(columns, axis=1),
        source_word=word,
        target_word=word,
        source_vector=1,
        target_vector=VECTOR // word,
        rows=1,
        columns=words,
        num_warps=config.num_warps,
        has_fill=False,
        axes=used,
    )


def _alignment(numbers: np.ndarray) -> int:
    """The largest power of two, at most 16, that divides all numbers."""
    bits = int(np.bitwise_or.reduce(numbers)) | VECTOR
    return bits & -bits


def _power_of_two(x: int) -> int:
    """The least power of two that is not below x."""
    return 1 << max(x - 1, 0).bit_length()


def _bits(numbers: np.ndarray) -> np.ndarray:
    """The bitwise or of each box's numbers, [n, ...] to [n]."""
    return np.bitwise_or.reduce(numbers, axis=tuple(range(1, numbers.ndim)))


def _widened(boxes: StridedBoxes, factor: int) -> StridedBoxes:
    """The boxes over words of `factor` elements; the columns are axis 0."""
    if factor == 1:
        return boxes
    extent, source_stride, target_stride = (
        boxes.extent.copy(),
        boxes.source_stride // factor,
        boxes.target_stride // factor,
    )
    extent[:, 0] //= factor
    source_stride[:, :, 0], target_stride[:, 0] = 1, 1
    return replace(
        boxes,
        source_offset=boxes.source_offset // factor,
        target_offset=boxes.target_offset // factor,
        extent=extent,
        source_stride=source_stride,
        target_stride=target_stride,
    )


def _tile_shape(
    boxes: StridedBoxes, kind: str, word: int, vectors: tuple[int, int], config: LaunchConfig
) -> tuple[int, int]:
    """Rows and columns of a tile in words, powers of two."""
    if kind == "transposed":
        side = 64 if word <= 2 and min(vectors) > 1 else 32
        return side, side
    least_columns = max(vectors)
    words = min(config.tile_bytes // word, config.accesses_per_thread * min(vectors) * 32 * config.num_warps)
    words = max(words, least_columns)
    rows, columns = boxes.extent[:, 1], boxes.extent[:, 0]
    most_rows = _power_of_two(int(rows.max()))
    if kind == "strided":
        return min(words, most_rows), 1
    # Of all shapes of this many words, the one with the fewest tiles, then the widest; but none narrower than
    # LEAST_RUN, since rows slightly longer than a tile would otherwise be cut into columns.
    planes = boxes.extent[:, 2:].prod(axis=1)
    widest = max(_power_of_two(int(columns.max())), least_columns)
    cols, least_columns = min(words, widest), max(least_columns, min(widest, words, LEAST_RUN // word))
    shapes = []
    while cols >= least_columns:
        tiles = int((planes * -(-rows // (words // cols)) * -(-columns // cols)).sum())
        shapes.append((tiles, -cols))
        cols //= 2
    cols = -min(shapes)[1]
    return min(words // cols, most_rows), cols


def _descriptors(boxes: StridedBoxes, transposed: bool, tile_rows: int, tile_columns: int) -> np.ndarray:
    """int64 [tiles, 3 * contributors + 5]: rows as in the module's docstring."""
    k = boxes.contributors
    across, down = -(-boxes.extent[:, 0] // tile_columns), -(-boxes.extent[:, 1] // tile_rows)
    count = across * down * boxes.extent[:, 2:].prod(axis=1)
    box = np.repeat(np.arange(len(boxes)), count)  # [tiles]
    rest = np.arange(len(box)) - np.repeat(np.cumsum(count) - count, count)
    rest, column = np.divmod(rest, across[box])
    rest, row = np.divmod(rest, down[box])
    column *= tile_columns
    row *= tile_rows
    source_offset = boxes.source_offset[box] + boxes.source_stride[box, :, 1] * row[:, None] + column[:, None]
    target_offset = boxes.target_offset[box] + boxes.target_stride[box, 1] * row + column * boxes.target_stride[box, 0]
    for axis in range(2, boxes.axes):
        rest, at = np.divmod(rest, boxes.extent[box, axis])
        source_offset += boxes.source_stride[box, :, axis] * at[:, None]
        target_offset += boxes.target_stride[box, axis] * at
    table = np.empty((len(box), 3 * k + 5), np.int64)
    table[:, :k] = boxes.source[box]
    table[:, k] = boxes.target[box]
    table[:, k + 1 : 2 * k + 1] = source_offset
    table[:, 2 * k + 1] = target_offset
    table[:, 2 * k + 2 : 3 * k + 2] = boxes.source_stride[box, :, 1]
    # The rows of a transposed tile are adjacent in the target, so it needs the columns' stride there.
    table[:, 3 * k + 2] = boxes.target_stride[box, 0 if transposed else 1]
    table[:, 3 * k + 3] = np.minimum(boxes.extent[box, 1] - row, tile_rows)
    table[:, 3 * k + 4] = np.minimum(boxes.extent[box, 0] - column, tile_columns)
    return table
