"""What ranks have to do together before they exchange anything, done ahead."""

from __future__ import annotations

from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, TransportError, UnsupportedError, shown
from ...planner import Mesh
from ..convert_specs import mesh_of
from ..process_group_cache import clear_caches
from ..transports.hierarchical import HierarchicalTransport
from ..transports.process_group import ProcessGroupTransport
from ..transports.select import AnyTransport
from ..transports.streams import order_on
from ..transports.symmetric import SymmetricMemoryTransport
from ..transports.symmetric_rates import measure_rates
from .call import check_backend, check_ranks, transport_for

_MOST_BYTES = 1 << 62


def prepare(mesh: DeviceMesh, max_bytes: int, *, transport: str | None = None) -> None:
    """Make what later redistributions on `mesh` exchange through. Collective: every rank of the mesh calls.

    Where ranks meet on the device it makes a window for every group of ranks along mesh dims that reach each other, so
    that a request is bound without any rank waiting for another, and measures how fast they write and read through it:
    steps bound later push or pull by that. Where ranks send and receive it does so once with every rank and in every
    group, since backends connect ranks when they first meet. Shared memory needs nothing ahead.

    With `bind` afterwards, the first call of a request allocates nothing but tensors, and may be captured in a CUDA
    graph.

    Args:
        mesh: of the DTensors that will be redistributed.
        max_bytes: what one window holds: of a rank's largest shard, input or output of a step, times the ranks whose
            contributions are reduced where they push. `explain` shows what a request needs; one that needs more makes
            its own, which is collective.
        transport: as for `redistribute`.

    Raises:
        ArgumentError: `mesh` is no DeviceMesh, `max_bytes` no number of bytes from 1 to 2**62.
        UnsupportedError: the transport asked for cannot carry the ranks; there is no process group.
        TransportError: a rank of the mesh did not come.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"mesh: {shown(mesh)}; allowed: a DeviceMesh")
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or not 0 < max_bytes <= _MOST_BYTES:
        raise ArgumentError(f"max_bytes: {shown(max_bytes)}; allowed: a number of bytes above 0, up to 2**62")
    if not dist.is_initialized():
        raise UnsupportedError("prepare: torch.distributed is not initialised; call init_process_group first")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    on = mesh_of(mesh)
    check_backend(device, on.size, transport)
    check_ranks(on)
    ranks = tuple(sorted(on.rank_array.tolist()))
    found, _ = transport_for(ranks, device, transport, mesh)
    while found.pending is not None:
        found.pending.finish()
    if found.error is not None:
        raise found.error
    order = order_on(device)
    if order is not None:
        order.join()
    try:
        with torch.inference_mode(False):
            with found.rendezvous.making_ready(ranks, lambda: f"prepare(max_bytes={max_bytes})"):
                _prepare(found, on, device, max_bytes)
    except TransportError as error:
        found.fail(error)
        raise


def _prepare(transport: AnyTransport, mesh: Mesh, device: torch.device, max_bytes: int) -> None:
    if isinstance(transport, ProcessGroupTransport | HierarchicalTransport):
        across = transport if isinstance(transport, ProcessGroupTransport) else transport.across
        across.connect(tuple(sorted(mesh.rank_array.tolist())), device)
    inside = transport.inside if isinstance(transport, HierarchicalTransport) else transport
    if not isinstance(inside, SymmetricMemoryTransport):
        return
    (position,) = [p for p in range(mesh.size) if mesh.rank_at(p) == dist.get_rank()]
    here = transport.node_of(dist.get_rank())
    for number in range(1, mesh.ndim + 1):
        for dims in combinations(range(mesh.ndim), number):
            ranks = sorted(map(mesh.rank_at, mesh.subgroup(position, dims)))
            near = tuple(rank for rank in ranks if transport.node_of(rank) == here)
            if len(near) > 1:
                inside.window(near, max_bytes)
                if near not in inside.windows.rates:
                    inside.windows.rates[near] = measure_rates(inside, near, max_bytes)
                    # Ranks keep what they have bound for as long as it suits each: all bind by the new rates from here.
                    clear_caches()
