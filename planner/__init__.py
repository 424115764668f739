"""Decides: meshes, layouts, index sets, exchanges, programs. Standard library and numpy only."""

from .dtypes import ITEMSIZE
from .exchange import FILL, Boxes
from .layout import Layout, Partial, Placement, Replicate, Shard
from .mesh import Mesh
from .plan import check_local_shape, plan
from .program import Exchange, Local, Program, Reduce, Step, format_bytes

__all__ = [
    "FILL",
    "ITEMSIZE",
    "Boxes",
    "Exchange",
    "Layout",
    "Local",
    "Mesh",
    "Partial",
    "Placement",
    "Program",
    "Reduce",
    "Replicate",
    "Shard",
    "Step",
    "check_local_shape",
    "format_bytes",
    "plan",
]
