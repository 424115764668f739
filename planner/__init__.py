"""Decides: meshes, layouts, index sets, exchanges, programs. Standard library and numpy only."""

from .arguments import check_local_shape, check_shape
from .batch import Batch, Request, plan_batch
from .crossing import position_of
from .drawing import draw
from .dtypes import ITEMSIZE
from .exchange import FILL, Boxes, Row
from .layout import Layout, Partial, Placement, Replicate, Shard, StridedShard
from .mesh import Mesh
from .plan import Planner, plan, planner_of, redistribute_cost
from .program import Exchange, Local, Program, Reduce, Step, format_bytes
from .topology import NVLINK_INFINIBAND, NVLINK_NODE, Link, Topology

__all__ = [
    "FILL",
    "ITEMSIZE",
    "NVLINK_INFINIBAND",
    "NVLINK_NODE",
    "Batch",
    "Boxes",
    "Exchange",
    "Layout",
    "Link",
    "Local",
    "Mesh",
    "Partial",
    "Placement",
    "Planner",
    "Program",
    "Reduce",
    "Replicate",
    "Request",
    "Row",
    "Shard",
    "Step",
    "StridedShard",
    "Topology",
    "check_local_shape",
    "check_shape",
    "draw",
    "format_bytes",
    "plan",
    "plan_batch",
    "planner_of",
    "position_of",
    "redistribute_cost",
]
