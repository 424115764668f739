"""VLLMPrepareFinalize: TokenDispatcher as the prepare and finalize steps of vLLM's modular MoE kernel (0.33).

Where vLLM is installed, a subclass of its FusedMoEPrepareAndFinalizeModular; else a class with the same methods.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError, UnsupportedError
from ..moe.dispatcher import TokenDispatcher
from ..moe.options import DEFAULT_OPTIONS, OF_ROWS, DispatchOptions, refuse_options
from ..transports.choose_transport import TransportName


class _Unregistered:
    """What VLLMPrepareFinalize needs of its base class where vLLM is absent."""


@dataclass
class _TokensMetadata:
    """ExpertTokensMetadata where vLLM is absent."""

    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None


class _Formats(Enum):
    """FusedMoEActivationFormat where vLLM is absent."""

    BatchedExperts = ("batched_experts",)


Prepared = tuple[torch.Tensor, None, Any, None, None]
"""Rows, [E_local, C, H]; no scales; the rows of each expert; the caller's ids and weights stay in use."""

_Base: Any = _Unregistered
_Metadata: Any = _TokensMetadata
_Format: Any = _Formats
if not TYPE_CHECKING:
    try:
        from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata as _Metadata
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat as _Format
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEPrepareAndFinalizeModular as _Base
    except ModuleNotFoundError as error:
        # Absent, or a version without this module. A vLLM that fails to import is the caller's to repair.
        if (error.name or "").partition(".")[0] != "vllm":
            raise


class VLLMPrepareFinalize(_Base):  # type: ignore[misc]
    """Dispatch and combine for experts of vLLM's format BatchedExperts, in inference.

    Experts get [E_local, C, H], with C = W * max_num_tokens rows for each expert, and the number of rows of each, as
    with vLLM's DeepEP low-latency kernels. They must leave weights and sums to `finalize`
    (TopKWeightAndReduceDelegate), and take unquantized rows. A rank's tokens may be of any number up to
    `max_num_tokens`; the experts of a token must be distinct.

    `prepare_async` and `finalize_async` exchange before they return: what they return only hands over the result, so
    `supports_async` is False, and vLLM runs shared experts before or after. One microbatch of each thread may be in
    flight.

    Args:
        group: the process group of expert parallelism, on which tensors of `device` can travel; or None for the default
            group. Its ranks have consecutive experts, as with vLLM's placement strategy "linear".
        num_experts, top_k, hidden: E, K, H of the layer; physical experts, if vLLM's EPLB makes replicas.
        max_num_tokens: the largest number of tokens of a rank.
        dtype: of tokens.
        options: as for TokenDispatcher, without `capacity`, `expert_map`, `layout`, `payloads`, `quantize` and
            `scale_layout`. `expert_capacity` may lower C, if the workspace of the experts has as many rows.
        device, transport: as for TokenDispatcher.

    Attributes:
        dispatcher: the TokenDispatcher, for `check` and `explain`.

    Raises:
        ArgumentError, UnsupportedError: as for TokenDispatcher.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_num_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        options: DispatchOptions = DEFAULT_OPTIONS,
        device: torch.device | str = "cuda",
        transport: TransportName | None = None,
    ) -> None:
        super().__init__()
        self._max_num_tokens = max_num_tokens
        refuse_options(
            options, "capacity", "expert_map", "layout", *OF_ROWS,
            why="since vLLM's experts take a batch of unquantized rows for each of consecutive experts",
        )  # fmt: skip
        options = replace(options, layout="batched")
        if options.expert_capacity is None and dist.is_initialized():
            options = replace(options, expert_capacity=dist.get_world_size(group) * max_num_tokens)
        self.dispatcher = TokenDispatcher(
            group,
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens=max_num_tokens,
            dtype=dtype,
            options=options,
            device=device,
            transport=transport,
        )
        self._of_thread = threading.local()
        """`prepared`: the result of the thread's last dispatch until its combine, and its topk_weights."""

    @property
    def activation_format(self) -> Any:
        """BatchedExperts."""
        return _Format.BatchedExperts

    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype of ids: int32; `prepare` takes int64 as well."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """The largest number of tokens of a rank."""
        return self._max_num_tokens

    def num_dispatchers(self) -> int:
        """The number of ranks."""
        return self.dispatcher.config.ranks

    def output_is_reduced(self) -> bool:
        """Whether `finalize` returns sums over all ranks: True."""
        return True

    def supports_async(self) -> bool:
        """Whether work may overlap with `prepare_async` and `finalize_async`: False."""
        return False

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Prepared:
        """Send tokens to the ranks of their experts.

        Args:
            a1: [T, H].
            topk_weights, topk_ids: [T, K]; id -1 is none.
            num_experts: E.
            expert_map: ignored: ranks have consecutive experts.
            apply_router_weight_on_input: multiply tokens by their weights; only with K = 1.
            quant_config: vLLM's; without a `quant_dtype`, or with `defer_input_quant`.
            defer_input_quant: the experts quantize their input.

        Returns:
            As vLLM has it: rows [E_local, C, H], None, the rows of each expert, None, None.

        Raises:
            ArgumentError: another number of experts than that of the dispatcher; as for `TokenDispatcher.dispatch`.
            UnsupportedError: quantized rows; weights on the input with K above 1.
            CapacityError, TransportError: as for `TokenDispatcher.dispatch`.
        """
        config = self.dispatcher.config
        if num_experts != config.num_experts:
            raise ArgumentError(f"num_experts: {num_experts}; allowed: that of the dispatcher, {config.num_experts}")
        quantized = None if quant_config is None else quant_config.quant_dtype
        if quantized is not None and not defer_input_quant:
            raise UnsupportedError(f"quant_config: quant_dtype {quantized}; allowed: experts that quantize their input")
        if apply_router_weight_on_input:
            if config.top_k != 1:
                raise UnsupportedError(
                    f"apply_router_weight_on_input: True with top_k {config.top_k}; allowed: top_k 1"
                )
            a1 = a1 * topk_weights.to(a1.dtype)
        routed = self.dispatcher.dispatch(a1, topk_ids, topk_weights)
        self._of_thread.prepared = routed, topk_weights
        return routed.x, None, _Metadata(routed.counts.int(), None), None, None

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Callable[[], Prepared]:
        """`prepare`; returns a function that returns its result."""
        result = self.prepare(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
            defer_input_quant,
        )  # fmt: skip
        return lambda: result

    def _prepared(self) -> tuple[Any, Any]:
        prepared: tuple[Any, Any] = getattr(self._of_thread, "prepared", (None, None))
        return prepared

    def allocate_fused_expert_output(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, weight_and_reduce_impl: Any
    ) -> torch.Tensor | None:
        """Return memory for the experts' output that `finalize` does not copy, or None if there is none of this shape
        and dtype."""
        routed, _ = self._prepared()
        if routed is None or tuple(shape) != tuple(routed.x.shape) or dtype is not routed.x.dtype:
            return None
        return routed.output_buffer()

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Write the weighted sum of each token's rows to `output`.

        Args:
            output: [T, H].
            fused_expert_output: [E_local, C, H], neither weighted nor summed.
            topk_weights, topk_ids: those of the thread's last `prepare`.
            apply_router_weight_on_input: as for `prepare`.
            weight_and_reduce_impl: a TopKWeightAndReduceDelegate.

        Raises:
            ArgumentError: nothing was prepared on this thread, or with other weights; as for `TokenDispatcher.combine`.
            UnsupportedError: experts that apply weights themselves.
            TransportError: as for `TokenDispatcher.combine`.
        """
        kind = type(weight_and_reduce_impl)
        if all(base.__name__ != "TopKWeightAndReduceDelegate" for base in kind.__mro__):
            raise UnsupportedError(
                f"weight_and_reduce_impl: {kind.__name__}; allowed: TopKWeightAndReduceDelegate, of experts that leave "
                "weights and sums to finalize"
            )
        routed, weights = self._prepared()
        if routed is None:
            raise ArgumentError("finalize: nothing was prepared; allowed: once after each prepare, on the same thread")
        if (weights.data_ptr(), weights.shape) != (topk_weights.data_ptr(), topk_weights.shape):
            raise ArgumentError(
                "finalize: topk_weights: not those of this thread's last prepare; allowed: one microbatch of a thread "
                "after the other"
            )
        self._of_thread.prepared = None, None
        self.dispatcher.combine(fused_expert_output, routed, out=output, weighted=not apply_router_weight_on_input)

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """`finalize`; returns a function that does nothing."""
        self.finalize(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )
        return lambda: None
