"""Kernels that copy and reduce boxes and rows of tokens. They know nothing of meshes, layouts or transports."""

from __future__ import annotations

from .addresses import AddressTables
from .boxes import SourceRows, StridedBoxes, TargetRows, Where, source_views, target_views
from .channel import SLOT, UNLIMITED, Channel, Code, Failure, pack
from .compare_words import WordComparison
from .copy_boxes import CopyTable, copy_boxes, copy_boxes_cpu, copy_boxes_kernel, copy_launches, copy_table
from .current_device import capturing, on_device
from .direct_boxes import DirectTable, DirectUse
from .launch import interpreted, processors_of, recorded_launches, runs_on, uploaded
from .reduce_boxes import ReduceTable, reduce_boxes, reduce_boxes_cpu, reduce_launches, reduce_table
from .reduce_cpu import reduce_terms, reduce_views
from .signal import build_signal, signal, wait_limit
from .tiling import Launch, LaunchConfig
from .tokens.block_scales import BLOCK_ROWS, block_rows, block_scales, block_scales_torch, block_width, unblocked_scales
from .tokens.columns import Columns, column_words
from .tokens.combine_rows import combine_rows, gather_values
from .tokens.compiled_loops import why_not_compiled
from .tokens.copy_columns import copy_columns
from .tokens.copy_rows import copy_rows, fill_rows
from .tokens.count_pairs import MOST_PHYSICAL_EXPERTS, CountedPairs, CountShare, count_pairs
from .tokens.group_rows import Groups, PhysicalExperts, group_rows
from .tokens.locate_rows import MOST_K, locate_rows
from .tokens.offer_rows import offer_rows
from .tokens.offer_tokens import RowTables, offer_tokens
from .tokens.push_rows import push_rows
from .tokens.push_sums import push_sums
from .tokens.quantize_rows import (
    QUANTIZATIONS,
    Quantization,
    QuantizationName,
    QuantizedRows,
    dequantize_rows,
    quantize_rows,
)
from .tokens.receive_rows import receive_rows
from .tokens.repeated_dispatch import RepeatedDispatch
from .tokens.route_rows import route_rows
from .tokens.rows import (
    PAYLOADS,
    Buffers,
    ChosenBuffers,
    RowLaunch,
    TokenRows,
    contiguous_rows,
    has_contiguous_rows,
)
from .tokens.rows_cpu import host_empty, host_tensor
from .tokens.silu_and_mul import silu_and_mul, silu_and_mul_backward
from .tokens.spread_rows import OwnRows, spread_rows
from .tokens.weigh_rows import weigh_rows
from .tokens.window_signals import WindowBarrier, WindowSignals
from .window_boxes import run_in_window, window_table
from .window_use import HALVES, Turn, Watch, WindowUse

__all__ = [
    "HALVES",
    "MOST_K",
    "MOST_PHYSICAL_EXPERTS",
    "PAYLOADS",
    "QUANTIZATIONS",
    "Quantization",
    "QuantizationName",
    "QuantizedRows",
    "SLOT",
    "UNLIMITED",
    "AddressTables",
    "BLOCK_ROWS",
    "StridedBoxes",
    "Buffers",
    "Channel",
    "ChosenBuffers",
    "Code",
    "CopyTable",
    "DirectTable",
    "DirectUse",
    "Failure",
    "Groups",
    "Launch",
    "LaunchConfig",
    "ReduceTable",
    "Columns",
    "CountShare",
    "CountedPairs",
    "RepeatedDispatch",
    "OwnRows",
    "RowLaunch",
    "RowTables",
    "PhysicalExperts",
    "SourceRows",
    "TargetRows",
    "TokenRows",
    "Turn",
    "Watch",
    "Where",
    "WindowBarrier",
    "WindowSignals",
    "WindowUse",
    "WordComparison",
    "block_rows",
    "block_scales",
    "block_scales_torch",
    "block_width",
    "build_signal",
    "column_words",
    "combine_rows",
    "contiguous_rows",
    "copy_boxes",
    "copy_boxes_kernel",
    "copy_boxes_cpu",
    "copy_columns",
    "copy_launches",
    "copy_rows",
    "copy_table",
    "dequantize_rows",
    "fill_rows",
    "gather_values",
    "group_rows",
    "has_contiguous_rows",
    "host_empty",
    "host_tensor",
    "interpreted",
    "locate_rows",
    "offer_rows",
    "offer_tokens",
    "capturing",
    "on_device",
    "pack",
    "processors_of",
    "push_rows",
    "push_sums",
    "quantize_rows",
    "receive_rows",
    "recorded_launches",
    "reduce_boxes",
    "reduce_boxes_cpu",
    "reduce_launches",
    "reduce_table",
    "reduce_terms",
    "reduce_views",
    "route_rows",
    "runs_on",
    "run_in_window",
    "count_pairs",
    "signal",
    "silu_and_mul",
    "silu_and_mul_backward",
    "source_views",
    "spread_rows",
    "target_views",
    "unblocked_scales",
    "uploaded",
    "wait_limit",
    "weigh_rows",
    "window_table",
    "why_not_compiled",
]
