"""DispatchOptions: the settings of a token dispatcher that do not describe the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch

from ...errors import ArgumentError, shown
from ...kernels import QuantizationName

OverflowPolicy = Literal["raise", "drop"]
RowsLayout = Literal["grouped", "batched"]
SavedRows = Literal["buffer", "redispatch", "copy"]
ScaleLayout = Literal["blocked"]
OF_ROWS = "payloads", "quantize", "scale_layout"
"""Options that change what `routed.x` is: not for callers that pass it to experts as it is."""


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """How a token dispatcher sends rows and what it keeps: for `options=` of `TokenDispatcher`, which validates them.

    Attributes:
        capacity: rows of each rank's buffer (int), or a factor of max_tokens * top_k (float); rounded up to `align`.
            Default: the worst case.
        expert_capacity: the maximum rows of a group.
        align: the alignment of groups, in rows.
        overflow: "raise": `check`, or the second dispatch after, raises CapacityError on all ranks if rows exceeded a
            capacity or ids were bad; for the last two dispatches only `check` does. Replays of a CUDA graph raise
            nothing: read `routed.dropped` and `routed.bad_ids`. "drop": dropped rows contribute zero, and so do their
            gradients. In each group the rows after the first expert_capacity are dropped, then those beyond the buffer;
            rows are in order of source rank, token and k. Bad ids act as -1.
        layout: "grouped", or "batched": x is [S_local, C, H] where C is expert_capacity rounded up to `align`.
        expert_map: the experts of each rank, if some are replicated or not in order. A rank sends to its own replica,
            else to replica r mod n of n.
        save: what backward keeps of `routed.x`. "buffer": the buffer that peers wrote, which other dispatches cannot
            use until backward is done with it. "copy": a copy, so that the buffer is free at once. "redispatch":
            nothing for experts that run within `with routed.kept():`, but x, [T, H], which the backward of combine
            dispatches again; not under torch.compile. In all cases combine keeps expert_output for the gradient of
            weights (not with weighted=False), the weights of rows, and routing: integers. Under torch.compile
            `routed.x` is a copy.
        pooled_buffers: with transport="symmetric_memory", the number of dispatches whose `routed.x` may be the buffer
            that peers wrote, each until the last tensor on it is gone. `routed.output_buffer()` takes one of them too.
            While all are in use, rows are copied out of a window, which `shardweave.stats().copies` counts. One is
            enough if a layer's rows are gone before the next layer's arrive: in inference, under activation
            checkpointing, with save="redispatch"; if backward keeps them, as many as layers. Dispatchers of one group
            share the buffers, which live as long as the process group. Buffers captured in a CUDA graph serve only
            captures from then on. On a GPU a buffer belongs to the stream of its dispatch: `record_stream` has no
            effect, so synchronise other streams that read it before its last tensor goes. Other transports allocate as
            many buffers as needed.
        chunk_capacity: on two-sided transports, the maximum rows that a rank sends to another (int), or a factor of
            max_tokens * top_k / W (float). Chunks of this fixed size travel whole and need no host read; with
            max_tokens * top_k rows there is room for all, and more are never sent. A rank's rows for another beyond
            it, in order of physical expert, token and k, are dropped, before the other capacities apply. Default:
            chunks of exact size, for which the host reads the counts once per dispatch. `explain` states the bytes of
            both. One-sided transports ignore it and drop nothing by it.
        zero_rows: True: rows from `routed.num_rows` on are zero, in `routed.x`, in `routed.weights` and in the gradient
            of `expert_output`, so that experts may process all rows, as nn.Linear does: a weight's gradient sums over
            all of them, and 0 * NaN is NaN. False: they are not initialised, which suffices for grouped GEMMs.
            Default: True with a `capacity` of at most 1.5 * max_tokens * top_k rows, where it costs little beside
            dispatch and combine; independent of the number of ranks. Batched buffers have no such rows.
        two_level: if the ranks are on several nodes. True: a token crosses the network once for each node that has
            experts of it, to a rank that forwards it there, and returns as one sum. False: once for each of its pairs
            there. Results are equal to the bit. Chunks of fixed size are possible on both. Default: the cheaper by the
            topology's prices, which `explain` states.
        dedupe: with transport="symmetric_memory". True: a token goes once to each rank that has experts of it, which
            copies it to its rows and returns one sum; rows are no pooled buffers then, and sums are in `dtype` with
            quantize_output as well. False: once for each of its pairs. Results are equal to the bit. Default: the
            cheaper by the figures of the GPU, for max_tokens evenly routed tokens, which `explain` states; False for
            CPU tensors and on other transports, which refuse True.
        payloads: the tensors of a token that travel together, for callers that quantize: for each its dtype and its
            shape without the dim of tokens, such as [(torch.float8_e4m3fn, 7168), (torch.float32, 56)]. Any dtype of
            whole bytes. `hidden` and `dtype` are then those of the experts' output.
        quantize: None, or how dispatch casts each row to float8_e4m3fn. "fp8_row": with one float32 scale, "fp8_128":
            with a float32 scale for every 128 elements, "mxfp8": with a float8_e8m0fnu scale for every 32. A scale is
            the largest magnitude divided by 448, with "mxfp8" rounded up to a power of two. Elements are rounded to
            nearest even; those that share a scale with an infinity or a NaN become NaN. Gradients flow as if rows were
            not cast, in `dtype`; save="redispatch" is refused. See `RoutedTokens.x`, `.scale` and `.dequantized`.
        quantize_output: None, or how `combine` casts each row of the experts' output, with the values of `quantize`. A
            row is multiplied out in float32 before it is weighted; sums are rounded to `dtype`, as without it. With
            two_level=True only rows inside a node are cast. Gradients flow as if rows were not cast.
        scale_layout: None: `routed.scale` has a row of scales for each row. "blocked": it has the scales of each group
            in blocks of 128 rows by 4 scales, padded by zeros, as `torch._scaled_grouped_mm` takes them for MXFP8 on
            NVIDIA GPUs; on ROCm torch wants None. Only with quantize="mxfp8", or with payloads of which the second is a
            vector of elements of one byte. See `RoutedTokens.scale`.
    """

    capacity: int | float | None = None
    expert_capacity: int | None = None
    align: int = 1
    overflow: OverflowPolicy = "raise"
    layout: RowsLayout = "grouped"
    expert_map: Sequence[Sequence[int]] | None = None
    save: SavedRows = "buffer"
    pooled_buffers: int = 1
    chunk_capacity: int | float | None = None
    zero_rows: bool | None = None
    two_level: bool | None = None
    dedupe: bool | None = None
    payloads: Sequence[tuple[torch.dtype, int | Sequence[int]]] | None = None
    quantize: QuantizationName | None = None
    quantize_output: QuantizationName | None = None
    scale_layout: ScaleLayout | None = None

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(DispatchOptions) if _is_set(self, f.name)]
        return f"DispatchOptions({', '.join(given)})"


DEFAULT_OPTIONS = DispatchOptions()


def _is_set(options: DispatchOptions, name: str) -> bool:
    """Whether an option is not the default."""
    value, default = getattr(options, name), getattr(DEFAULT_OPTIONS, name)
    return type(value) is not type(default) or value != default  # an array is compared by its type


def refuse_options(options: DispatchOptions, *names: str, why: str) -> None:
    """Refuse options other than the default.

    Args:
        why: the reason, for the error.

    Raises:
        ArgumentError: one of them is set, or `options` is no DispatchOptions.
    """
    check_options(options)
    for name in names:
        if _is_set(options, name):
            default = getattr(DEFAULT_OPTIONS, name)
            raise ArgumentError(f"{name}: {shown(getattr(options, name))}; allowed here: {default!r}, {why}")


def check_options(options: object) -> None:
    """
    Raises:
        ArgumentError: not a DispatchOptions.
    """
    if type(options) is not DispatchOptions:
        raise ArgumentError(f"options: {shown(options)}; allowed: a DispatchOptions")
