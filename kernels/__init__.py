"""Kernels that move and reduce bytes between buffers. Nothing here knows meshes, layouts or ranks."""

from __future__ import annotations

from .boxes import Boxes, source_views, target_views
from .copy_boxes import CopyTable, copy_boxes, copy_boxes_reference, copy_launches, copy_table
from .reduce_boxes import ReduceTable, reduce_boxes, reduce_boxes_reference, reduce_launches, reduce_table
from .reduction import reduce_views
from .tiling import Launch, LaunchConfig

__all__ = [
    "Boxes",
    "CopyTable",
    "Launch",
    "LaunchConfig",
    "ReduceTable",
    "copy_boxes",
    "copy_boxes_reference",
    "copy_launches",
    "copy_table",
    "reduce_boxes",
    "reduce_boxes_reference",
    "reduce_launches",
    "reduce_table",
    "reduce_views",
    "source_views",
    "target_views",
]
