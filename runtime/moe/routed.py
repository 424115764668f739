"""RoutedTokens: the result of a dispatch; rows for a rank's experts, and everything that combine needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from ...errors import ArgumentError
from ...kernels import QUANTIZATIONS, block_width, dequantize_rows, on_device, unblocked_scales
from ..executor.dispatch_modes import hidden_from_modes
from .config import DispatchConfig
from .dispatch_record import DispatchRecord
from .engine import engine_of
from .packed_rows import Dequantize
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


@dataclass(eq=False)  # frozen, its constructor would take six times as long
class RoutedTokens:
    """The rows that a rank's experts process. A pytree.

    Rows from `num_rows` on are zero if the dispatcher's `config.zero_rows` is True. Otherwise they are not initialised:
    mask them, never multiply by them.

    Attributes:
        x: [R, H], rows grouped by physical expert, in order of source rank, token and k; padding rows are zero.
            Batched: [S_local, C, H]. Differentiable. With `payloads` or `quantize`: the first payload, not
            differentiable, the elements of a row adjacent and rows a multiple of 16 bytes apart.
        weights: float32 [R] (batched [S_local, C]), each row's weight, 0 for padding; for experts that apply it
            themselves. Differentiable.
        topk_weights: float32 [T, K], a copy of those passed to dispatch.
        grad_rows: with `payloads` or `quantize`, where gradients are recorded: [R, H] (batched [S_local, C, H]) of the
            dispatcher's dtype, without memory and with undefined values. It stands for the rows in autograd: a
            `torch.autograd.Function` that takes it beside `x` and `scale` returns the gradient of the rows for it.
    """

    x: torch.Tensor
    weights: torch.Tensor
    topk_weights: torch.Tensor
    _record: DispatchRecord
    _config: DispatchConfig
    _source: tuple[int, int]
    """The handle of the dispatcher, and the index of the rank."""
    _tokens: torch.Tensor | None = None
    """With save="redispatch": x as passed to dispatch, not a copy."""
    _again: RowsAgain | None = None
    _others: tuple[torch.Tensor, ...] = ()
    """The payloads after the first."""
    grad_rows: torch.Tensor | None = None

    @property
    def payloads(self) -> tuple[torch.Tensor, ...]:
        """All payloads of the rows, [R, ...] each (batched [S_local, C, ...]): `x`, then the others, contiguous."""
        return (self.x, *self._others)

    @property
    def scale(self) -> torch.Tensor | None:
        """The second payload, contiguous; None if there is none. With `quantize`: [R] float32 for "fp8_row", [R, H /
        128] float32 for "fp8_128", [R, H / 32] float8_e8m0fnu for "mxfp8", rounded up (batched [S_local, C, ...]).

        With scale_layout="blocked" it is [N, n], as `torch._scaled_grouped_mm` takes it with `offsets`: n is H / 32
        rounded up to a multiple of 4, and N has room for all groups, each padded to a multiple of 128 rows. From the
        first element on the groups follow one another, in blocks of 128 rows by 4 scales (SwizzleType.SWIZZLE_32_4_4)
        with zeros in the padding. Behind the last group it is as `x` is in rows from `num_rows` on. Batched:
        [S_local, n times C, rounded up to a multiple of 128]."""
        return self._others[0] if self._others else None

    def dequantized(self) -> torch.Tensor:
        """Return the rows in the dispatcher's dtype: `x` times `scale` in float32, rounded once; of the shape of
        `weights` with H elements each. Only with `quantize`.

        Differentiable: the gradient of a row is the gradient of the token's row before it was quantized.

        Raises:
            ArgumentError: the rows were not quantized by dispatch.
        """
        quantize, scale = self._config.quantize, self.scale
        if quantize is None or scale is None:
            raise ArgumentError("dequantized: of a dispatcher without quantize; allowed: rows that dispatch quantized")
        if self._config.scale_layout is not None:
            lead, number = self.weights.shape, QUANTIZATIONS[quantize].scales(self._config.hidden)
            blocks = scale.reshape(-1, block_width(number))
            scale = unblocked_scales(blocks, self.offsets, lead.numel(), number).view(*lead, number)
        if self.grad_rows is None:
            return dequantize_rows(self.x, scale, QUANTIZATIONS[quantize], self._config.dtype)
        return Dequantize.apply(self.grad_rows, self.x, scale, quantize)

    def kept(self) -> AbstractContextManager[Any]:
        """Return a context for the experts in which autograd keeps no more of `x` than the dispatcher's `save` says.

        With save="redispatch" autograd saves no tensor on the memory of `x`, which is freed with this object, `x` and
        their views. With other values the context does nothing.
        """
        if self._again is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._again.pack(self.x), unpack)

    @hidden_from_modes
    def output_buffer(self) -> torch.Tensor:
        """Return memory for the experts' output that `combine` does not copy, where the transport has such memory.

        The shape is that of `weights` with H elements each, the dtype the dispatcher's; without payloads those of `x`.
        The memory is not initialised and requires no gradient. Write the
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
        - Under `torch.compile` it is memory of the graph. No dispatch mode sees this call.

        Raises:
            ArgumentError: the dispatcher was destroyed, or the rank was masked out since.
        """
        shape = *self.weights.shape, self._config.hidden
        if torch.compiler.is_compiling() or isinstance(self.weights, FakeTensor):
            return self.weights.new_empty(shape, dtype=self._config.dtype)
        handle, me = self._source
        transfer = next((t for t in engine_of(handle).transfers if t.me == me), None)
        if transfer is None:
            raise ArgumentError(f"output_buffer: of rank {me}, which is not active; allowed: before set_active_ranks")
        with on_device(transfer.device):
            rows = transfer.output_rows(self.x)[: self.weights.numel()].view(shape)
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
    @hidden_from_modes
    def masked(self) -> torch.Tensor:
        """int64 [], (token, k) pairs of all active ranks together that were dropped because only ranks that are not
        active have their expert (`TokenDispatcher.set_active_ranks`); equal on all active ranks."""
        matrix = self._record.matrix
        if self._config.active_ranks is None:
            return matrix.new_zeros((), dtype=torch.int64)
        _, kept = self._config.active_on(matrix.device)
        return torch.where(kept, 0, matrix).long().sum()

    @hidden_from_modes
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
    further = [routed._tokens] * (routed._tokens is not None) + [*routed._others]
    further += [routed.grad_rows] * (routed.grad_rows is not None)
    parts = [routed.x, routed.weights, routed.topk_weights, *further, *routed._record.tensors()]
    present = routed._tokens is not None, len(routed._others), routed.grad_rows is not None
    return parts, (routed._config, routed._source, routed._again, present)


def _unflatten(parts: Iterable[Any], context: Any) -> RoutedTokens:
    x, weights, topk_weights, *rest = parts
    config, source, again, (has_tokens, others, has_grad_rows) = context
    tokens, rest = (rest[0], rest[1:]) if has_tokens else (None, rest)
    payloads, rest = tuple(rest[:others]), rest[others:]
    grad_rows, record = (rest[0], rest[1:]) if has_grad_rows else (None, rest)
    of_dispatch = DispatchRecord.of(record)
    return RoutedTokens(x, weights, topk_weights, of_dispatch, config, source, tokens, again, payloads, grad_rows)


_pytree.register_pytree_node(RoutedTokens, _flatten, _unflatten)
