"""What dispatch and combine take, checked before anybody is met."""

from __future__ import annotations

import torch

from ...errors import ArgumentError
from ..dtensor.overlap import overlaps_itself
from .config import DispatchLayout
from .routed import RoutedTokens


def check_dispatch(
    layout: DispatchLayout,
    device: torch.device,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    at: str = "",
) -> None:
    """
    Raises:
        ArgumentError: a shape, dtype or device that is not allowed; `at` says of which rank.
    """
    _check_tensors(at, x=x, topk_ids=ids, topk_weights=weights)
    if x.dim() != 2 or x.shape[1] != layout.hidden or x.dtype is not layout.dtype or x.shape[0] > layout.max_tokens:
        raise ArgumentError(
            f"x{at}: {x.dtype} of shape {tuple(x.shape)}; allowed: {layout.dtype} of shape [T, {layout.hidden}], "
            f"T up to max_tokens, {layout.max_tokens}"
        )
    shape = len(x), layout.top_k
    if ids.shape != shape or ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"topk_ids{at}: {ids.dtype} of shape {tuple(ids.shape)}; allowed: int32 or int64 of shape {shape}"
        )
    if weights.shape != shape or not weights.dtype.is_floating_point:
        raise ArgumentError(
            f"topk_weights{at}: {weights.dtype} of shape {tuple(weights.shape)}; allowed: floats of shape {shape}"
        )
    for name, tensor in (("x", x), ("topk_ids", ids), ("topk_weights", weights)):
        _check_device(name + at, tensor, device)


def check_combine(
    layout: DispatchLayout,
    device: torch.device,
    of: tuple[int, int],
    values: torch.Tensor,
    routed: RoutedTokens,
    out: torch.Tensor | None,
    add: torch.Tensor | None,
    at: str = "",
) -> None:
    """
    Args:
        of: the number of the dispatcher, and of the rank.

    Raises:
        ArgumentError: a shape, dtype or device that is not allowed, or a result of another dispatch.
    """
    if not isinstance(routed, RoutedTokens) or routed._of[0] != of[0]:
        raise ArgumentError(f"routed{at}: allowed: what this dispatcher's dispatch returned")
    if routed._of[1] != of[1]:
        raise ArgumentError(f"routed{at}: what rank {routed._of[1]} dispatched; allowed: what rank {of[1]} did")
    _check_tensors(at, expert_output=values)
    _check_device(f"expert_output{at}", values, device)
    if values.shape != routed.x.shape or values.dtype is not layout.dtype:
        raise ArgumentError(
            f"expert_output{at}: {values.dtype} of shape {tuple(values.shape)}; allowed: {layout.dtype} of shape "
            f"{tuple(routed.x.shape)}, that of routed.x"
        )
    shape = len(routed.topk_weights), layout.hidden
    for name, tensor in (("out", out), ("add", add)):
        if tensor is None:
            continue
        _check_device(name + at, tensor, device)
        adjacent = shape[1] <= 1 or tensor.stride(1) == 1
        written_twice = name == "out" and overlaps_itself(tensor)
        if tensor.shape != shape or tensor.dtype is not layout.dtype or not adjacent or written_twice:
            apart = ", each row in a place of its own" if name == "out" else ""
            raise ArgumentError(
                f"{name}{at}: {tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}; allowed: "
                f"{layout.dtype} of shape {shape}, the elements of a row adjacent{apart}"
            )
    needing = (
        values.requires_grad
        or routed.weights.requires_grad
        or routed.topk_weights.requires_grad
        or (add is not None and add.requires_grad)
    )
    if out is not None and torch.is_grad_enabled() and (needing or out.requires_grad):
        raise ArgumentError(f"out{at}: gradients are recorded; allowed: None, or under torch.no_grad()")


def _check_tensors(at: str, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{name}{at}: {value!r}; allowed: a tensor")


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ArgumentError(f"{name}: on {tensor.device}; allowed: {device}")
