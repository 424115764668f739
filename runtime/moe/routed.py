"""RoutedTokens: the result of a dispatch; rows for a rank's experts, and everything that combine needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from ...kernels import on_device
from .config import DispatchConfig
from .dispatch_record import DispatchRecord
from .engine import engine_of
from .redispatch import RowsAgain, unpack


@dataclass(frozen=True)
class TokenLoad:
    """The number of (token, k) pairs of all active ranks by expert and rank; equal on all of them. Dropped pairs count.

    Attributes:
        per_physical_expert: int64 [S], pairs of each physical expert: an expert, or one of its replicas.
        per_expert: int64 [E], pairs of each expert, over all of its replicas.
        per_rank: int64 [W], pairs of each rank.
        imbalance: float32 [], the maximum of per_rank divided by its mean; 1 without tokens.
        per_source: int64 [W, E], pairs of each expert by the rank of their tokens, for `balance_experts`.
    """

    per_physical_expert: torch.Tensor
    per_expert: torch.Tensor
    per_rank: torch.Tensor
    imbalance: torch.Tensor
    per_source: torch.Tensor


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """The rows that a rank's experts process. A pytree.

    Rows from `num_rows` on are zero if the dispatcher's `config.zero_rows` is True. Otherwise they are not initialised:
    mask them, never multiply by them.

    Attributes:
        x: [R, H], rows grouped by physical expert, in order of source rank, token and k; padding rows are zero.
            Batched: [S_local, C, H]. Differentiable.
        weights: float32 [R] (batched [S_local, C]), each row's weight, 0 for padding; for experts that apply it
            themselves. Differentiable.
        topk_weights: float32 [T, K], as passed to dispatch.
    """

    x: torch.Tensor
    weights: torch.Tensor
    topk_weights: torch.Tensor
    _record: DispatchRecord
    _config: DispatchConfig
    _source: tuple[int, int]
    """The handle of the dispatcher, and the index of the rank."""
    _tokens: torch.Tensor | None = None
    """With save="redispatch": x as passed to dispatch."""
    _again: RowsAgain | None = None

    def kept(self) -> AbstractContextManager[Any]:
        """Return a context for the experts in which autograd keeps no more of `x` than the dispatcher's `save` says.

        With save="redispatch" autograd saves no tensor on the memory of `x`, which is freed with this object, `x` and
        their views. With other values the context does nothing.
        """
        if self._again is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._again.pack(self.x), unpack)

    def output_buffer(self) -> torch.Tensor:
        """Return memory for the experts' output that `combine` does not copy, where the transport has such memory.

        The shape, dtype and device are those of `x`; the memory is not initialised and requires no gradient. Write the
        output to it once, then pass this tensor itself to `combine`:

            out = routed.output_buffer()
            grouped_gemm(h, w2, routed.offsets, out=out)  # a kernel of yours
            y = dispatcher.combine(out, routed)

        Where gradients are recorded, torch refuses `out=`: write within the forward of a `torch.autograd.Function`, or
        in place, such as `out.copy_(output)`, which costs the copy.

        - Peers read the memory after `combine` has returned. Do not write to it from then on: ask for another buffer,
          which is free of readers.
        - Parts of it, transposed views and results computed from it are values like any others: `combine` copies them.
          So it does with batched outputs of ranks that have fewer physical experts than others.
        - With transport="symmetric_memory" it is one of the `pooled_buffers`, in use until the last tensor on it is
          gone, and while peers read it: in training with weighted=True until backward. If all are in use it is ordinary
          memory, which `combine` copies; `shardweave.stats().copies` counts both. With "shared_memory" it is always
          memory that peers read. Other transports send copies of rows anyway.
        - With `pooled_buffers=1`, the default, `x` itself has the only buffer, so there is none for the output: set 2.
          The window that rows are copied to otherwise cannot be lent: until `combine` waits for its peers, they may
          still read in it what the last one offered.
        - In the capture of a CUDA graph it is such a buffer only if the dispatch was captured, too: replays write the
          same memory each time, and it is the dispatch that waits until peers have read it. A graph of experts and
          `combine` alone copies, from buffers that were lent before the capture as well. Replay the graph that has the
          dispatch before each replay of another one with its experts.
        - Under `torch.compile` it is memory of the graph.

        Raises:
            ArgumentError: the dispatcher was destroyed.
        """
        if torch.compiler.is_compiling():
            return torch.empty_like(self.x, requires_grad=False)
        handle, me = self._source
        transfer = next(t for t in engine_of(handle).transfers if t.me == me)
        with on_device(transfer.device):
            rows = transfer.output_rows(self.x)[: self.x.shape[:-1].numel()].view(self.x.shape)
        return rows.detach()  # not a view: functions may write it in place

    @property
    def offsets(self) -> torch.Tensor:
        """int32 [S_local], the end of each group, padding included, as `torch._grouped_mm` takes them."""
        return self._record.groups.offsets

    @property
    def counts(self) -> torch.Tensor:
        """int64 [S_local], rows of each group."""
        return self._record.groups.counts

    @property
    def padded_counts(self) -> torch.Tensor:
        """int64 [S_local], rows of each group, padding included."""
        return self._record.groups.padded_counts

    @property
    def num_rows(self) -> torch.Tensor:
        """int32 [1], the end of the last group."""
        return self._record.groups.num_rows

    @property
    def dropped(self) -> torch.Tensor:
        """int64 [], rows of all ranks together that exceeded a capacity; equal on all ranks."""
        return self._record.groups.overflow[0]

    @property
    def bad_ids(self) -> torch.Tensor:
        """int64 [], ids of all ranks together outside -1 to E - 1; equal on all ranks."""
        return self._record.groups.overflow[1]

    @property
    def masked(self) -> torch.Tensor:
        """int64 [], (token, k) pairs of all active ranks together that were dropped because only ranks that are not
        active have their expert (`TokenDispatcher.set_active_ranks`); equal on all active ranks."""
        matrix = self._record.matrix
        if self._config.active_ranks is None:
            return matrix.new_zeros((), dtype=torch.int64)
        _, kept = self._config.active_on(matrix.device)
        return torch.where(kept, 0, matrix).long().sum()

    def load(self) -> TokenLoad:
        """Return the distribution of this dispatch's pairs. Neither communicates nor synchronises."""
        per_source = self._record.matrix[:, :-1].long()
        per_physical_expert, experts = per_source.sum(0), self._config.experts_on(per_source.device)
        if experts is not None:
            shape = self._config.ranks, self._config.num_experts
            per_source = per_source.new_zeros(shape).index_add_(1, experts, per_source)
        per_expert = per_source.sum(0)
        running = torch.nn.functional.pad(per_physical_expert.cumsum(0), (1, 0))
        bounds = self._config.bounds
        per_rank = torch.stack([running[b] - running[a] for a, b in zip(bounds, bounds[1:], strict=False)])
        mean = per_rank.sum() / self._config.ranks
        imbalance = torch.where(mean > 0, per_rank.amax() / mean, 1.0)
        return TokenLoad(per_physical_expert, per_expert, per_rank, imbalance, per_source)


def _flatten(routed: RoutedTokens) -> tuple[list[Any], Any]:
    parts = [routed.x, routed.weights, routed.topk_weights, *routed._record.tensors()]
    if routed._tokens is None:
        return parts, (routed._config, routed._source, None)
    return [*parts, routed._tokens], (routed._config, routed._source, routed._again)


def _unflatten(parts: Iterable[Any], context: Any) -> RoutedTokens:
    x, weights, topk_weights, *record = parts
    config, source, again = context
    if again is None:
        return RoutedTokens(x, weights, topk_weights, DispatchRecord.of(record), config, source)
    return RoutedTokens(x, weights, topk_weights, DispatchRecord.of(record[:-1]), config, source, record[-1], again)


_pytree.register_pytree_node(RoutedTokens, _flatten, _unflatten)
