"""TokenEngine: the ranks of a token dispatcher in this process, one or all virtual ones, and their runs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ...errors import ArgumentError
from ...kernels import contiguous_rows, on_device
from ..executor.dispatch_modes import hidden_from_modes
from ..transports.base import Transport
from .config import DispatchConfig
from .dispatch_record import DispatchRecord, Tokens
from .overflow import LATEST, Overflow
from .pending import StartedCalls
from .report import explain
from .transfer.base import BACKWARD, COMBINE, DISPATCH, UNDISPATCH, Steps, TokenTransfer
from .transfer.levels import alternatives

Received = tuple[torch.Tensor, DispatchRecord]
"""The rows that a rank received, [rows, H], and the record of the dispatch."""

_engines: weakref.WeakValueDictionary[int, TokenEngine] = weakref.WeakValueDictionary()
_handles = itertools.count()
_states: weakref.WeakKeyDictionary[Transport, OperatorState] = weakref.WeakKeyDictionary()


class OperatorState:
    """What the operators of a transport's dispatchers declare as mutated, so that compilers keep them and their order.

    Attributes:
        tensor: int64 [1], never written. Each run of an operator replaces it, so that each run of a compiled graph has
            its own, with its own version: autograd saves the input for backward, which raises if the version is
            another one then. Other graphs of the transport may run in between.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.zeros(1, dtype=torch.int64, device=device)

    def renew(self) -> None:
        """Replace the tensor by one on the same memory with a version of its own."""
        self.tensor = self.tensor.data


class TokenEngine:
    """Runs operations of all ranks in this process. Arguments and results are lists with one item per rank.

    What the methods return may be memory of the transport.

    Attributes:
        handle: the number by which operators find this object.
        state: what operators declare as mutated, common to all dispatchers of a transport.
        started: the dispatches and combines that have started and may not be finished.
        group_name: of the process group; empty for virtual ranks.
    """

    group_name = ""

    def __init__(self, config: DispatchConfig, transfers: Sequence[TokenTransfer], name: str, why: str = "") -> None:
        self.config, self.transfers, self.name, self.why = config, transfers, name, why
        transport, device = transfers[0].transport, transfers[0].device
        self._overflow = Overflow(
            config, device, "dispatch",
            f"capacity: {config.rows} rows per rank, expert_capacity: {config.expert_capacity}, "
            f"chunk_capacity: {config.chunk_capacity}",
        )  # fmt: skip
        self.started = StartedCalls()
        self.handle = next(_handles)
        _engines[self.handle] = self
        self.state = _state_of(transport, device)
        config.experts_on(device)  # for `load`, which may be captured in a CUDA graph

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenEngine:
        """Return the dispatcher itself: copies of a model, such as averaged ones, communicate with the same peers."""
        return self

    def run(self, operation: int, runs: Sequence[Steps[Any]]) -> list[Any]:
        """Carry out one run of each rank, of one of `transfer.OPERATIONS`; return their results."""
        raise NotImplementedError

    def start(
        self, operation: int, runs: Sequence[Steps[Any]], given: Iterable[torch.Tensor]
    ) -> Callable[[], list[Any]]:
        """Start one run of each rank, which use the tensors `given`; return a function that waits for their results.
        Virtual ranks run at once, since they have nobody to wait for."""
        results = self.run(operation, runs)
        return lambda: results

    @hidden_from_modes
    def check(self) -> None:
        """Wait for the dispatches so far.

        Raises:
            CapacityError: with overflow="raise", one of them dropped rows or had bad ids. Each is raised once.
        """
        with on_device(self.transfers[0].device):
            self.started.note(self._overflow)
            self._overflow.check(0)

    @hidden_from_modes
    def _use_config(self, config: DispatchConfig) -> None:
        """Use another config from now on, which differs in the experts of physical experts or the active ranks only.
        Dispatches so far keep theirs."""
        with torch.inference_mode(False), on_device(self.transfers[0].device):
            for transfer in self.transfers:
                transfer.use_config(config)
            config.experts_on(self.transfers[0].device)
        self.config = config

    def explain(self) -> str:
        """Return the settings, and the memory and the bytes on the wire of each rank, as text."""
        text = explain(self.config, alternatives(self.transfers[0]), self.name)
        return f"{text}\n  {self.why}" if self.why else text

    def _run_dispatch(
        self,
        tokens: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        outs: Sequence[tuple[torch.Tensor, ...]] | None = None,
        known: Sequence[DispatchRecord] | None = None,
    ) -> list[Received]:
        """Send tokens to their destinations.

        Args:
            tokens: of each rank, as `Tokens`.
            outs: of each rank memory for copies of the rows and of their weights, as for `TokenTransfer.dispatch`.
                Default: new memory with save="copy", otherwise the result is memory of the transport.
            known: the records of an earlier dispatch of the same ids, whose overflow has been noted.
        """
        with on_device(self.transfers[0].device):
            items = [Tokens(self._rows_of(x), ids, weights) for x, ids, weights in in_memory(*tokens)]
            received: list[Received] = self.run(DISPATCH, self._dispatches(items, outs, known))
            if self.started.overflows:
                self.started.note(self._overflow)  # they were before this one
            if known is None:
                self._overflow.add(received[0][1].groups.overflow)
            return received

    def _start_dispatch(
        self, tokens: Sequence[Tokens], outs: Sequence[tuple[torch.Tensor, ...]] | None = None
    ) -> Callable[[], list[Received]]:
        """Start to send tokens to their destinations; return a function that waits for what the ranks receive.

        Args:
            outs: as for `_run_dispatch`.
        """
        with on_device(self.transfers[0].device):
            tokens = [Tokens(self._rows_of(x), ids, weights) for x, ids, weights in in_memory(*tokens)]
            if outs is None and self.config.save == "copy":
                outs = self._new_copies(tokens)
            given = [x for items in (tokens, outs or ()) for item in items for x in item]
            wait = self.start(DISPATCH, self._dispatches(tokens, outs, None), given)

        def overflow() -> torch.Tensor:
            received: list[Received] = wait()
            return received[0][1].groups.overflow

        def finish() -> list[Received]:
            received: list[Received] = wait()
            self.started.note(self._overflow, overflow)
            return received

        if self.config.overflow == "raise":
            self.started.add_overflow(overflow)
        return finish

    def _dispatches(
        self,
        tokens: Sequence[Tokens],
        outs: Sequence[tuple[torch.Tensor, ...]] | None,
        known: Sequence[DispatchRecord] | None,
    ) -> list[Steps[Received]]:
        self._overflow.check(LATEST)
        if outs is None and self.config.save == "copy":
            outs = self._new_copies(tokens)
        copies: Sequence[Any] = [None] * len(tokens) if outs is None else outs
        records: Sequence[Any] = [None] * len(tokens) if known is None else known
        items = zip(self.transfers, tokens, copies, records, strict=True)
        return [transfer.dispatch(item, out, record) for transfer, item, out, record in items]

    def _run_combine(
        self,
        records: Sequence[DispatchRecord],
        values: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | None],
        adds: Sequence[torch.Tensor | None],
    ) -> None:
        """Write each token's sum to `outs`, [T, H]; without weights, the sum of its rows as they are."""
        with on_device(self.transfers[0].device):
            self.run(COMBINE, self._combines(records, values, outs, weights, adds))

    def _start_combine(
        self,
        records: Sequence[DispatchRecord],
        values: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | None],
        adds: Sequence[torch.Tensor | None],
    ) -> Callable[[], object]:
        """Start to write each token's sum to `outs`; return a function that waits until they are written."""
        with on_device(self.transfers[0].device):
            given = [x for record in records for x in record.tensors() if x.device == self.transfers[0].device]
            given += [x for x in (*values, *outs, *weights, *adds) if x is not None]
            return self.start(COMBINE, self._combines(records, values, outs, weights, adds), given)

    def _combines(
        self,
        records: Sequence[DispatchRecord],
        values: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | None],
        adds: Sequence[torch.Tensor | None],
    ) -> list[Steps[Any]]:
        values, weights, adds = in_memory(values, weights, adds)
        items = zip(self.transfers, records, values, outs, weights, adds, strict=True)
        return [
            t.combine(r, v, out, w, None if add is None else contiguous_rows(add)) for t, r, v, out, w, add in items
        ]

    def _run_dispatch_backward(
        self,
        records: Sequence[DispatchRecord],
        gradients: Sequence[torch.Tensor],
        weight_gradients: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Write the gradients of x to `outs`, [T, H], and return those of the weights, float32 [T, K].

        Args:
            gradients: [rows, H], of the received rows.
            weight_gradients: float32 [rows], of the received weights.
        """
        gradients, weight_gradients = in_memory(gradients, weight_gradients)
        items = zip(self.transfers, records, gradients, weight_gradients, outs, strict=True)
        runs = [t.combine(r, g.contiguous(), out, None, None, w.contiguous()) for t, r, g, w, out in items]
        with on_device(self.transfers[0].device):
            return self.run(UNDISPATCH, runs)

    def _run_combine_backward(
        self,
        records: Sequence[DispatchRecord],
        gradients: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None = None,
        weight_outs: Sequence[torch.Tensor] | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients of the values, [rows, H], and those of the rows' weights, float32 [rows].

        Args:
            gradients: [T, H], of the sums.
            values: the combined values; empty: they were not weighted, and there are no gradients of weights.
            outs: memory for copies of the first gradients.
            weight_outs: memory for the second ones.
        """
        nothing: list[Any] = [None] * len(gradients)
        gradients, values = in_memory(gradients, values)
        given = [v.contiguous() for v in values] or nothing
        items = zip(self.transfers, records, gradients, given, outs or nothing, weight_outs or nothing, strict=True)
        with on_device(self.transfers[0].device):
            results = self.run(
                BACKWARD, [t.combine_backward(r, contiguous_rows(g), *others) for t, r, g, *others in items]
            )
        return [rows for rows, _ in results], [weights for _, weights in results] if values else []

    def _new_received(self, tokens: Sequence[Tokens]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return memory for received rows, [rows, H], and for their weights, float32 [rows]."""
        rows, (elements, dtype) = self.config.rows, self.config.dispatched
        return [(t.x.new_empty(rows, elements, dtype=dtype), t.x.new_empty(rows, dtype=torch.float32)) for t in tokens]

    def _new_copies(self, tokens: Sequence[Tokens]) -> list[tuple[torch.Tensor, ...]]:
        """Return `_new_received`, and memory for scales where they are copied out on the way."""
        scales = [t.new_scale() for t in self.transfers]
        received = zip(self._new_received(tokens), scales, strict=True)
        return [of_rank if scale is None else (*of_rank, scale) for of_rank, scale in received]

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows that a dispatch of `x` sends."""
        quantized, packed = self.config.quantized, self.config.packed
        if quantized is None or packed is None or self.transfers[0].pushed_quantized is not None:
            return contiguous_rows(x)
        return quantized.rows_of(contiguous_rows(x), packed.words)

    def _new_sums(self, records: Sequence[DispatchRecord]) -> list[torch.Tensor]:
        """Return memory of the transport for each rank's tokens, [T, H]."""
        c = self.config
        return [
            t.transport.empty((r.rows.key.shape[0], c.hidden), c.dtype, t.device)
            for t, r in zip(self.transfers, records, strict=True)
        ]


def in_memory(*groups: Sequence[Any]) -> Sequence[Sequence[Any]]:
    """Return the tensors so that their memory holds their values; None stays. Those of an `AsyncCollectiveTensor` are
    in the tensor that it waits for; one with the negative bit is copied."""
    for tensors in groups:
        for x in tensors:
            if x is not None and (isinstance(x, AsyncCollectiveTensor) or x.is_neg()):
                return [[_resolved(x) for x in tensors] for tensors in groups]
    return groups


def _resolved(x: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(x, AsyncCollectiveTensor):
        x = x.wait()
    return None if x is None else x.resolve_neg()


def engine_of(handle: int) -> TokenEngine:
    """Return the engine of a handle.

    Raises:
        ArgumentError: it was destroyed.
    """
    engine = _engines.get(handle)
    if engine is None:
        raise ArgumentError(f"token dispatcher {handle}: destroyed; allowed: one that is kept until backward has run")
    return engine


def device_of(device: torch.device | str) -> torch.device:
    """Return the device as tensors report it: with the current index if it has none."""
    return torch.empty(0, device=device).device


def _state_of(transport: Transport, device: torch.device) -> OperatorState:
    """Return the state that all dispatchers of a transport have in common."""
    if transport not in _states:
        _states[transport] = OperatorState(device)
    return _states[transport]
