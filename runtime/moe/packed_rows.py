"""PackedRows: the payload tensors of a token side by side in one row of bytes, which dispatch moves as it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...errors import ArgumentError, shown
from ...kernels import (
    QUANTIZATIONS,
    block_scales,
    block_scales_torch,
    copy_columns,
    dequantize_rows,
)

ALIGNMENT = 16  # bytes, of each payload in a row
MOST_PAYLOADS = 16
MOST_ROW_BYTES = 1 << 26
_DTYPES = {
    getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
        "float4_e2m1fn_x2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex32 complex64 complex128"
    ).split()
}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ScaleBlocks(NamedTuple):
    """How the second payload is arranged in blocks of 128 rows by 4 elements, group by group."""

    offsets: torch.Tensor
    """int32 [S]: the end of each group."""
    shape: tuple[int, int]
    """[N, n]."""
    fill: int
    """The bytes of blocks of no group, where unused rows are filled: four equal ones as an int32."""


@dataclass(frozen=True)
class PackedRows:
    """Where the payloads of a token lie in its row.

    Attributes:
        dtypes, shapes: of each payload, without the dim of tokens.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        named = zip(self.dtypes, self.shapes, strict=True)
        return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in named)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each payload."""
        return tuple(math.prod(shape) * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True))

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The byte of a row at which each payload begins."""
        return tuple(sum(map(_padded, self.sizes[:i])) for i in range(len(self.sizes)))

    @cached_property
    def nbytes(self) -> int:
        """The bytes of a row, a multiple of `ALIGNMENT`."""
        return max(ALIGNMENT, sum(map(_padded, self.sizes)))

    @property
    def words(self) -> int:
        """The elements of a row, int32."""
        return self.nbytes // 4

    def pack(self, payloads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return payloads, [T, *shape] each, as rows, int32 [T, words]."""
        tokens = len(payloads[0])
        rows = payloads[0].new_empty((tokens, self.words), dtype=torch.int32)
        for payload, begin, size in zip(payloads, self.begins, self.sizes, strict=True):
            if tokens and size:
                values = _as_words(payload.detach(), size)
                word = values.dtype.itemsize
                rows.view(values.dtype)[:, begin // word : (begin + size) // word] = values
        return rows

    @property
    def has_byte_scales(self) -> bool:
        """Whether the second payload is a vector of elements of one byte, as scales are that GEMMs take in blocks."""
        return len(self.sizes) > 1 and self.dtypes[1].itemsize == 1 and len(self.shapes[1]) == 1 and self.sizes[1] > 0

    def unpack(
        self,
        rows: torch.Tensor,
        num_rows: torch.Tensor | None,
        blocks: ScaleBlocks | None = None,
        scale: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return the payloads of rows, int32 [R, words]: [R, *shape] each, the first a view, the others contiguous.

        Args:
            num_rows: int32 [1], the number of rows to copy; None: all of them.
            blocks: the second is rearranged to these blocks, [N, n], where it has n elements, rounded up to 4.
            scale: the second, as `DispatchRecord.scale`; None: it is copied here.
        """
        payloads = []
        for i, (dtype, shape) in enumerate(zip(self.dtypes, self.shapes, strict=True)):
            if i == 1 and scale is not None:
                payload = scale.view(dtype) if blocks is not None else scale.view(dtype).view(len(rows), *shape)
            elif i == 1 and blocks is not None:
                payload = self._in_blocks(rows, num_rows is None, blocks).view(dtype)
            elif i and num_rows is not None:
                payload = torch.empty((len(rows), *shape), dtype=dtype, device=rows.device)
                copy_columns(rows, self.begins[i], payload, num_rows)
            else:
                columns = rows.view(torch.uint8)[:, self.begins[i] : self.begins[i] + self.sizes[i]]
                if i:
                    columns = columns.clone(memory_format=torch.contiguous_format).view(-1)
                payload = columns.view(dtype).view(len(rows), *shape)
            payloads.append(payload)
        return payloads

    def _in_blocks(self, rows: torch.Tensor, whole: bool, blocks: ScaleBlocks) -> torch.Tensor:
        """Return the second payload in blocks, bytes [N, n]. `whole`: blocks of no group are filled."""
        begin, size = self.begins[1], self.sizes[1]
        if torch.compiler.is_compiling():
            columns = rows.view(torch.uint8)[:, begin : begin + size]
            return block_scales_torch(columns, blocks.offsets, blocks.shape[0], blocks.fill)
        number, width = blocks.shape
        out = torch.empty((number, width // 4), dtype=torch.int32, device=rows.device)
        block_scales(rows, begin, size, out, blocks.offsets, blocks.fill if whole else None)
        return out.view(torch.uint8)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _as_words(payload: torch.Tensor, size: int) -> torch.Tensor:
    """Return `payload`, [T, ...] of `size` bytes a token, as integers [T, n], of the widest type that its memory
    allows."""
    item = payload.dtype.itemsize
    if payload.is_floating_point() or payload.is_complex():
        payload = payload.resolve_conj().resolve_neg()
    if item in _WORDS:  # there are no copies of some dtypes
        payload = payload.view(_WORDS[item])
    values = payload.reshape(len(payload), -1)
    if values.stride(1) != 1:
        values = values.clone(memory_format=torch.contiguous_format)  # one element has any stride
    if torch.compiler.is_compiling():  # traced tensors have no offsets
        return values.contiguous().view(torch.uint8) if item > 8 else values
    word = math.gcd(size, values.stride(0) * item, values.storage_offset() * item, 8)
    return values.view(_WORDS[word])


class Dequantize(torch.autograd.Function):
    """(grad_rows, x, scale, quantize) to x in the dtype of grad_rows, which get the gradient as it is."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, grad_rows: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, quantize: str
    ) -> torch.Tensor:
        return dequantize_rows(x, scale, QUANTIZATIONS[quantize], grad_rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradients[0], None, None, None


def packed_rows(name: str, quantize: str | None, hidden: int, payloads: Any = None) -> PackedRows | None:
    """Return where payloads, or elements and scales, lie in a row; None: rows are not packed.

    Args:
        name: of the setting `quantize`.

    Raises:
        ArgumentError: a description of payloads or a quantization that is not allowed.
    """
    if quantize is not None:
        if not isinstance(quantize, str) or quantize not in QUANTIZATIONS:
            raise ArgumentError(f"{name}: {quantize!r}; allowed: {', '.join(map(repr, QUANTIZATIONS))}, None")
        if payloads is not None:
            raise ArgumentError(f"payloads: {shown(payloads)} with quantize={quantize!r}; allowed: one of them")
        how = QUANTIZATIONS[quantize]
        scales = () if how.group is None else (how.scales(hidden),)
        return PackedRows((torch.float8_e4m3fn, how.scale_dtype), ((hidden,), scales))
    if payloads is None:
        return None
    if not isinstance(payloads, Sequence) or isinstance(payloads, str) or not 1 <= len(payloads) <= MOST_PAYLOADS:
        raise ArgumentError(
            f"payloads: {shown(payloads)}; allowed: 1 to {MOST_PAYLOADS} pairs (dtype, shape of a token)"
        )
    rows = PackedRows(*zip(*[_payload(i, given) for i, given in enumerate(payloads)], strict=True))
    if rows.nbytes > MOST_ROW_BYTES:
        raise ArgumentError(f"payloads: {rows.nbytes} bytes a token; allowed: {MOST_ROW_BYTES}")
    return rows


def _payload(i: int, given: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    error = ArgumentError(
        f"payloads[{i}]: {shown(given)}; allowed: (dtype, shape of a token), such as (torch.float8_e4m3fn, 7168), of a "
        "dtype of whole bytes"
    )
    if not isinstance(given, Sequence) or len(given) != 2 or not isinstance(given[0], torch.dtype):
        raise error
    dtype, shape = given
    try:
        dims = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    except TypeError:
        raise error from None
    if min(dims, default=0) < 0 or max(dims, default=0) > MOST_ROW_BYTES or dtype not in _DTYPES:
        raise error
    return dtype, dims
