"""Plans redistributions. Standard library and numpy only.

- Data: `mesh`, `placements`, `layout` (text form in `layout_text`), `topology`, `dtypes`.
- Index sets: `index_sets` (what a rank holds), `intersection` (what two ranks have in common).
- Steps: `layout_change` is what changes, on one mesh or between two; `exchange` makes its `transfer_table`;
  `build_steps` makes the records of `steps`.
- Cost: `topology` is the model, `hardware` the figures of kinds of hardware; `step_cost`, `cross_mesh_cost` and
  `node_cost` price steps on the ranks of `priced_ranks`; `byte_bound` is the lower bound on bytes.
- Plans: `plan` checks a `request` (`arguments`), splits mesh dims (`mesh_split`), and finds a `path` by `search` over
  `intermediate_layouts`, with reductions of `bounded_fan_in`; `cross_mesh_plan` for two meshes, `batch` for several
  tensors, `local_slice` for requests that need no program.
- Programs: `program_base` holds the data, `render` the text, SVG and JSON forms, `program` both; `collectives` tells
  which steps are collectives of torch.distributed.
- `token_levels` compares the levels of token exchanges;
  `token_dedupe` prices a token that crosses once for each rank inside a node.
"""

from .arguments import check_layout, check_local_shape, check_shape, resolve_layout
from .batch import Batch, plan_batch
from .collectives import backend_reduction, is_even_all_gather
from .cost.hardware import MachineFigures, found_topology
from .cost.token_dedupe import price_dedupe, reached_shares
from .cost.token_levels import price_levels
from .cost.topology import (
    NVLINK_INFINIBAND,
    NVLINK_NODE,
    TOPOLOGIES,
    Link,
    Topology,
    TopologyName,
    topology_argument,
)
from .exchange.local_slice import LocalSlice
from .exchange.node_change import layout_change
from .exchange.senders import communicates
from .exchange.steps import Exchange, Local, Reduce, Step
from .exchange.transfer_table import FILL, Row, TransferTable
from .layouts.dtypes import ITEMSIZE, check_dtype
from .layouts.index_sets import held_box, held_sizes, parts_of, spans_at
from .layouts.layout import Layout, Orders
from .layouts.mesh import MOST_RANKS, Mesh, position_of, whole_numbers
from .layouts.node_layout import NodeLayout
from .layouts.placements import Partial, Placement, Replicate, Shard, StridedShard
from .layouts.spans import held_spans
from .plan import Planner, plan, planner_of, redistribute_cost
from .program import Program
from .program_base import format_bytes
from .render.draw import draw
from .render.explain import title
from .render.program_to_json import mesh_to_dict
from .request import Request

__all__ = [
    "FILL",
    "ITEMSIZE",
    "MOST_RANKS",
    "NVLINK_INFINIBAND",
    "NVLINK_NODE",
    "TOPOLOGIES",
    "Batch",
    "TransferTable",
    "Exchange",
    "Layout",
    "Link",
    "Local",
    "LocalSlice",
    "MachineFigures",
    "Mesh",
    "NodeLayout",
    "Orders",
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
    "TopologyName",
    "backend_reduction",
    "check_dtype",
    "check_layout",
    "check_local_shape",
    "check_shape",
    "communicates",
    "draw",
    "format_bytes",
    "found_topology",
    "held_box",
    "held_sizes",
    "held_spans",
    "is_even_all_gather",
    "layout_change",
    "mesh_to_dict",
    "parts_of",
    "plan",
    "plan_batch",
    "planner_of",
    "position_of",
    "price_dedupe",
    "price_levels",
    "reached_shares",
    "redistribute_cost",
    "resolve_layout",
    "spans_at",
    "title",
    "topology_argument",
    "whole_numbers",
]
