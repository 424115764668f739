"""Checks of the arguments of TokenSwitch, before any communication. All raise ArgumentError."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ....errors import ArgumentError, shown
from ....kernels import MOST_K, PAYLOADS
from ...dtensor.overlap import overlaps_itself
from ...moe.check_calls import FLOATS, check_memory, check_writable
from .switch_engine import LAYOUTS, RoutingHandle, SwitchEngine

INTEGERS = (torch.int64, torch.int32)


def check_layout(layout: object) -> None:
    """Check the name of a layout."""
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout: {shown(layout)}; allowed: {', '.join(map(repr, LAYOUTS))}")


def check_topk_idx(engine: SwitchEngine, ids: torch.Tensor, counts: torch.Tensor | None, max_tokens: int) -> None:
    """Check the tensors of create_routing."""
    _check(
        "topk_idx",
        ids,
        engine.device,
        lambda: ids.dim() == 2 and len(ids) <= max_tokens and 1 <= ids.shape[1] <= MOST_K and ids.dtype in INTEGERS,
        f"int32 or int64 of shape [T, K], T up to max_dispatch_tokens_per_rank, {max_tokens}, K 1 to {MOST_K}",
    )
    if counts is not None:
        _check(
            "per_expert_token_counts",
            counts,
            engine.device,
            lambda: (
                counts.dim() == 1
                and len(counts) >= engine.own_experts
                and counts.dtype is torch.int32
                and not overlaps_itself(counts)
            ),
            f"int32 of shape [n], n at least {engine.own_experts}, the experts of this rank, without overlap",
        )
        check_writable("per_expert_token_counts", counts, {})


def check_tokens(handle: RoutingHandle, tokens: torch.Tensor, topk_weights: torch.Tensor, max_bytes: int) -> None:
    """Check the inputs of dispatch."""
    count, shape = handle.shape[0], tuple(handle.shape)
    _check(
        "tokens",
        tokens,
        handle.engine.device,
        lambda: _is_payload(tokens, max_bytes) and len(tokens) == count,
        f"{_payload(max_bytes)} of shape [{count}, H], a row for each of topk_idx",
    )
    _check(
        "topk_weights",
        topk_weights,
        handle.engine.device,
        lambda: topk_weights.shape == shape and topk_weights.dtype in FLOATS,
        f"{_names(FLOATS)} of shape {shape}, that of topk_idx",
    )


def check_expert_tokens(handle: RoutingHandle, values: torch.Tensor, max_bytes: int) -> None:
    """Check the input of combine."""
    _check(
        "expert_tokens",
        values,
        handle.engine.device,
        lambda: _is_payload(values, max_bytes),
        f"{_payload(max_bytes)} of shape [M, H]",
    )


def check_outputs(
    handle: RoutingHandle, tokens: torch.Tensor, topk_weights: torch.Tensor, out: object, least: int
) -> None:
    """Check `out` of dispatch, whose tensors have at least `least` rows."""
    if not isinstance(out, tuple | list) or len(out) != 3:
        given = f"{len(out)} of them" if isinstance(out, tuple | list) else type(out).__name__
        raise ArgumentError(f"out: {given}; allowed: (out_tokens, out_topk_weights, out_topk_idx)")
    rows, weights, ids = out
    device, flat = handle.engine.device, handle.layout == "flat"
    others = {"tokens": tokens, "topk_weights": topk_weights}
    check_out("out[0]", rows, device, (None, tokens.shape[1]), (tokens.dtype,), others)
    others["out[0]"] = rows
    if len(rows) < least:
        raise ArgumentError(f"out[0]: {len(rows)} rows; allowed: at least max_recv_tokens_per_rank, {least}")
    shape = (len(rows), handle.shape[1]) if flat else (len(rows),)
    if weights is not None:
        check_out("out[1]", weights, device, shape, FLOATS, others)
        others["out[1]"] = weights
    if ids is not None and not flat:
        raise ArgumentError(f"out[2]: a {type(ids).__name__}; allowed in the expert-major layout: None")
    if ids is not None:
        check_out("out[2]", ids, device, shape, INTEGERS, others)


def check_out(
    name: str,
    out: torch.Tensor,
    device: torch.device,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    others: Mapping[str, torch.Tensor],
) -> None:
    """Check a tensor to write to, apart from `others`, by name. None in `shape`: any size."""
    sizes = ", ".join("M" if size is None else str(size) for size in shape)
    _check(
        name,
        out,
        device,
        lambda: (
            out.dim() == len(shape)
            and all(size in (None, given) for size, given in zip(shape, out.shape, strict=True))
            and out.dtype in dtypes
            and not overlaps_itself(out)
        ),
        f"{_names(dtypes)} of shape [{sizes}], without overlap",
    )
    check_writable(name, out, others)


def _check(name: str, x: object, device: torch.device, fits: Callable[[], bool], allowed: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name}: {shown(x)}; allowed: {allowed}")
    check_memory(name, x)
    if x.device != device:
        raise ArgumentError(f"{name}: on {x.device}; allowed: {device}")
    if not fits():
        raise ArgumentError(f"{name}: {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}; allowed: {allowed}")


def _is_payload(x: torch.Tensor, max_bytes: int) -> bool:
    return x.dim() == 2 and x.dtype in PAYLOADS and 1 <= x.shape[1] * x.itemsize <= max_bytes


def _payload(max_bytes: int) -> str:
    return f"{_names(PAYLOADS)}, with rows of 1 to {max_bytes} bytes (max_token_bytes),"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
