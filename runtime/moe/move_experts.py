"""move_experts and sum_replicas: a dispatcher gets another expert map, and replicas of experts have equal gradients.

Each is one batch of redistributions: from the rank that has an expert to one that gets it, or a sum among the ranks
that have its replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from ...errors import ArgumentError, shown
from ...kernels import on_device
from ...planner import Layout, Mesh, Partial, Replicate, Request, plan_batch
from ..convert_specs import dtype_name
from ..executor.batch import BoundBatch
from ..executor.call import Call
from ..executor.dispatch_modes import below_modes_with_memory
from ..process_group_cache import ProcessGroupCache, forget_dead_groups
from ..transports.hierarchical import HierarchicalTransport
from ..transports.in_process import InProcessTransport
from ..transports.process_group import ProcessGroupTransport
from .active_ranks import check_all_active
from .config import DispatchConfig
from .dispatcher import Reporting, TokenDispatcher

_WHOLE, _PARTIAL = Layout([Replicate()]), Layout([Partial("sum")])
_sums: ProcessGroupCache[tuple, Call] = ProcessGroupCache(64)


def move_experts(
    dispatcher: TokenDispatcher, expert_map: Sequence[Sequence[int]], tensors: Sequence[torch.Tensor] = ()
) -> None:
    """Give a dispatcher another expert map, and move the experts' weights to their new ranks, in place.

    All ranks of the dispatcher call it with equal maps, between steps: dispatches so far may still be combined, but
    their backward must have run, since it needs the old weights. It waits for the calls in flight. The dispatcher keeps
    its buffers. Weights travel in one batch of redistributions: each expert that a rank does not have yet is received
    once, from a rank that has it. Experts that stay on their rank move within it. Captured CUDA graphs keep the old
    map: capture them again.

    Args:
        expert_map: the experts of each rank, as many as now: such as `balance_experts(...).expert_map`.
        tensors: of the dispatcher's device, [S_local, ...], one row for each of this rank's physical experts: weights,
            and the optimizer's state of each. DTensors are `Shard(0)`, so that their rows are in order of physical
            experts, and no longer of experts. On all ranks the same number, dtypes and sizes of rows.

    Raises:
        ArgumentError: a map with other numbers of experts, or a tensor that is not allowed. Nothing has changed then.
        UnsupportedError: a fake tensor mode is active. Other dispatch modes see nothing of the call.
        TransportError: a peer died, timed out or passed another map. Weights are not changed.
    """
    with below_modes_with_memory(), dispatcher_reporting(dispatcher):
        rows = _rows_of(dispatcher, tensors)
        old = dispatcher.config
        check_all_active(old, "move_experts")
        if not isinstance(expert_map, Sequence) or not all(isinstance(x, Sequence) for x in expert_map):
            raise ArgumentError(f"expert_map: {shown(expert_map)}; allowed: the experts of each rank")
        new = replace(old, expert_map=expert_map)
        if new.bounds != old.bounds:
            given, allowed = list(new.experts_per_rank), list(old.experts_per_rank)
            raise ArgumentError(f"expert_map: {given} experts on the ranks; allowed: as many as now, {allowed}")
    with below_modes_with_memory(), torch.no_grad(), on_device(dispatcher.transfers[0].device):
        moved = _moved(dispatcher, _held(old), _held(new), rows)
        for x, of in zip(rows, moved, strict=True):
            for slot, row in of.items():
                x[slot].copy_(row)
    dispatcher._use_config(new)


def sum_replicas(dispatcher: TokenDispatcher, tensors: Sequence[torch.Tensor]) -> None:
    """Sum the rows of each expert over its replicas, in place, so that replicas that train stay equal.

    A replica's gradient is that of the tokens that were sent to it. All ranks call this after backward, before the
    optimizer; without replicas it does nothing. Sums are in order of ranks and bitwise equal on all of them.

    Args:
        tensors: as for `move_experts`: the gradients of weights. A rank whose experts had no tokens passes zeros.

    Raises:
        ArgumentError: a tensor that is not allowed.
        UnsupportedError: a fake tensor mode is active. Other dispatch modes see nothing of the call.
        TransportError: a peer died, timed out or made another call.
    """
    with below_modes_with_memory(), dispatcher_reporting(dispatcher):
        rows = _rows_of(dispatcher, tensors)
        check_all_active(dispatcher.config, "sum_replicas")
    held = _held(dispatcher.config)
    ranks, me = dispatcher._ranks, dispatcher.transfers[0].me
    number = Counter(e for of in held for e in set(of))
    experts = sorted(e for e, n in number.items() if n > 1)
    own = {e: [slot for slot, other in enumerate(held[me]) if other == e] for e in held[me]}
    requests, inputs, slots = [], [], []
    with below_modes_with_memory(), torch.no_grad(), on_device(dispatcher.transfers[0].device):
        for x in rows:
            for e, at in own.items():
                if number[e] == 1 and len(at) > 1:  # all replicas are on this rank
                    x[at] = x[at].sum(0, keepdim=True, dtype=x.dtype)
            for e in experts:
                mesh = Mesh((number[e],), ranks=sorted(rank for rank, of in zip(ranks, held, strict=True) if e in of))
                requests.append(Request(mesh, (1, *x.shape[1:]), dtype_name(x.dtype), _PARTIAL, _WHOLE))
                # Several replicas on one rank are summed there.
                at = own.get(e, [])
                inputs.append(x[at].sum(0, keepdim=True, dtype=x.dtype) if at else x.new_empty(0))
                slots.append((x, at))
        key = dispatcher.config.bounds, held, ranks, dispatcher.handle, tuple((x.shape[1:], x.dtype) for x in rows)
        for (x, at), total in zip(slots, _run(dispatcher, requests, inputs, key), strict=True):
            for slot in at:
                x[slot : slot + 1].copy_(total)


def dispatcher_reporting(dispatcher: TokenDispatcher) -> Reporting:
    """Return the context in which peers are told of an ArgumentError.

    Raises:
        ArgumentError: no TokenDispatcher.
    """
    if not isinstance(dispatcher, TokenDispatcher):
        raise ArgumentError(f"dispatcher: {shown(dispatcher)}; allowed: a TokenDispatcher")
    return Reporting(dispatcher._transport, dispatcher._participants, in_place_of_call=False)


def _rows_of(dispatcher: TokenDispatcher, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local tensors, detached, checked."""
    transfer = dispatcher.transfers[0]
    low, high = dispatcher.config.bounds[transfer.me : transfer.me + 2]
    if not isinstance(tensors, list | tuple):
        raise ArgumentError(f"tensors: {type(tensors).__name__}; allowed: a list of tensors")
    rows = []
    for i, x in enumerate(tensors):
        local = x.to_local() if isinstance(x, DTensor) else x
        if not isinstance(local, torch.Tensor) or local.dim() == 0 or len(local) != high - low:
            given = f"shape {tuple(local.shape)}" if isinstance(local, torch.Tensor) else shown(x)
            raise ArgumentError(f"tensors[{i}]: {given}; allowed: {high - low} rows, one for each physical expert here")
        if local.device != transfer.device:
            raise ArgumentError(f"tensors[{i}]: device {local.device}; allowed: that of the dispatcher")
        dtype_name(local.dtype)
        rows.append(local.detach())
    return rows


def _held(config: DispatchConfig) -> tuple[tuple[int, ...], ...]:
    """Return the expert of each physical expert of each rank."""
    expert_of = config.expert_of or tuple(range(config.num_experts))
    return tuple(expert_of[a:b] for a, b in zip(config.bounds, config.bounds[1:], strict=False))


def _moved(
    dispatcher: TokenDispatcher,
    old: Sequence[Sequence[int]],
    new: Sequence[Sequence[int]],
    rows: Sequence[torch.Tensor],
) -> list[dict[int, torch.Tensor]]:
    """Return for each tensor the new rows of this rank's slots whose expert changes, copied."""
    ranks, me = dispatcher._ranks, dispatcher.transfers[0].me
    sends = _sends(old, new)
    requests, inputs = [], []
    for x in rows:
        for (source, target), experts in sends.items():
            meshes = (Mesh((1,), ranks=(ranks[rank],)) for rank in (source, target))
            shape = len(experts), *x.shape[1:]
            requests.append(Request(next(meshes), shape, dtype_name(x.dtype), _WHOLE, _WHOLE, next(meshes)))
            # A rank that only receives has an empty source shard.
            at = [old[me].index(e) for e in experts] if source == me else []
            inputs.append(torch.stack([x[i] for i in at]) if at else x.new_empty(0, *x.shape[1:]))
    received = iter(_run(dispatcher, requests, inputs))
    moved: list[dict[int, torch.Tensor]] = []
    for x in rows:
        arrived: dict[int, torch.Tensor] = {}
        for (_, target), experts in sends.items():
            part = next(received)
            if target == me:
                arrived.update(zip(experts, part, strict=True))
        changes = {slot: e for slot, e in enumerate(new[me]) if old[me][slot] != e}
        # Rows of this rank are copied, since another expert may be written over them first.
        moved.append({slot: arrived[e] if e in arrived else x[old[me].index(e)].clone() for slot, e in changes.items()})
    return moved


def _sends(old: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> dict[tuple[int, int], list[int]]:
    """Return the experts that travel, by (source, target): each to a rank that does not have it, from the rank with the
    fewest sends of those that have it."""
    sources: dict[int, list[int]] = defaultdict(list)
    for rank, experts in enumerate(old):
        for e in experts:
            sources[e].append(rank)
    load: Counter[int] = Counter()
    sends: dict[tuple[int, int], list[int]] = {}
    for target, experts in enumerate(new):
        for e in sorted({*experts} - {*old[target]}):
            source = min(sources[e], key=lambda rank: (load[rank], rank))
            load[source] += 1
            sends.setdefault((source, target), []).append(e)
    return sends


def _run(
    dispatcher: TokenDispatcher, requests: list[Request], inputs: list[torch.Tensor], key: tuple | None = None
) -> list[torch.Tensor]:
    """Run the requests as one batch and return this rank's results; bound once for each key, if there is one."""
    transport, device = dispatcher._transport, dispatcher.transfers[0].device
    if not requests or isinstance(transport, InProcessTransport):
        return inputs
    forget_dead_groups()
    call = _sums.get(key) if key is not None else None
    with torch.inference_mode(False):
        if call is None:
            rank = dispatcher._ranks[dispatcher.transfers[0].me]
            batch = plan_batch(requests, rank=rank)
            participants = batch.participants(rank)
            if rank not in participants:
                call = Call(None, None, ())
            else:
                if isinstance(transport, ProcessGroupTransport | HierarchicalTransport):
                    transport.use_groups([dispatcher._group])
                with transport.rendezvous.making_ready(participants, batch.explain):
                    strides = [x.stride() for x in inputs]
                    bound = BoundBatch(batch, rank, strides, transport, [x.dtype for x in inputs], device)
                call = Call(bound, transport, participants)
            if key is not None:
                _sums[key] = call
        results: list[torch.Tensor] = call(inputs)
    return results
