"""MegatronDispatcher: TokenDispatcher as a `MoETokenDispatcher` of Megatron-core 0.19.

Where megatron-core is installed, a subclass of its MoETokenDispatcher; else a class with the same methods.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...errors import ArgumentError, UnsupportedError, shown
from ..executor.call import binding
from ..executor.dispatch_modes import hidden_from_modes
from ..moe.dispatcher import TokenDispatcher
from ..moe.options import DEFAULT_OPTIONS, OF_ROWS, DispatchOptions, refuse_options
from ..moe.routed import RoutedTokens
from ..transports.choose_transport import TransportName


class _Unregistered:
    """What MegatronDispatcher needs of its base class where megatron-core is absent."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        self.config, self.shared_experts = config, None
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.tp_ep_group = pg_collection.tp_ep
        self.tp_size, self.ep_size = (
            1 if g is None else dist.get_world_size(g) for g in (self.tp_group, self.ep_group)
        )


if TYPE_CHECKING:
    _Base = _Unregistered
else:
    try:
        from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher as _Base
    except ModuleNotFoundError as error:
        # Absent, or a version without this module. A megatron-core that fails to import is the caller's to repair.
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        _Base = _Unregistered


@dataclass
class _Pass:
    """What one forward pass of a layer keeps from one method to the next, which Megatron gives tensors only.

    Attributes:
        last: the last method of the pass.
        result: its result, on whose memory the next method gets a tensor.
        shape: of the tokens.
        ids: [T, K], until they are dispatched.
        routed: once they are, until they are combined.
    """

    last: str
    result: torch.Tensor
    shape: torch.Size
    ids: torch.Tensor | None = None
    routed: RoutedTokens | None = None


class MegatronDispatcher(_Base):
    """Dispatch and combine for Megatron-core's MoELayer, with gradients of tokens and probabilities.

    Experts get the rows of their tokens grouped by expert, and the probability of each row, which they apply
    themselves, as Megatron's experts do. With expert tensor parallelism each token goes to all shards of its experts,
    and the sum over shards is part of combine. One host read of the counts for each dispatch, which Megatron's experts
    would make otherwise: they take counts as a list.

    Each thread may be in a forward pass of its own: the methods of one pass are called on one thread, and those of
    another pass of this thread before or after them.

    Args:
        num_local_experts, local_expert_indices, config, pg_collection: as for Megatron's dispatchers. A token has at
            most `config.moe_router_topk` experts.
        max_tokens: the largest number of tokens of any rank and call. Default: that of the first call, which must be
            equal on all ranks.
        options: as for TokenDispatcher, without `expert_map`, `layout`, `payloads`, `quantize` and `scale_layout`.
        device, transport: as for TokenDispatcher; device by default that of the first call. Dtype and hidden size are
            those of the first call.

    Attributes:
        dispatcher: the TokenDispatcher, for `check` and `explain`; None until the first call.

    Raises:
        ArgumentError: experts of this rank that are not consecutive ones in order of ranks.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
        *,
        max_tokens: int | None = None,
        options: DispatchOptions = DEFAULT_OPTIONS,
        device: torch.device | str | None = None,
        transport: TransportName | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        rank = 0 if self.ep_group is None else dist.get_rank(self.ep_group)
        expected = list(range(rank * num_local_experts, (rank + 1) * num_local_experts))
        if list(local_expert_indices) != expected:
            raise ArgumentError(f"local_expert_indices: {shown(local_expert_indices)}; allowed: {expected}")
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        self._max_tokens, self._device, self._transport = max_tokens, device, transport
        refuse_options(options, "expert_map", "layout", *OF_ROWS, why="since Megatron's experts take rows as they are")
        self._options = options
        self.dispatcher: TokenDispatcher | None = None
        self._of_thread = threading.local()

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Refuse shared experts that run beside communication; MoELayer calls this with moe_shared_expert_overlap.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("moe_shared_expert_overlap: True; allowed with MegatronDispatcher: False")

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens, [T, H], and the probabilities of their experts, [T, K], for `token_dispatch`.

        Args:
            hidden_states: [S, B, H] or [T, H].
            routing_map: bool [T, E], the experts of each token.
            probs: floats [T, E].
        """
        shape = hidden_states.shape
        experts = self.num_local_experts * self.ep_size
        if routing_map.shape != probs.shape or routing_map.shape[-1] != experts:
            raise ArgumentError(
                f"routing_map: {tuple(routing_map.shape)} with probs {tuple(probs.shape)}; allowed: both [T, {experts}]"
            )
        # Chosen experts first, ascending; -1 for none.
        k = self.config.moe_router_topk
        ids = routing_map.bool().int().argsort(dim=1, descending=True, stable=True)[:, :k]
        chosen = routing_map.bool().gather(1, ids)
        weights = torch.where(chosen, probs.gather(1, ids), 0.0)
        # Expert e of tensor-parallel shard s is a dispatcher's expert: ranks are ordered by experts, then by shards.
        local = self.num_local_experts
        first = ids // local * (local * self.tp_size) + ids % local
        shards = torch.arange(self.tp_size, device=ids.device) * local
        ids = torch.where(chosen, first, -1)[:, :, None]
        ids = torch.where(ids >= 0, ids + shards, -1).flatten(1)
        weights = weights[:, :, None].expand(-1, -1, self.tp_size).flatten(1)
        self._of_thread.forward = _Pass("dispatch_preprocess", weights, shape, ids)
        return hidden_states.reshape(-1, shape[-1]), weights

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens to the ranks of their experts; return the received rows, [R, H], and their probabilities, [R].

        Raises:
            ArgumentError: `probs` is not that of this thread's last `dispatch_preprocess`.
            ArgumentError, CapacityError, TransportError: as for `TokenDispatcher.dispatch`.
        """
        forward = self._forward("token_dispatch: probs", probs, "dispatch_preprocess")
        assert forward.ids is not None
        routed = self._made_for(hidden_states).dispatch(hidden_states, forward.ids, probs)
        self._of_thread.forward = _Pass("token_dispatch", routed.x, forward.shape, routed=routed)
        return routed.x, routed.weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows of tokens, [N, H], the rows of each expert, int64 [E_local] on the host, and [N]
        probabilities.

        Raises:
            ArgumentError: `hidden_states` are not those of this thread's last `token_dispatch`.
        """
        routed = self._forward("dispatch_postprocess: hidden_states", hidden_states, "token_dispatch").routed
        assert routed is not None
        counts = routed.padded_counts.cpu()
        rows = int(counts.sum())
        return hidden_states[:rows], counts, probs[:rows]

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' output, [N, H], in memory of the dispatcher, [R, H].

        Raises:
            ArgumentError: this thread has dispatched nothing since its last `token_combine`.
        """
        forward: _Pass | None = getattr(self._of_thread, "forward", None)
        if forward is None or forward.routed is None:
            raise ArgumentError(
                "combine_preprocess: nothing has been dispatched; allowed: after token_dispatch, on the same thread"
            )
        output: torch.Tensor = _InBuffer.apply(hidden_states.to(forward.routed.x.dtype), forward.routed)
        forward.last, forward.result = "combine_preprocess", output
        return output

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's rows, [T, H].

        Raises:
            ArgumentError: `hidden_states` are not those of this thread's last `combine_preprocess`.
            ArgumentError, TransportError: as for `TokenDispatcher.combine`.
        """
        forward = self._forward("token_combine: hidden_states", hidden_states, "combine_preprocess")
        assert self.dispatcher is not None and forward.routed is not None
        sums = self.dispatcher.combine(hidden_states, forward.routed, weighted=False)
        self._of_thread.forward = _Pass("token_combine", sums, forward.shape)
        return sums

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sums in the shape that `dispatch_preprocess` got.

        Raises:
            ArgumentError: `hidden_states` are not those of this thread's last `token_combine`.
        """
        shape = self._forward("combine_postprocess: hidden_states", hidden_states, "token_combine").shape
        self._of_thread.forward = None
        return hidden_states.view(shape)

    def _forward(self, what: str, given: torch.Tensor, before: str) -> _Pass:
        """Return this thread's pass, whose next method is given a tensor.

        Raises:
            ArgumentError: the pass that the tensor belongs to is another one: of another thread, or one that a later
                pass of this thread has replaced.
        """
        forward: _Pass | None = getattr(self._of_thread, "forward", None)
        if forward is None or forward.last != before or forward.result.data_ptr() != given.data_ptr():
            raise ArgumentError(
                f"{what}: not of this thread's last {before}; allowed: after {before}, one forward pass of a thread "
                "after the other"
            )
        return forward

    def _made_for(self, x: torch.Tensor) -> TokenDispatcher:
        """Return the dispatcher, which the first call makes."""
        if self.dispatcher is None:
            with binding():  # not on two threads
                self.dispatcher = self.dispatcher or self._new(x)
        return self.dispatcher

    def _new(self, x: torch.Tensor) -> TokenDispatcher:
        return TokenDispatcher(
            self.tp_ep_group,
            num_experts=self.num_local_experts * self.ep_size * self.tp_size,
            top_k=self.config.moe_router_topk * self.tp_size,
            hidden=x.shape[1],
            max_tokens=len(x) if self._max_tokens is None else self._max_tokens,
            dtype=x.dtype,
            options=self._options,
            device=x.device if self._device is None else self._device,
            transport=self._transport,
        )


def use_megatron_dispatchers(
    model: nn.Module,
    *,
    max_tokens: int | None = None,
    options: DispatchOptions = DEFAULT_OPTIONS,
    device: torch.device | str | None = None,
    transport: TransportName | None = None,
) -> int:
    """Give every MoELayer of a Megatron-core model a MegatronDispatcher, in the place of the one of its config; return
    the number of layers.

    Args:
        model: or a part of one, on this rank; before its first forward.
        max_tokens, options, device, transport: as for MegatronDispatcher.

    Raises:
        ArgumentError: a model without such layers.
        UnsupportedError: a layer with moe_shared_expert_overlap.
    """
    layers: list[Any] = [
        m for m in model.modules() if hasattr(m, "token_dispatcher") and hasattr(m, "local_expert_indices")
    ]
    if not layers:
        raise ArgumentError(f"model: {type(model).__name__} without MoELayer; allowed: one with at least one")
    made = []
    for layer in layers:
        before: Any = layer.token_dispatcher
        groups = SimpleNamespace(ep=before.ep_group, expt_tp=before.tp_group, tp_ep=before.tp_ep_group)
        of_layer: Any = (layer.num_local_experts, layer.local_expert_indices, layer.config, groups)
        dispatcher = MegatronDispatcher(
            *of_layer, max_tokens=max_tokens, options=options, device=device, transport=transport
        )
        if before.shared_experts is not None:
            dispatcher.set_shared_experts(before.shared_experts)
        made.append(dispatcher)
    for layer, dispatcher in zip(layers, made, strict=True):
        layer.token_dispatcher = dispatcher
    return len(layers)


class _InBuffer(torch.autograd.Function):
    """([N, H], routed) to [R, H]: a copy of the rows in the dispatcher's output buffer, which combine does not copy."""

    @staticmethod
    @hidden_from_modes
    def forward(ctx: Any, output: torch.Tensor, routed: RoutedTokens) -> torch.Tensor:  # type: ignore[override]
        ctx.rows = len(output)
        buffer = routed.output_buffer()
        buffer[: len(output)].copy_(output)
        return buffer

    @staticmethod
    @hidden_from_modes
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient[: ctx.rows], None
