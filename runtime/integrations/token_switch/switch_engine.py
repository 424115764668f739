"""SwitchEngine: routings that serve any number of dispatches and combines, of rows of any size and dtype.

A routing is made by a dispatch whose rows have one or K elements. Its record says where rows go, whatever they hold, so
dispatches and combines with the routing exchange no counts. In the flat layout a token has one row on each rank that
has experts of it: the "experts" of its dispatchers are the ranks, and the rows of the first dispatch are expert ids.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ....errors import ArgumentError
from ....kernels import MOST_K, PAYLOADS, uploaded
from ...executor.call import binding
from ...executor.dispatch_modes import is_fake, under_modes
from ...moe.autograd import note_written
from ...moe.config import DispatchConfig
from ...moe.dispatch_record import DispatchRecord, Tokens, empty_record
from ...moe.dispatcher import TokenDispatcher
from ...moe.operations import DISPATCH, seen_by_modes
from ...moe.options import DispatchOptions, OverflowPolicy
from ...moe.overflow import LATEST, Overflow
from ...transports.choose_transport import TransportName

LAYOUTS = ("flat", "expert_major")
Received = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Rows [R, H] of tokens; their weights, float32, flat [R, K], expert-major [R]; their expert ids, flat only."""


@dataclass(eq=False, repr=False)
class RoutingHandle:
    """The `handle` of the Routing that `TokenSwitch.create_routing` returns."""

    engine: SwitchEngine
    layout: str
    record: DispatchRecord
    expert_ids: torch.Tensor | None = None
    """Flat only: int64 [R, K], `out_topk_idx` of every dispatch."""
    order: torch.Tensor | None = None
    """Flat only: int64 [R, K], the k of each entry of `expert_ids`."""
    _dispatched: deque[tuple[threading.Thread, weakref.ref[torch.Tensor]]] = field(default_factory=deque)
    """The thread and the differentiable rows of the dispatches not combined yet, oldest first."""
    _combined: dict[threading.Thread, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    """The rows of each thread's dispatch that was combined last; the last of all is the last item."""

    def add_dispatched(self, rows: torch.Tensor) -> None:
        """Add the differentiable rows of a dispatch of this thread."""
        self._dispatched.append((threading.current_thread(), weakref.ref(rows)))

    def rows_to_combine(self, required: bool) -> torch.Tensor | None:
        """Return the differentiable rows that the next combine of this thread belongs to, if there are any: those of
        the oldest dispatch not combined yet, or else those that were combined last; of this thread's dispatches, or of
        all if it has made none.

        Args:
            required: whether they have to exist still if they were not combined yet.

        Raises:
            ArgumentError: they do not.
        """
        me = threading.current_thread()
        dispatched = next((of_thread for of_thread in self._dispatched if of_thread[0] == me), None)
        if dispatched is None and me not in self._combined and self._dispatched:
            dispatched = self._dispatched[0]
        if dispatched is None:
            combined = self._combined.get(me) or next(reversed(self._combined.values()), None)
            return None if combined is None else combined()
        thread, of_rows = dispatched
        rows = of_rows()
        if required and rows is None:
            raise ArgumentError(
                "expert_tokens: requires no gradients, and out_tokens of the routing's oldest dispatch without a "
                "combine was freed, so its backward, which the other ranks need, cannot run; allowed: values that "
                "depend on out_tokens, such as a slice of 0 rows, out_tokens that live until combine, or "
                "torch.no_grad()"
            )
        self._dispatched.remove(dispatched)
        self._combined.pop(thread, None)
        self._combined[thread] = of_rows
        return rows

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, for operators."""
        own = () if self.expert_ids is None or self.order is None else (self.expert_ids, self.order)
        return [*own, *self.record.tensors()]

    def of(self, tensors: list[torch.Tensor]) -> RoutingHandle:
        """Return the routing of these `tensors()`."""
        return self.engine.handle_of(self.layout, tensors)

    @property
    def shape(self) -> torch.Size:
        """[T, K] of this rank's ids."""
        return self.record.rows.key.shape

    @property
    def num_rows(self) -> torch.Tensor:
        """int32 [1], the rows that this rank receives."""
        return self.record.groups.num_rows

    @property
    def dropped(self) -> torch.Tensor:
        """int64 [], rows of all ranks together beyond max_recv_tokens_per_rank; equal on all ranks."""
        return self.record.groups.overflow[0]

    @property
    def bad_ids(self) -> torch.Tensor:
        """int64 [], ids of all ranks together outside -1 to E - 1; equal on all ranks."""
        return self.record.groups.overflow[1]


class SwitchEngine:
    """The dispatchers of a TokenSwitch; each is made with the first routing or rows that need it.

    Args:
        group, num_experts, overflow, device, transport: as for TokenDispatcher.
        max_tokens: the largest T of any rank.
        rows: R, the rows of each rank's buffer.
        max_token_bytes: the largest H * itemsize.

    Attributes:
        common: a dispatcher with the experts and the largest rows of all the others. It notes overflow, reports errors
            to peers and reserves symmetric buffers, but sends nothing.
        own_experts: the number of this rank's experts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        num_experts: int,
        max_tokens: int,
        rows: int,
        max_token_bytes: int,
        *,
        overflow: OverflowPolicy,
        device: torch.device,
        transport: TransportName | None,
    ) -> None:
        self._group, self._transport = group, transport
        self.rows, self.device, self._most_bytes = rows, device, max_token_bytes
        self._dispatchers: dict[tuple[Any, ...], TokenDispatcher] = {}
        self._options = DispatchOptions(
            capacity=rows, overflow="drop", pooled_buffers=0, zero_rows=True, two_level=False, dedupe=False
        )
        self.common = TokenDispatcher(
            group, num_experts=num_experts, top_k=1, hidden=max(1, max_token_bytes // 4), max_tokens=max_tokens,
            dtype=torch.float32, options=replace(self._options, overflow=overflow), device=device, transport=transport,
        )  # fmt: skip
        config, me = self.common.config, self.common.transfers[0].me
        # Errors name the arguments of TokenSwitch.
        self.common._overflow = Overflow(config, device, "routing", f"max_recv_tokens_per_rank: {rows}")
        self._first_expert, end = config.bounds[me : me + 2]
        self.own_experts = end - self._first_expert
        self._ends = uploaded(np.array(config.bounds[1:], np.int64), device)

    def route(self, topk_idx: torch.Tensor, layout: str) -> tuple[RoutingHandle, torch.Tensor]:
        """Return the handle of a routing, and the pairs that arrive for each own expert, int64 [own_experts].

        Args:
            topk_idx: int32 or int64 [T, K].
            layout: one of LAYOUTS.

        Raises:
            CapacityError, TransportError: as TokenDispatcher.dispatch.
        """

        def run(_: None, saved: bool, topk_idx: torch.Tensor) -> list[torch.Tensor]:
            handle, counts = self._route(topk_idx, layout)
            return [counts, *handle.tensors()]

        def fake(topk_idx: torch.Tensor) -> list[torch.Tensor]:
            transfer = self.common.transfers[0]
            of_layout = self._config(layout, topk_idx.shape[1])
            weights = topk_idx.new_empty(self.rows, dtype=torch.float32)
            record = empty_record(of_layout, transfer.me, len(topk_idx), weights, transfer.in_chunks)
            by_k = [topk_idx.new_empty(self.rows, topk_idx.shape[1], dtype=torch.int64) for _ in range(2)]
            counts = topk_idx.new_empty(self.own_experts, dtype=torch.int64)
            return [counts, *(by_k if layout == "flat" else ()), *record.tensors()]

        counts, *tensors = self.call(DISPATCH, None, run, fake, topk_idx)
        return self.handle_of(layout, tensors), counts

    def handle_of(self, layout: str, tensors: list[torch.Tensor]) -> RoutingHandle:
        """Return the handle with these `RoutingHandle.tensors()`."""
        if layout != "flat":
            return RoutingHandle(self, layout, DispatchRecord.of(tensors))
        expert_ids, order, *of_record = tensors
        return RoutingHandle(self, layout, DispatchRecord.of(of_record), expert_ids, order)

    def call(
        self,
        operator: Any,
        handle: RoutingHandle | None,
        run: Callable[..., list[torch.Tensor]],
        fake: Callable[..., list[torch.Tensor]],
        *tensors: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Return `run(handle, saved, *tensors)`, under dispatch modes as one operator.

        Args:
            operator: of `moe.operations`.
            run: with `saved` it returns memory that nothing else uses.
            fake: `fake(*tensors)` is the same without memory.
        """
        if not under_modes():
            return run(handle, False, *tensors)
        n = len(tensors)

        def seen(given: list[Any], saved: bool) -> list[torch.Tensor]:
            return run(None if handle is None else handle.of(given[n:]), saved, *given[:n])

        given = [*tensors, *(() if handle is None else handle.tensors())]
        x = next(tensor for tensor in given if tensor is not None)
        return seen_by_modes(operator, self.common, seen, lambda given: fake(*given[:n]), given, (x.shape, x.dtype))

    def _route(self, topk_idx: torch.Tensor, layout: str) -> tuple[RoutingHandle, torch.Tensor]:
        flat, unused = layout == "flat", torch.zeros(topk_idx.shape, device=self.device)  # weights of pairs
        if flat:  # rows without a token are zero, which stands for no expert
            given = Tokens((topk_idx + 1).float(), self._ranks_of(topk_idx), unused)
        else:
            given = Tokens(unused[:, :1], topk_idx, unused)
        self.common._overflow.check(LATEST)
        dispatcher = self._router(layout, topk_idx.shape[1])
        ((rows, record),) = dispatcher._run_dispatch([given])
        self.common._overflow.add(record.groups.overflow)
        if not flat:
            return RoutingHandle(self, layout, record), record.groups.counts
        local, none = rows.long() - 1 - self._first_expert, self.own_experts
        local = torch.where((local >= 0) & (local < none), local, none)
        counts = local.new_zeros(none + 1).scatter_add_(0, local.flatten(), torch.ones_like(local).flatten())
        ascending, order = local.sort(dim=1, stable=True)
        return RoutingHandle(self, layout, record, ascending.masked_fill(ascending == none, -1), order), counts[:none]

    def refuse_route(self, error: ArgumentError, topk_idx: Any, layout: str) -> None:
        """Tell peers that this rank refuses the arguments of `route`, as TokenDispatcher.refuse_dispatch does, if they
        tell of which layout and K it is.

        Raises:
            CapacityError: as on all ranks.
        """
        if is_fake():
            return
        self.common._overflow.check(LATEST)
        known = layout in LAYOUTS and isinstance(topk_idx, torch.Tensor) and topk_idx.dim() == 2
        if known and 1 <= topk_idx.shape[1] <= MOST_K:
            dispatcher = self._router(layout, topk_idx.shape[1])
            dispatcher.refuse_dispatch(error, dispatcher.run)
        else:
            self.common._reporting.report(error)

    @contextmanager
    def refusing(self, routing: Any, rows: Any) -> Iterator[None]:
        """A context that reports an ArgumentError of this rank to its peers; `rows`: what they dispatch or combine."""
        try:
            yield
        except ArgumentError as error:
            handle, fits = getattr(routing, "handle", None), isinstance(rows, torch.Tensor) and rows.dim() == 2
            fits = fits and not is_fake()
            if fits and rows.dtype in PAYLOADS and 1 <= rows.shape[1] * rows.itemsize <= self._most_bytes:
                if isinstance(handle, RoutingHandle) and handle.engine is self:
                    self._of(handle, rows)  # peers make this dispatcher as well, in this order
            self.common._reporting.report(error)
            raise

    def _router(self, layout: str, top_k: int) -> TokenDispatcher:
        """Return the dispatcher that makes routings."""
        return self._dispatcher(layout, top_k, top_k if layout == "flat" else 1, torch.float32)

    def dispatch(
        self, handle: RoutingHandle, tokens: torch.Tensor, topk_weights: torch.Tensor, memory: torch.Tensor | None
    ) -> Received:
        """Send tokens, [T, H], and their weights, floats [T, K], to the ranks of their experts.

        Args:
            memory: [R, H] for the rows, contiguous; default: the transport's.
        """
        weights = topk_weights.float()
        given = Tokens(tokens, handle.record.rows.key, weights)  # a known record replaces the ids
        outs = None if memory is None else [(memory, memory.new_empty(len(memory), dtype=torch.float32))]
        ((rows, record),) = self._of(handle, tokens)._run_dispatch([given], outs, [handle.record])
        if handle.expert_ids is None or handle.order is None:
            return rows, record.weights, None
        ((by_k, _),) = self._of(handle, weights)._run_dispatch([given._replace(x=weights)], None, [handle.record])
        return rows, by_k.gather(1, handle.order).masked_fill(handle.expert_ids < 0, 0), handle.expert_ids.clone()

    def dispatch_backward(
        self, handle: RoutingHandle, of_rows: torch.Tensor, of_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of tokens and, if the received weights' are given, of the weights, float32 [T, K].

        Args:
            of_rows: [R, H].
            of_weights: float32, flat [R, K], expert-major [R].
        """
        if of_weights is None or handle.expert_ids is None or handle.order is None:
            dispatcher = self._of(handle, of_rows)
            (sums,) = dispatcher._new_sums([handle.record])
            if of_weights is None:
                dispatcher._run_combine([handle.record], [of_rows], [sums], [None], [None])
                return sums, None
            (weights,) = dispatcher._run_dispatch_backward([handle.record], [of_rows], [of_weights], [sums])
            return sums, weights
        by_k = torch.zeros_like(of_weights).scatter_(1, handle.order, of_weights.masked_fill(handle.expert_ids < 0, 0))
        return self.combine(handle, of_rows), self.combine(handle, by_k)

    def combine(self, handle: RoutingHandle, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Write each token's sum of its rows, [R, H], to `out`, [T, H], by default the transport's memory; return it.

        The elements of a row of `out` are adjacent.
        """
        dispatcher = self._of(handle, values)
        sums = dispatcher._new_sums([handle.record]) if out is None else [out]
        dispatcher._run_combine([handle.record], [values], sums, [None], [None])
        if out is not None:
            note_written(sums)
        return sums[0]

    def combine_backward(self, handle: RoutingHandle, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the values, [R, H], from that of the sums, [T, H]."""
        (rows,), _ = self._of(handle, gradient)._run_combine_backward([handle.record], [gradient], [])
        return rows

    def _of(self, handle: RoutingHandle, x: torch.Tensor) -> TokenDispatcher:
        """Return the dispatcher of rows such as those of `x`."""
        return self._dispatcher(handle.layout, handle.shape[1], x.shape[1], x.dtype)

    def _dispatcher(self, layout: str, top_k: int, hidden: int, dtype: torch.dtype) -> TokenDispatcher:
        """Return a dispatcher; those of one layout and K can use each other's records."""
        key = layout, top_k, hidden, dtype
        if key not in self._dispatchers:
            with binding():  # not on two threads
                if key not in self._dispatchers:
                    self._dispatchers[key] = TokenDispatcher(
                        self._group,
                        **self._sizes(layout, top_k),
                        hidden=hidden,
                        dtype=dtype,
                        options=self._options,
                        device=self.device,
                        transport=self._transport,
                    )
        return self._dispatchers[key]

    def _sizes(self, layout: str, top_k: int) -> dict[str, Any]:
        common = self.common.config
        experts = common.ranks if layout == "flat" else common.num_experts
        return {"num_experts": experts, "top_k": top_k, "max_tokens": common.max_tokens}

    def _config(self, layout: str, top_k: int) -> DispatchConfig:
        """Return the config of the dispatchers, for rows as large as those of `common`."""
        c = self.common.config
        return DispatchConfig.of(
            c.ranks, c.nodes, **self._sizes(layout, top_k), hidden=c.hidden, dtype=c.dtype, options=self._options
        )

    def _ranks_of(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return the rank of each expert, int64 [T, K]. -1: no expert, or the rank of an earlier k; W: a bad id."""
        ids, config = topk_idx.long().contiguous(), self.common.config
        known = (ids >= 0) & (ids < config.num_experts)
        ranks = torch.where(known, torch.bucketize(ids, self._ends, right=True), config.ranks)
        again = (ranks[:, :, None] == ranks[:, None, :]).tril(-1).any(-1)
        return ranks.masked_fill((ids == -1) | (again & known), -1)
