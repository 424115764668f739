"""TokenSwitch: torch 2.15's interface of expert parallelism, carried out by token dispatchers.

Importing this module needs torch 2.15 or newer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._token_switch as _token_switch  # type: ignore[import-not-found]
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from ....errors import ArgumentError, shown
from ....kernels import has_contiguous_rows
from ...executor.dispatch_modes import below_modes, hidden_from_modes, under_modes
from ...moe.config import MOST_ROWS, whole_number
from ...moe.engine import device_of
from ...moe.operations import COMBINE, COMBINE_BACKWARD, DISPATCH, DISPATCH_BACKWARD
from ...moe.options import OverflowPolicy
from ...transports.choose_transport import TransportName
from .checks import check_expert_tokens, check_layout, check_out, check_outputs, check_tokens, check_topk_idx
from .switch_engine import RoutingHandle, SwitchEngine

if not hasattr(_token_switch.Routing, "layout"):
    raise ImportError("an interface without layouts, as in torch 2.14", name="torch.distributed._token_switch")

MOST_TOKENS, MOST_BYTES = 1 << 24, 1 << 25
Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""out_tokens, out_topk_weights, out_topk_idx."""


class TokenSwitch(_token_switch.TokenSwitch):
    """`torch.distributed._token_switch.TokenSwitch` on any transport of TokenDispatcher, among CPUs too.

    Takes the arguments of torch's `TokenSwitchNCCL`, and the same calls:

        routing = switch.create_routing(topk_idx, counts, layout="expert_major")
        rows, row_weights, _ = switch.dispatch(routing, tokens, topk_weights, max_recv_tokens)
        output = switch.combine(routing, experts(rows, counts) * row_weights[:, None])

    The W ranks have consecutive experts, E // W each; the first E mod W ranks have one more. R is
    max_recv_tokens_per_rank.

    - "flat": one row for each token and rank that has experts of it, in order of source rank and token. Beside the rows
      are weights [R, K] and ids [R, K]: the token's experts on this rank, counted from 0, ascending, and those of one
      id in order of k; then -1 with weight 0. A rank sums up, with the weights, its experts' outputs of a row.
    - "expert_major": one row for each (token, k) pair, grouped by expert without padding, within a group in order of
      source rank, token and k. Beside the rows are weights [R]; ids are None.

    Rows without a token come last and are zero, with weight 0 and ids -1. `combine` returns for each token the float32
    sum over ranks ascending of the sums of its rows there, each rounded to the dtype, without weights. An expert that
    repeats in a token's ids counts each time.

    All ranks construct the same switches in the same order and make the same calls in the same order, backward
    included, with equal layouts, K, H and dtypes, and tensors that all require gradients or all do not. The number of
    tokens T may differ between ranks and may be 0. The first call with a layout, K, H or dtype makes dispatchers, so it
    cannot be captured in a CUDA graph. No device-to-host sync, except in `create_routing`: of the counts where ranks
    exchange messages, and with overflow="raise" for the second routing before. CPU tensors are read on the host. Under
    `torch.compile` the methods break the graph.

    Args:
        process_group: a process group, a 1-D DeviceMesh, or None for the default group.
        num_experts: E.
        max_dispatch_tokens_per_rank: the largest T of any rank.
        max_recv_tokens_per_rank: R, the rows of each rank's receive buffer: tokens in the flat layout, (token, k) pairs
            in the expert-major one.
        max_token_bytes: the largest H * itemsize of tokens and of expert outputs. With transport="symmetric_memory",
            R such rows are reserved.
        overflow: "raise": `check`, or the second create_routing after, raises CapacityError on all ranks if a rank was
            to receive more than R rows, or ids were bad; for the last two routings only `check` does. "drop": rows
            after the first R are dropped, which adds zero to sums and gradients; bad ids act as -1. In both cases
            `routing.handle.dropped` and `routing.handle.bad_ids` are their numbers on the device.
        device: default: the current CUDA device with NCCL, otherwise the CPU.
        transport: as for TokenDispatcher.

    Raises:
        ArgumentError: an argument that is not allowed.
        UnsupportedError: the process group does not support the device; there is no process group.
    """

    @hidden_from_modes
    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None,
        num_experts: int,
        max_dispatch_tokens_per_rank: int,
        max_recv_tokens_per_rank: int,
        max_token_bytes: int,
        *,
        overflow: OverflowPolicy = "raise",
        device: torch.device | str | None = None,
        transport: TransportName | None = None,
    ) -> None:
        mesh = isinstance(process_group, DeviceMesh) and process_group.ndim == 1
        if not (mesh or process_group is None or isinstance(process_group, dist.ProcessGroup)):
            raise ArgumentError(
                f"process_group: {shown(process_group)}; allowed: a process group with this rank, a 1-D DeviceMesh, or "
                "None"
            )
        self._max_dispatch = whole_number("max_dispatch_tokens_per_rank", max_dispatch_tokens_per_rank, 0, MOST_TOKENS)
        # torch's autograd functions read this name.
        self._max_recv_tokens_per_rank = whole_number(
            "max_recv_tokens_per_rank", max_recv_tokens_per_rank, 0, MOST_ROWS
        )
        self._max_token_bytes = whole_number("max_token_bytes", max_token_bytes, 1, MOST_BYTES)
        self._engine = SwitchEngine(
            process_group,
            num_experts,
            self._max_dispatch,
            self._max_recv_tokens_per_rank,
            self._max_token_bytes,
            overflow=overflow,
            device=_default_device(process_group) if device is None else device_of(device),
            transport=transport,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenSwitch:
        """Return the switch itself: copies of a model, such as averaged ones, communicate with the same peers."""
        return self

    @torch.compiler.disable
    def create_routing(
        self,
        topk_idx: torch.Tensor,
        per_expert_token_counts: torch.Tensor | None = None,
        *,
        layout: str,
    ) -> _token_switch.Routing:
        """Exchange where tokens go. The result serves any number of dispatches and combines, in any order.

        Args:
            topk_idx: int32 or int64 [T, K], K at most 32; -1 is none. Not read later.
            per_expert_token_counts: int32 [n], n at least the number of this rank's experts. Its first entries become
                the (token, k) pairs that this rank receives for each of its experts, dropped ones excluded: in the
                expert-major layout the sizes of the groups. Further entries are left as they are.
            layout: "flat" or "expert_major".

        Returns:
            A `torch.distributed._token_switch.Routing`. Its `handle` has `num_rows`, int32 [1], the rows that this rank
            receives, and `dropped` and `bad_ids`, int64 [], the numbers of all ranks together.

        Raises:
            ArgumentError: a value, shape, dtype or device that is not allowed; peers are told, except with device-side
                synchronisation.
            CapacityError: with overflow="raise", an earlier routing dropped rows or had bad ids.
            TransportError: a peer died, timed out, or made another call.
        """
        try:
            check_layout(layout)
            check_topk_idx(self._engine, topk_idx, per_expert_token_counts, self._max_dispatch)
        except ArgumentError as error:
            self._engine.refuse_route(error, topk_idx, layout)
            raise
        # Routings made in inference mode are used outside of it too.
        with torch.inference_mode(False), torch.no_grad():
            handle, counts = self._engine.route(topk_idx, layout)
        if per_expert_token_counts is not None:
            with below_modes():
                per_expert_token_counts[: len(counts)].copy_(counts)
        return _token_switch.Routing(handle=handle, topk_idx=topk_idx, layout=layout)

    @torch.compiler.disable
    def dispatch(
        self,
        routing: _token_switch.Routing,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor,
        max_recv_tokens: int | None = None,
        *,
        out: Outputs | None = None,
    ) -> Outputs:
        """Send tokens to the ranks of their experts.

        Args:
            routing: from this switch.
            tokens: [T, H] of float32, bfloat16 or float16, with any strides. Differentiable.
            topk_weights: floats [T, K], which travel as float32. Differentiable, which those of TokenSwitchNCCL are
                not.
            max_recv_tokens: M, the rows of the results, at least R. Required without `out`, ignored with it.
            out: the three results to write to, with M rows, M at least R: out_topk_weights of any floats, out_topk_idx
                of int64 or int32, either of them None if it is not wanted. They overlap neither each other's memory nor
                that of tokens and topk_weights. No gradients are recorded.

        Returns:
            out_tokens, [M, H] of the dtype of tokens; out_topk_weights of the dtype of topk_weights, flat [M, K],
            expert-major [M]; out_topk_idx, flat int64 [M, K], expert-major None. With `out`: `out`.

        Raises:
            ArgumentError, TransportError: as for `create_routing`.
        """
        least = self._max_recv_tokens_per_rank
        with self._engine.refusing(routing, tokens):
            handle = self._checked(routing)
            check_tokens(handle, tokens, topk_weights, self._max_token_bytes)
            if out is not None:
                check_outputs(handle, tokens, topk_weights, out, least)
            elif max_recv_tokens is None:
                raise ArgumentError(f"max_recv_tokens: None, without out; allowed: the rows of the results, {least} up")
            else:
                max_recv_tokens = whole_number("max_recv_tokens", max_recv_tokens, least, MOST_ROWS)
        if out is None:
            results: Outputs = _Dispatch.apply(self._engine, handle, tokens, topk_weights, max_recv_tokens)
            if results[0].requires_grad:
                handle.add_dispatched(results[0])
            return results
        self._dispatch(routing, tokens, topk_weights, *out)
        return out

    @torch.compiler.disable
    def combine(
        self,
        routing: _token_switch.Routing,
        expert_tokens: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sum of each token's rows of all ranks' `expert_tokens`: [T, H].

        Args:
            routing: from this switch; a dispatch need not precede.
            expert_tokens: [M, H] of float32, bfloat16 or float16, with any strides; any M, and H and dtype need not be
                those of a dispatch. Rows that it lacks are zero, and rows without a token are not read. Differentiable.
                It has to depend on the dispatched rows on each rank, also if none arrive, for their backward to run
                everywhere. If it requires no gradients, as on a rank without experts, the backward of the routing's
                oldest dispatch of this thread without a combine runs, or if each has one, of the last one that was
                combined; on a thread that has dispatched nothing, of all threads' dispatches. So with several
                dispatches of a thread in flight, combine in their order, and keep out_tokens until then.
            out: the result to write to, [T, H] of the dtype of expert_tokens, in other memory. No gradients are
                recorded.

        Raises:
            ArgumentError, TransportError: as for `create_routing`. ArgumentError also on a rank without experts
                whose expert_tokens requires no gradients, if out_tokens of the dispatch that it belongs to was freed.
        """
        with self._engine.refusing(routing, expert_tokens):
            handle = self._checked(routing)
            check_expert_tokens(handle, expert_tokens, self._max_token_bytes)
            if out is not None:
                shape = handle.shape[0], expert_tokens.shape[1]
                read = {"expert_tokens": expert_tokens}
                check_out("out", out, expert_tokens.device, shape, (expert_tokens.dtype,), read)
            tie = None
            if out is None and torch.is_grad_enabled():
                # A rank without experts has nothing to differentiate, but its peers need its backward.
                given = expert_tokens.requires_grad
                rows = handle.rows_to_combine(required=not given and not self._engine.own_experts)
                tie = None if given else rows
        if out is None:
            result: torch.Tensor = _Combine.apply(self._engine, handle, expert_tokens, tie)
            return result
        self._combine(routing, expert_tokens, out)
        return out

    @hidden_from_modes
    def check(self) -> None:
        """Wait for the routings so far.

        Raises:
            CapacityError: with overflow="raise", one of them dropped rows or had bad ids. Each is raised once.
            TransportError: a peer died, timed out, or made another call.
        """
        self._engine.common.check()

    def _alloc_dispatch_outputs(
        self,
        routing: _token_switch.Routing,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor,
        max_recv_tokens: int,
        H: int,
        K: int,
    ) -> Outputs:
        """Return memory for the results of `_dispatch`, which writes all of it."""
        rows = tokens.new_empty(max_recv_tokens, H)
        if routing.layout == "expert_major":
            return rows, topk_weights.new_empty(max_recv_tokens), None
        return rows, topk_weights.new_empty(max_recv_tokens, K), tokens.new_empty(max_recv_tokens, K, dtype=torch.int64)

    def _dispatch(
        self,
        routing: _token_switch.Routing,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor,
        out_tokens: torch.Tensor,
        out_topk_weights: torch.Tensor | None,
        out_topk_idx: torch.Tensor | None,
    ) -> None:
        outs = out_tokens, out_topk_weights, out_topk_idx
        if under_modes():
            dispatched = _dispatched(self._engine, self._checked(routing), tokens, topk_weights, len(out_tokens))
            with below_modes(), torch.no_grad():
                for memory, values in zip(outs, dispatched, strict=False):  # ids in the flat layout only
                    if memory is not None:
                        memory.copy_(values)
            return
        with torch.no_grad():
            memory = out_tokens[: self._max_recv_tokens_per_rank]
            direct = memory if memory.is_contiguous() else None
            results = self._engine.dispatch(self._checked(routing), tokens, topk_weights, direct)
            for out, result, unused in zip(outs, results, (0, 0, -1), strict=True):
                if out is not None and result is not None:
                    if result is not direct:
                        out[: len(result)].copy_(result)
                    out[len(result) :].fill_(unused)

    def _combine(self, routing: _token_switch.Routing, expert_tokens: torch.Tensor, out_tokens: torch.Tensor) -> None:
        if under_modes():
            total = _combined(self._engine, self._checked(routing), expert_tokens)
            with below_modes(), torch.no_grad():
                out_tokens.copy_(total)
            return
        with torch.no_grad():
            writable = has_contiguous_rows(out_tokens)
            sums = out_tokens if writable else torch.empty_like(out_tokens, memory_format=torch.contiguous_format)
            self._engine.combine(
                self._checked(routing), _with_rows(expert_tokens, self._max_recv_tokens_per_rank), sums
            )
            if not writable:
                out_tokens.copy_(sums)

    def _checked(self, routing: object) -> RoutingHandle:
        handle = getattr(routing, "handle", None)
        if not isinstance(handle, RoutingHandle) or handle.engine is not self._engine:
            other = "of another switch" if isinstance(routing, _token_switch.Routing) else shown(routing)
            raise ArgumentError(f"routing: {other}; allowed: a result of this switch's create_routing")
        return handle


class _Dispatch(torch.autograd.Function):
    """(engine, handle, tokens, topk_weights, max_recv_tokens) to the results of TokenSwitch.dispatch.

    Backward keeps the handle, and nothing of [R, H]. It unpacks an empty tensor, so that under activation checkpointing
    it recomputes the layer on each rank: also where nothing else was saved, as on a rank without experts.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        engine: SwitchEngine,
        handle: RoutingHandle,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor,
        max_recv_tokens: int,
    ) -> Outputs:
        ctx.engine, ctx.handle, ctx.weights_dtype = engine, handle, topk_weights.dtype
        ctx.hidden, ctx.dtype = tokens.shape[1], tokens.dtype
        ctx.set_materialize_grads(False)
        with below_modes():
            ctx.save_for_backward(tokens.new_empty(0))
        rows, weights, *ids = _dispatched(engine, handle, tokens, topk_weights, max_recv_tokens)
        ctx.mark_non_differentiable(*ids)
        return rows, weights, ids[0] if ids else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rows: torch.Tensor, of_weights: torch.Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        _ = ctx.saved_tensors
        engine, needed, like, dtype = ctx.engine, ctx.needs_input_grad[3], (ctx.hidden, ctx.dtype), ctx.weights_dtype

        def run(handle: RoutingHandle, saved: bool, *gradients: torch.Tensor | None) -> list[torch.Tensor]:
            rows, weights = gradients
            number, k = engine.rows, () if handle.layout == "expert_major" else (handle.shape[1],)
            unused = handle.record.weights  # where there are no gradients
            rows = unused.new_zeros(number, like[0], dtype=like[1]) if rows is None else rows[:number]
            if needed:
                weights = unused.new_zeros(number, *k) if weights is None else weights[:number].float()
            of_tokens, of_topk = engine.dispatch_backward(handle, rows, weights if needed else None)
            if saved:
                of_tokens = of_tokens.clone()
            return [of_tokens] if of_topk is None else [of_tokens, of_topk.to(dtype)]

        def fake(*_: torch.Tensor | None) -> list[torch.Tensor]:
            unused, (count, k) = ctx.handle.record.weights, ctx.handle.shape
            of_tokens = unused.new_empty(count, like[0], dtype=like[1])
            return [of_tokens, unused.new_empty(count, k, dtype=dtype)] if needed else [of_tokens]

        of_tokens, *of_topk = engine.call(DISPATCH_BACKWARD, ctx.handle, run, fake, of_rows, of_weights)
        return None, None, of_tokens, of_topk[0] if of_topk else None, None


def _dispatched(
    engine: SwitchEngine, handle: RoutingHandle, tokens: torch.Tensor, topk_weights: torch.Tensor, max_recv_tokens: int
) -> list[torch.Tensor]:
    """Return the results of TokenSwitch.dispatch; without ids in the expert-major layout."""
    dtype = topk_weights.dtype

    def run(handle: RoutingHandle, saved: bool, tokens: torch.Tensor, topk_weights: torch.Tensor) -> list[torch.Tensor]:
        memory = tokens.new_empty(engine.rows, tokens.shape[1]) if saved else None
        rows, weights, ids = engine.dispatch(handle, tokens, topk_weights, memory)
        results = [_with_rows(rows, max_recv_tokens), _with_rows(weights.to(dtype), max_recv_tokens)]
        return results if ids is None else [*results, _with_rows(ids, max_recv_tokens, -1)]

    def fake(tokens: torch.Tensor, topk_weights: torch.Tensor) -> list[torch.Tensor]:
        rows = tokens.new_empty(max_recv_tokens, tokens.shape[1])
        if handle.expert_ids is None:
            return [rows, topk_weights.new_empty(max_recv_tokens)]
        weights = topk_weights.new_empty(max_recv_tokens, topk_weights.shape[1])
        return [rows, weights, torch.empty_like(weights, dtype=torch.int64)]

    return engine.call(DISPATCH, handle, run, fake, tokens, topk_weights)


class _Combine(torch.autograd.Function):
    """(engine, handle, expert_tokens, tie) to the result of TokenSwitch.combine. Backward keeps the handle alone.

    `tie`, a result of _Dispatch or None, gets no gradient, but the backward of that dispatch runs.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, engine: SwitchEngine, handle: RoutingHandle, expert_tokens: torch.Tensor, tie: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.engine, ctx.handle, ctx.rows = engine, handle, len(expert_tokens)
        return _combined(engine, handle, expert_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        engine, number = ctx.engine, ctx.rows

        def run(handle: RoutingHandle, saved: bool, gradient: torch.Tensor) -> list[torch.Tensor]:
            rows = _with_rows(engine.combine_backward(handle, gradient), number)
            return [rows.clone() if saved else rows]

        def fake(gradient: torch.Tensor) -> list[torch.Tensor]:
            return [gradient.new_empty(number, gradient.shape[1])]

        return None, None, engine.call(COMBINE_BACKWARD, ctx.handle, run, fake, gradient)[0], None


def _combined(engine: SwitchEngine, handle: RoutingHandle, expert_tokens: torch.Tensor) -> torch.Tensor:
    """Return the result of TokenSwitch.combine."""

    def run(handle: RoutingHandle, saved: bool, expert_tokens: torch.Tensor) -> list[torch.Tensor]:
        out = expert_tokens.new_empty(handle.shape[0], expert_tokens.shape[1]) if saved else None
        return [engine.combine(handle, _with_rows(expert_tokens, engine.rows), out)]

    def fake(expert_tokens: torch.Tensor) -> list[torch.Tensor]:
        return [expert_tokens.new_empty(handle.shape[0], expert_tokens.shape[1])]

    return engine.call(COMBINE, handle, run, fake, expert_tokens)[0]


def _with_rows(x: torch.Tensor, rows: int, value: int = 0) -> torch.Tensor:
    """Return the first `rows` rows of `x`, followed by rows of `value` where it has fewer."""
    if len(x) == rows:
        return x
    return x[:rows] if len(x) > rows else torch.cat((x, x.new_full((rows - len(x), *x.shape[1:]), value)))


def _default_device(group: dist.ProcessGroup | DeviceMesh | None) -> torch.device:
    if isinstance(group, DeviceMesh):
        kind = group.device_type
    else:
        kind = "cuda" if dist.is_initialized() and "nccl" in dist.get_backend_config(group) else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else device_of(kind)
