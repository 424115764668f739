"""Collective setup that redistributions need, done ahead of the first call."""

from __future__ import annotations

import logging
from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, TransportError, UnsupportedError, shown
from ...kernels import HALVES
from ...planner import Mesh
from ..convert_specs import mesh_of
from ..executor.call import binding, check_backend, check_ranks, found_topology_of, naming, transport_for
from ..executor.run import finish_pending
from ..process_group_cache import clear_caches
from ..traced.process_groups import make_group
from ..transports.choose_transport import TransportName
from ..transports.hierarchical import HierarchicalTransport
from ..transports.process_group import ProcessGroupTransport
from ..transports.select import AnyTransport
from ..transports.streams import order_on, refuse_capture
from ..transports.symmetric_memory.rates import measure_rates
from ..transports.symmetric_memory.transport import SymmetricMemoryTransport

_logger = logging.getLogger(__name__)
_MOST_BYTES = 1 << 62
_MOST_OUTPUTS = 1024


def prepare(
    mesh: DeviceMesh, max_bytes: int, *, pooled_outputs: int = 0, transport: TransportName | None = None
) -> None:
    """Allocate and connect ahead what redistributions on `mesh` need. Collective: every rank of the mesh calls it.

    Where ranks synchronise on the device, this allocates a symmetric window for every group of ranks along mesh dims
    that reach each other's memory, so that programs are bound without waiting for other ranks, and it measures how fast
    the ranks write and read through it: steps that are bound later push or pull accordingly. Where ranks send and
    receive, it exchanges a message with every rank and in every group, because backends connect ranks on first use.
    Shared memory needs no preparation. Ranks of several machines find their topology. A mesh of several dims that is
    a part of the world, as a pipeline stage is, gets a process group of all its ranks, which traced exchanges along
    several mesh dims need.

    With `prepare_redistribute` afterwards, the first call of a request allocates nothing but tensors, and may be
    captured in a CUDA graph.

    Args:
        mesh: the mesh of the DTensors to redistribute.
        max_bytes: the size of each half of a window, of which there are two. A redistribution needs the bytes of a
            rank's largest shard, input or output of a step, times the number of contributions that are reduced, if it
            pushes; `explain` shows it. One that needs more allocates its own window, which is collective.
        pooled_outputs: with symmetric memory, the number of outputs of up to `max_bytes` that peers may write directly,
            instead of into a window that is copied out of: of redistributions without a reduction, for each group. Each
            is in use until the last tensor on it is gone. While all are in use, outputs are copied out of another
            buffer, which `shardweave.stats().copies` counts. Outputs whose runs do not begin and end at multiples of
            16 bytes still go through windows; `explain` says so. Each rank allocates `pooled_outputs + 1` buffers for
            each of its groups, for as long as the process group lives. Buffers captured in a CUDA graph serve only
            captures from then on. On a GPU a buffer belongs to the stream of its redistribution: `record_stream` has no
            effect, so synchronise other streams that read it before its last tensor goes. Equal on all ranks.
        transport: as for `redistribute`.

    Raises:
        ArgumentError: `mesh` is not a DeviceMesh, `max_bytes` is not an int from 1 to 2**62, or `pooled_outputs` not
            one from 0 to 1024.
        UnsupportedError: the requested transport cannot carry the ranks, there is no process group, or a CUDA graph is
            being captured.
        TransportError: a rank of the mesh did not arrive.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"mesh: {shown(mesh)}; allowed: a DeviceMesh")
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or not 0 < max_bytes <= _MOST_BYTES:
        raise ArgumentError(f"max_bytes: {shown(max_bytes)}; allowed: a number of bytes above 0, up to 2**62")
    if type(pooled_outputs) is not int or not 0 <= pooled_outputs <= _MOST_OUTPUTS:
        raise ArgumentError(f"pooled_outputs: {shown(pooled_outputs)}; allowed: a whole number, 0 to {_MOST_OUTPUTS}")
    if not dist.is_initialized():
        raise UnsupportedError("prepare: torch.distributed is not initialised; call init_process_group first")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    refuse_capture(device, "the memory and connections of prepare")
    planned_mesh = mesh_of(mesh)
    check_backend(device, planned_mesh.size, transport)
    check_ranks(planned_mesh)
    ranks = tuple(sorted(planned_mesh.rank_array.tolist()))
    with binding():
        _prepare_ranks(ranks, device, transport, mesh, max_bytes, pooled_outputs)
    if mesh.ndim > 1:
        make_group(ranks)


def _prepare_ranks(
    ranks: tuple[int, ...],
    device: torch.device,
    transport: TransportName | None,
    mesh: DeviceMesh,
    max_bytes: int,
    pooled_outputs: int,
) -> None:
    title = f"prepare(max_bytes={max_bytes}, pooled_outputs={pooled_outputs})"
    with naming(ranks, lambda: title, mesh):
        chosen, _ = transport_for(ranks, device, transport, mesh)
    finish_pending(chosen)
    if chosen.error is not None:
        raise chosen.error
    order = order_on(device)
    if order is not None:
        order.join()
    with torch.inference_mode(False):
        with chosen.rendezvous.making_ready(ranks, lambda: title):
            try:
                found_topology_of(ranks, device, mesh)  # so that binding does not wait for it
                _prepare(chosen, mesh_of(mesh), device, max_bytes, pooled_outputs)
            except TransportError as error:
                chosen.fail(error)  # first: flight records, for which this rank waits, are written on leaving
                raise
    _logger.debug("prepared ranks %s on %s for %d bytes", ranks, chosen.name, max_bytes)


def _prepare(transport: AnyTransport, mesh: Mesh, device: torch.device, max_bytes: int, pooled_outputs: int) -> None:
    if isinstance(transport, ProcessGroupTransport | HierarchicalTransport):
        across = transport if isinstance(transport, ProcessGroupTransport) else transport.across
        across.connect(tuple(sorted(mesh.rank_array.tolist())), device)
    inside = transport.inside if isinstance(transport, HierarchicalTransport) else transport
    if not isinstance(inside, SymmetricMemoryTransport):
        return
    (position,) = [p for p in range(mesh.size) if mesh.rank_at(p) == dist.get_rank()]
    node = transport.node_of(dist.get_rank())
    for number in range(1, mesh.ndim + 1):
        for dims in combinations(range(mesh.ndim), number):
            ranks = sorted(map(mesh.rank_at, mesh.subgroup(position, dims)))
            node_ranks = tuple(rank for rank in ranks if transport.node_of(rank) == node)
            if len(node_ranks) > 1:
                inside.window(node_ranks, max_bytes, HALVES)
                if node_ranks not in inside.windows.rates:
                    inside.windows.rates[node_ranks] = measure_rates(inside, node_ranks, max_bytes)
                    # Programs bound before may be cached on some ranks only: all ranks bind again, by the new rates.
                    clear_caches()
                if pooled_outputs and inside.pool_outputs(node_ranks, max_bytes, pooled_outputs):
                    clear_caches()
