"""copy_boxes: copy many strided N-D boxes in one launch, as words rather than elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError
from .addresses import MOST_BUFFERS, SOURCE_ARGUMENTS, TARGET_ARGUMENTS, BaseAddresses, source_address, target_address
from .boxes import StridedBoxes, source_views, split_elements, target_views
from .current_device import on_device
from .dtypes import WORDS, pattern, pattern_word
from .launch import PreparedLaunch, processors_of, runs_on, tile_constants
from .tiling import PROCESSORS, Launch, LaunchConfig, tile_launches


@triton.jit
def copy_tile(
    row,  # of the tile's descriptor, int64 [8]
    source_table,
    target_table,
    source0,
    source1,
    source2,
    source3,
    target0,
    fill,
    WORD: tl.constexpr,
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
):
    """Copy a tile of up to ROWS x COLS words."""
    source_base = source_address(source_table, tl.load(row), source0, source1, source2, source3, SOURCES)
    target_base = target_address(target_table, tl.load(row + 1), target0, TARGETS)
    copy_words(
        row, source_base, target_base, fill, WORD, VS, VD, ROWS, COLS, TRANSPOSED, ALIGN_S, ALIGN_D, HAS_FILL
    )  # fmt: skip


@triton.jit
def copy_words(
    row,  # of the tile's descriptor, int64 [8]
    source_base,  # address
    target_base,
    fill,
    WORD: tl.constexpr,
    VS: tl.constexpr,
    VD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGN_S: tl.constexpr,
    ALIGN_D: tl.constexpr,
    HAS_FILL: tl.constexpr,
):
    """`copy_tile` between buffers at these addresses."""
    source_id = tl.load(row)
    source_offset = tl.multiple_of(tl.load(row + 2), VS)
    target_offset = tl.multiple_of(tl.load(row + 3), VD)
    source_stride = tl.multiple_of(tl.load(row + 4), VS)
    target_stride = tl.multiple_of(tl.load(row + 5), VD)
    rows = tl.load(row + 6).to(tl.int32)
    cols = tl.load(row + 7).to(tl.int32)
    # Integer addresses lose their alignment; accesses are vectorised only if it and that of the bounds are known.
    source = tl.multiple_of(source_base.to(tl.pointer_type(WORD)), ALIGN_S) + source_offset
    target = tl.multiple_of(target_base.to(tl.pointer_type(WORD)), ALIGN_D) + target_offset
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
    if HAS_FILL:
        words = tl.load(source + r * source_stride + c, mask=inside & (tl.broadcast_to(source_id, [ROWS, COLS]) >= 0))
        words = tl.where(source_id >= 0, words, fill.to(tl.int64).to(WORD))
    else:
        words = tl.load(source + r * source_stride + c, mask=inside)
    tl.store(places, words, mask=inside)


@triton.jit(do_not_specialize=["source0", "source1", "source2", "source3", "target0", "fill"])
def copy_boxes_kernel(
    descriptors,  # int64 [programs, 8]
    source_table,  # int64 [sources], addresses; those that are arguments are not read
    target_table,  # int64 [targets]
    source0: tl.int64,  # address
    source1: tl.int64,
    source2: tl.int64,
    source3: tl.int64,
    target0: tl.int64,
    fill: tl.int64,  # 8 bytes of the fill value
    WORD: tl.constexpr,
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
):
    """Program i copies the tile of descriptor row i."""
    copy_tile(
        descriptors + tl.program_id(0).to(tl.int64) * 8,
        source_table,
        target_table,
        source0,
        source1,
        source2,
        source3,
        target0,
        fill,
        WORD,
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
    )


class CopyTable:
    """Prepared boxes for copy_boxes on one device. Made by copy_table."""

    pieces = False  # as for `tile_launches`

    def __init__(
        self,
        boxes: StridedBoxes,
        dtype: torch.dtype | None,
        itemsize: int,
        device: torch.device,
        config: LaunchConfig | None = None,
    ) -> None:
        if boxes.contributors != 1:
            raise ArgumentError(f"boxes have {boxes.contributors} contributors; copy_boxes takes 1 (see reduce_boxes)")
        if itemsize not in (1, 2, 4, 8, 16):
            raise ArgumentError(f"itemsize is {itemsize}; 1, 2, 4, 8 or 16 bytes are allowed")
        self._fill = b"\0" * itemsize
        if boxes.has_fill and (dtype is not None or boxes.fill != 0):
            if dtype is None:
                raise ArgumentError(f"fill is {boxes.fill!r} and only the itemsize was given; a dtype is needed")
            self._fill = pattern(boxes.fill, dtype)
        self.boxes, self.dtype, self.itemsize, self.device, self.config = boxes, dtype, itemsize, device, config
        self.sources = BaseAddresses("sources", boxes.source, dtype, itemsize, device, SOURCE_ARGUMENTS)
        self.targets = BaseAddresses("targets", boxes.target, dtype, itemsize, device, TARGET_ARGUMENTS)
        self.cpu_path = not runs_on(device)
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
        variant: list[Any] = []
        specialisations = self.specialisations(source_align, target_align)
        for number, (launch, constants) in enumerate(specialisations, 1):
            fill = pattern_word(self._fill, launch.target_word) if launch.has_fill else 0
            if fill is None:
                raise ArgumentError(
                    f"fill is {self.boxes.fill!r}: its {self.itemsize} bytes do not repeat in words of "
                    f"{launch.target_word}, which is all that the buffers' alignment or dtype allows; 0 always works"
                )
            variant.append(self.prepare(launch, [fill], constants, number == len(specialisations)))
        self.variants[source_align, target_align] = variant
        return variant

    def specialisations(self, source_align: int = 16, target_align: int = 16) -> list[tuple[Launch, dict[str, Any]]]:
        """Return the launches of a variant, each with its compile-time constants. Does not compile."""
        aligns, buffers = (source_align, target_align), (self.sources.count, self.targets.count)
        here = processors_of(self.device)
        launches = copy_launches(
            self.boxes, self.itemsize, source_align, target_align, self.config, here, self.pieces and target_align == 16
        )
        return [(launch, copy_constants(launch, aligns, buffers)) for launch in launches]

    def prepare(self, launch: Launch, scalars: Sequence[int], constants: Mapping[str, Any], last: bool) -> Any:
        """Compile and load a launch; `last`: of the launches of one call."""
        return PreparedLaunch(copy_boxes_kernel, launch, self.device, scalars, constants)


def copy_constants(
    launch: Launch, aligns: tuple[int, int] = (16, 16), buffers: tuple[int, int] = MOST_BUFFERS
) -> dict[str, Any]:
    """Return the constants of copy_boxes_kernel, and num_warps; pairs are (sources, targets)."""
    return {"WORD": WORDS[launch.target_word], **tile_constants(launch, aligns, buffers)}


def copy_launches(
    boxes: StridedBoxes,
    itemsize: int,
    source_align: int = 16,
    target_align: int = 16,
    config: LaunchConfig | None = None,
    processors: int = PROCESSORS,
    pieces: bool = False,
) -> list[Launch]:
    """Return the launches of copy_boxes for buffers of these alignments; descriptors are NumPy arrays. `pieces`: as for
    `tile_launches`, for kernels that pack."""
    # Elements wider than a word or than the buffers' alignment are copied in parts.
    part = min(itemsize, 8, source_align, target_align)
    if part < itemsize:
        boxes = split_elements(boxes, itemsize // part)
    config = config or LaunchConfig.for_copy(boxes.numel * part, processors)
    return tile_launches(boxes, part, part, source_align, target_align, config, True, pieces)


def copy_table(
    boxes: StridedBoxes,
    itemsize_or_dtype: int | torch.dtype,
    device: torch.device | str = "cpu",
    config: LaunchConfig | None = None,
) -> CopyTable:
    """Cut `boxes` (one contributor) into tiles and upload their descriptors; once, when a program is compiled.

    With an itemsize in place of a dtype, buffers may have any dtype of that size, and a fill must be 0.
    """
    device = torch.device(device)
    if isinstance(itemsize_or_dtype, torch.dtype):
        return CopyTable(boxes, itemsize_or_dtype, itemsize_or_dtype.itemsize, device, config)
    return CopyTable(boxes, None, itemsize_or_dtype, device, config)


def copy_boxes(table: CopyTable, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy each box from its source to its target, bit by bit. Buffers are strided tensors of any shape."""
    if table.cpu_path:
        copy_boxes_cpu(table.boxes, sources, targets)
        return
    first_sources, source_table, source_align = table.sources.resolve(sources)
    first_targets, target_table, target_align = table.targets.resolve(targets)
    launches = table.variants.get((source_align, target_align))
    with on_device(table.device):
        for launch in table.variant(source_align, target_align) if launches is None else launches:
            launch(source_table, target_table, first_sources, first_targets)


@torch.no_grad()
def copy_boxes_cpu(boxes: StridedBoxes, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """copy_boxes by one copy_ or fill_ per box."""
    if boxes.contributors != 1:
        raise ArgumentError(f"boxes have {boxes.contributors} contributors; copy_boxes takes 1 (see reduce_boxes)")
    for target, source in zip(
        target_views(boxes.target_rows, targets), source_views(boxes.source_rows, sources), strict=True
    ):
        if not source:
            target.fill_(boxes.fill)
        elif source[0].dtype is target.dtype:
            target.copy_(source[0])
        else:
            raise ArgumentError(
                f"a source has dtype {source[0].dtype}, its target {target.dtype}; copy_boxes does not cast"
            )
