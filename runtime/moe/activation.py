"""silu_and_mul: the activation of gated experts over received rows only, not over the whole buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...errors import ArgumentError, shown
from ...kernels import PAYLOADS, contiguous_rows, fill_rows
from ...kernels import silu_and_mul as write_result
from ...kernels import silu_and_mul_backward as write_gradients
from ..executor.dispatch_modes import under_modes
from .config import fill_value
from .routed import RoutedTokens


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, routed: RoutedTokens) -> torch.Tensor:
    """Return silu(gate) * up for the rows of a dispatch, computed in float32 and rounded once. Differentiable.

    Work is bounded by `routed.num_rows`, read on the device. Rows from there on are not read. In the result they are
    zero with `zero_rows=True` and otherwise not initialised, as in `routed.x`; grouped GEMMs such as
    `torch._grouped_mm` never read them. The gradients of `gate` and `up` are zero there, whatever the gradient of the
    result. Padding rows are computed like others: zeros give zeros. Batched buffers have no unused rows.

    Args:
        gate, up: float32, bfloat16 or float16, of one dtype and of shape [R, F] (batched [S_local, C, F]), with the
            dims of `routed.weights` first. Any stride between rows: halves of one tensor are not copied.
        routed: the dispatch of these rows.

    Returns:
        [R, F] (batched [S_local, C, F]), contiguous.

    Raises:
        ArgumentError: unsupported shape, dtype or device.
    """
    if not isinstance(routed, RoutedTokens):
        raise ArgumentError(f"routed: {type(routed).__name__}; allowed: the result of a dispatch")
    rows = routed.weights.shape
    for name, x in (("gate", gate), ("up", up)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{name}: {shown(x)}; allowed: a tensor")
        if x.shape[:-1] != rows or x.shape[-1:] != gate.shape[-1:] or x.dtype not in PAYLOADS:
            raise ArgumentError(
                f"{name}: {x.dtype} of shape {tuple(x.shape)}; allowed: torch.float32, torch.bfloat16 or torch.float16 "
                f"of shape {(*rows, 'F')}, F equal for gate and up"
            )
        if x.dtype is not gate.dtype:
            raise ArgumentError(f"{name}: {x.dtype}; allowed: {gate.dtype}, as gate")
        if x.device != routed.x.device:
            raise ArgumentError(f"{name}: on {x.device}; allowed: {routed.x.device}")
    out: torch.Tensor = SiluAndMul.apply(gate, up, routed.num_rows, routed._config.zero_rows)
    return out


class SiluAndMul(torch.autograd.Function):
    """(gate, up, num_rows int32 [1], DispatchConfig.zero_rows) to silu(gate) * up. Backward keeps the tensors."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, num_rows: torch.Tensor, zero_rows: bool | None
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up, num_rows)
        return (forward_op if _needs_operator() else _forward)(gate, up, num_rows, zero_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        backward = backward_op if _needs_operator() else _backward
        return (*backward(gradient, *ctx.saved_tensors), None, None)


def _needs_operator() -> bool:
    return torch.compiler.is_compiling() or under_modes()


def _new(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _forward(gate: torch.Tensor, up: torch.Tensor, num_rows: torch.Tensor, zero_rows: bool | None) -> torch.Tensor:
    out, rest = _new(gate), fill_value(zero_rows)
    write_result(_rows(gate), _rows(up), num_rows, _rows(out))
    if rest is not None:
        fill_rows(_rows(out), num_rows, rest)
    return out


def _backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, num_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_out, up_out = _new(gate), _new(up)
    write_gradients(_rows(gradient), _rows(gate), _rows(up), num_rows, _rows(gate_out), _rows(up_out))
    return gate_out, up_out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, batched or not, as [R, F]; of contiguous tensors a view."""
    return contiguous_rows(x.flatten(0, -2))


# For dispatch modes, and for `torch.compile`, which cannot trace launchers. Unused calls may be dropped, since they do
# not communicate.
forward_op = torch.library.custom_op("shardweave::silu_and_mul", _forward, mutates_args=())
backward_op = torch.library.custom_op("shardweave::silu_and_mul_backward", _backward, mutates_args=())
forward_op.register_fake(lambda gate, up, num_rows, zero_rows: _new(gate))
backward_op.register_fake(lambda gradient, gate, up, num_rows: (_new(gate), _new(up)))
