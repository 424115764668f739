"""reduce_boxes: reduce many strided N-D boxes over their contributors in one launch.

Contributors are reduced in ascending order. 8- and 16-bit floats accumulate in float32, other dtypes in themselves
(integers wrap; for bool, sum and max are or, min and prod are and). The result is divided, then rounded once to the
target's dtype: a reduction over one contributor is a copy with a cast.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .addresses import MOST_BUFFERS, SOURCE_ARGUMENTS, TARGET_ARGUMENTS, BaseAddresses, source_address, target_address
from .boxes import StridedBoxes, source_views, split_elements, target_views
from .current_device import on_device
from .dtypes import ELEMENTS, WORDS, decode, encode, pattern, pattern_word, real_dtype
from .launch import PreparedLaunch, interpreted, processors_of, runs_on, tile_constants
from .reduce_cpu import check_reduction, reduce_views
from .tiling import PROCESSORS, Launch, LaunchConfig, tile_launches

# Up to this many contributors are unrolled, with all loads in flight; a loop bounds registers and code beyond.
UNROLLED = tl.constexpr(16)


@triton.jit
def combine(a, b, OP: tl.constexpr):
    if OP == "sum":
        return tl.add(a, b, sanitize_overflow=False)
    elif OP == "prod":
        return tl.mul(a, b, sanitize_overflow=False)
    elif OP == "max":
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min":
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "or":
        return a | b
    else:
        return a & b


@triton.jit
def load_contributor(
    row,
    k,
    source_table,
    source0,
    source1,
    source2,
    source3,
    r,
    c,
    mask,
    K: tl.constexpr,
    WORD: tl.constexpr,
    VS: tl.constexpr,
    ALIGN_S: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """Load contributor k's part of the tile of the descriptor at `row`, as words."""
    source_id = tl.load(row + k)
    offset = tl.multiple_of(tl.load(row + K + 1 + k), VS)
    stride = tl.multiple_of(tl.load(row + 2 * K + 2 + k), VS)
    address = source_address(source_table, source_id, source0, source1, source2, source3, SOURCES)
    source = tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGN_S) + offset
    return tl.load(source + r * stride + c, mask=mask, other=0)


@triton.jit
def reduce_tile(
    row,  # of the tile's descriptor, int64 [3 * K + 5]
    source_table,
    target_table,
    source0,
    source1,
    source2,
    source3,
    target0,
    fill,
    divisor,
    K: tl.constexpr,
    OP: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    FROM_WORD: tl.constexpr,
    TO_WORD: tl.constexpr,
    VS: tl.constexpr,
    VD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGN_S: tl.constexpr,
    ALIGN_D: tl.constexpr,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    HAS_FILL: tl.constexpr,
    DIVIDE: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Reduce a tile of up to ROWS x COLS elements."""
    target_id = tl.load(row + K)
    target_offset = tl.multiple_of(tl.load(row + 2 * K + 1), VD)
    target_stride = tl.multiple_of(tl.load(row + 3 * K + 2), VD)
    rows = tl.load(row + 3 * K + 3).to(tl.int32)
    cols = tl.load(row + 3 * K + 4).to(tl.int32)
    target_base = target_address(target_table, target_id, target0, TARGETS)
    target = tl.multiple_of(target_base.to(tl.pointer_type(TO_WORD)), ALIGN_D) + target_offset
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLS)[None, :]
    if TRANSPOSED:
        rows = tl.multiple_of(rows, VD)
        cols = tl.multiple_of(cols, VS)
        places = target + c * target_stride + r
    else:
        cols = tl.multiple_of(cols, VS if VS > VD else VD)
        places = target + r * target_stride + c
    inside = (r < rows) & (c < cols)
    reads = inside
    if HAS_FILL:
        reads = inside & (tl.broadcast_to(tl.load(row), [ROWS, COLS]) >= 0)
    words = load_contributor(
        row, 0, source_table, source0, source1, source2, source3, r, c, reads, K, FROM_WORD, VS, ALIGN_S, SOURCES
    )
    total = decode(words, FROM, SOFT)
    if K <= UNROLLED:
        for k in tl.static_range(1, K):
            words = load_contributor(
                row,
                k,
                source_table,
                source0,
                source1,
                source2,
                source3,
                r,
                c,
                reads,
                K,
                FROM_WORD,
                VS,
                ALIGN_S,
                SOURCES,
            )
            total = combine(total, decode(words, FROM, SOFT), OP)
    else:
        for k in range(1, K):
            words = load_contributor(
                row,
                k,
                source_table,
                source0,
                source1,
                source2,
                source3,
                r,
                c,
                reads,
                K,
                FROM_WORD,
                VS,
                ALIGN_S,
                SOURCES,
            )
            total = combine(total, decode(words, FROM, SOFT), OP)
    if DIVIDE:
        by = divisor.to(tl.int64).to(tl.float64, bitcast=True)
        if total.dtype == tl.float64:
            total = total / by
        else:
            total = tl.div_rn(total, by.to(tl.float32))
    words = encode(total, TO, SOFT).to(TO_WORD)
    if HAS_FILL:
        words = tl.where(tl.load(row) >= 0, words, fill.to(tl.int64).to(TO_WORD))
    tl.store(places, words, mask=inside)


@triton.jit(do_not_specialize=["source0", "source1", "source2", "source3", "target0", "fill", "divisor"])
def reduce_boxes_kernel(
    descriptors,  # int64 [programs, 3 * K + 5]
    source_table,  # int64 [sources], addresses; those that are arguments are not read
    target_table,  # int64 [targets]
    source0: tl.int64,  # address
    source1: tl.int64,
    source2: tl.int64,
    source3: tl.int64,
    target0: tl.int64,
    fill: tl.int64,  # 8 bytes of the fill value
    divisor: tl.int64,  # the bits of a float64
    K: tl.constexpr,  # contributors
    OP: tl.constexpr,
    FROM: tl.constexpr,  # dtype
    TO: tl.constexpr,
    FROM_WORD: tl.constexpr,  # integer of the same width
    TO_WORD: tl.constexpr,
    VS: tl.constexpr,
    VD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGN_S: tl.constexpr,  # bytes
    ALIGN_D: tl.constexpr,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    HAS_FILL: tl.constexpr,
    DIVIDE: tl.constexpr,
    SOFT: tl.constexpr,
):
    """Program i reduces the tile of descriptor row i."""
    reduce_tile(
        descriptors + tl.program_id(0).to(tl.int64) * (3 * K + 5),
        source_table,
        target_table,
        source0,
        source1,
        source2,
        source3,
        target0,
        fill,
        divisor,
        K,
        OP,
        FROM,
        TO,
        FROM_WORD,
        TO_WORD,
        VS,
        VD,
        ROWS,
        COLS,
        TRANSPOSED,
        ALIGN_S,
        ALIGN_D,
        SOURCES,
        TARGETS,
        HAS_FILL,
        DIVIDE,
        SOFT,
    )


class ReduceTable:
    """Prepared boxes for reduce_boxes on one device. Made by reduce_table."""

    def __init__(
        self,
        boxes: StridedBoxes,
        dtype: torch.dtype,
        op: str,
        divisor: float | None,
        out_dtype: torch.dtype,
        device: torch.device,
        config: LaunchConfig | None,
    ) -> None:
        check_reduction(dtype, out_dtype, op, divisor)
        if boxes.has_fill and boxes.fill != 0 and out_dtype.is_complex:
            raise ArgumentError(f"fill is {boxes.fill!r}; for {out_dtype} only 0 is allowed")
        self._fill = pattern(boxes.fill, out_dtype) if boxes.has_fill else b"\0" * out_dtype.itemsize
        self.boxes, self.dtype, self.out_dtype, self.device, self.config = boxes, dtype, out_dtype, device, config
        self.op, self.divisor = op, divisor
        self.sources = BaseAddresses("sources", boxes.source, dtype, dtype.itemsize, device, SOURCE_ARGUMENTS)
        self.targets = BaseAddresses("targets", boxes.target, out_dtype, out_dtype.itemsize, device, TARGET_ARGUMENTS)
        self.cpu_path = not runs_on(device)
        self.divisor_bits = struct.unpack("q", struct.pack("d", divisor or 1.0))[0]
        self.soft = interpreted(reduce_boxes_kernel) or (dtype is torch.float8_e4m3fn and not _has_float8(device))
        self.variants: dict[tuple[int, int], list[Any]] = {}
        if not self.cpu_path:
            self.variant(16, 16)

    def variant(self, source_align: int, target_align: int) -> list[Any]:
        """Return the launches for buffers of these alignments in bytes.

        Built on first use; the constructor builds the one for 16 and 16, the alignment of fresh tensors.
        """
        known = self.variants.get((source_align, target_align))
        if known is not None:
            return known
        fill = pattern_word(self._fill, min(self.out_dtype.itemsize, 8)) or 0
        specialisations = self.specialisations(source_align, target_align)
        variant = [
            self.prepare(launch, [fill, self.divisor_bits], constants, number == len(specialisations))
            for number, (launch, constants) in enumerate(specialisations, 1)
        ]
        self.variants[source_align, target_align] = variant
        return variant

    def specialisations(self, source_align: int = 16, target_align: int = 16) -> list[tuple[Launch, dict[str, Any]]]:
        """Return the launches of a variant, each with its compile-time constants. Does not compile."""
        boxes, dtype, divide = self.boxes, self.dtype, self.divisor is not None
        aligns, buffers = (source_align, target_align), (self.sources.count, self.targets.count)
        specialisations = []
        here = processors_of(self.device)
        for launch in reduce_launches(boxes, dtype, self.out_dtype, source_align, target_align, self.config, here):
            form = launch, boxes.contributors, dtype, self.op, divide, self.out_dtype
            specialisations.append((launch, reduce_constants(*form, aligns, buffers, self.soft)))
        return specialisations

    def prepare(self, launch: Launch, scalars: Sequence[int], constants: Mapping[str, Any], last: bool) -> Any:
        """As in `CopyTable`."""
        return PreparedLaunch(reduce_boxes_kernel, launch, self.device, scalars, constants)


def reduce_constants(
    launch: Launch,
    contributors: int,
    dtype: torch.dtype,
    op: str,
    divide: bool,
    out_dtype: torch.dtype,
    aligns: tuple[int, int] = (16, 16),
    buffers: tuple[int, int] = MOST_BUFFERS,
    soft: bool = False,
) -> dict[str, Any]:
    """Return the constants of reduce_boxes_kernel, and num_warps; pairs are (sources, targets)."""
    if dtype is torch.bool:
        op = "or" if op in ("sum", "max") else "and"
    return {
        "K": contributors,
        "OP": op,
        "FROM": ELEMENTS[real_dtype(dtype)],
        "TO": ELEMENTS[real_dtype(out_dtype)],
        "FROM_WORD": WORDS[launch.source_word],
        "TO_WORD": WORDS[launch.target_word],
        "DIVIDE": divide,
        "SOFT": soft,
        **tile_constants(launch, aligns, buffers),
    }


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def reduce_launches(
    boxes: StridedBoxes,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    source_align: int = 16,
    target_align: int = 16,
    config: LaunchConfig | None = None,
    processors: int = PROCESSORS,
) -> list[Launch]:
    """Return the launches of reduce_boxes for buffers of these alignments; a complex element is two real ones."""
    sizes = real_dtype(dtype).itemsize, real_dtype(out_dtype).itemsize
    for name, align, size in (("sources", source_align, sizes[0]), ("targets", target_align, sizes[1])):
        if align < size:
            raise ArgumentError(f"{name} are aligned to {align} bytes; allowed: a multiple of {size}, the element size")
    if dtype.is_complex:
        boxes = split_elements(boxes, 2)
    if config is None:
        config = LaunchConfig.for_reduction(boxes.numel * max(sizes), boxes.contributors, min(sizes), processors)
    return tile_launches(boxes, *sizes, source_align, target_align, config)


def reduce_table(
    boxes: StridedBoxes,
    dtype: torch.dtype,
    op: str,
    divisor: float | None = None,
    out_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    config: LaunchConfig | None = None,
) -> ReduceTable:
    """Cut `boxes` into tiles and upload their descriptors; once, when a program is compiled.

    Args:
        boxes: fills write `boxes.fill` as it is.
        dtype: of the sources.
        op: sum, max, min or prod.
        divisor: a positive number that the result is divided by before rounding; floats and complex only.
        out_dtype: of the targets; default: `dtype`.

    Raises:
        ArgumentError: unsupported op, dtype, divisor or fill.
    """
    return ReduceTable(boxes, dtype, op, divisor, out_dtype or dtype, torch.device(device), config)


def reduce_boxes(table: ReduceTable, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Reduce each box's contributors into its target."""
    if table.cpu_path:
        reduce_boxes_cpu(table.boxes, sources, targets, table.op, table.divisor)
        return
    first_sources, source_table, source_align = table.sources.resolve(sources)
    first_targets, target_table, target_align = table.targets.resolve(targets)
    launches = table.variants.get((source_align, target_align))
    with on_device(table.device):
        for launch in table.variant(source_align, target_align) if launches is None else launches:
            launch(source_table, target_table, first_sources, first_targets)


@torch.no_grad()
def reduce_boxes_cpu(
    boxes: StridedBoxes,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    op: str,
    divisor: float | None = None,
) -> None:
    """reduce_boxes by one reduce_views or fill_ per box."""
    for target, contributors in zip(
        target_views(boxes.target_rows, targets), source_views(boxes.source_rows, sources), strict=True
    ):
        if contributors:
            reduce_views(target, contributors, op, divisor)
        else:
            target.fill_(boxes.fill)
