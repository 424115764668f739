"""Checks of the arguments of dispatch and combine, before any communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from ...errors import ArgumentError, shown
from ...kernels import has_contiguous_rows
from ..dtensor.overlap import overlaps_itself, ranges_overlap
from ..executor.dispatch_modes import below_modes
from .config import DispatchConfig
from .dispatch_record import Tokens
from .routed import RoutedTokens

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of topk_weights."""


def check_dispatch(config: DispatchConfig, device: torch.device, tokens: Tokens, at: str = "") -> None:
    """Check the arguments of dispatch on one rank.

    Args:
        at: a suffix of argument names in errors, such as "[1]" for rank 1.

    Raises:
        ArgumentError: unsupported shape, dtype or device.
    """
    x, ids, weights = tokens
    _check_tensors(at, x=x, topk_ids=ids, topk_weights=weights)
    if config.payloads is not None:
        if len(x) > config.max_tokens:
            raise ArgumentError(f"x{at}: {len(x)} tokens; allowed: up to max_tokens, {config.max_tokens}")
    elif x.dim() != 2 or x.shape[1] != config.hidden or x.dtype is not config.dtype or x.shape[0] > config.max_tokens:
        raise ArgumentError(
            f"x{at}: {x.dtype} of shape {tuple(x.shape)}; allowed: {config.dtype} of shape [T, {config.hidden}], "
            f"T up to max_tokens, {config.max_tokens}"
        )
    shape = x.shape[0], config.top_k
    if ids.shape != shape or ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"topk_ids{at}: {ids.dtype} of shape {tuple(ids.shape)}; allowed: int32 or int64 of shape {shape}"
        )
    if weights.shape != shape or weights.dtype not in FLOATS:
        raise ArgumentError(
            f"topk_weights{at}: {weights.dtype} of shape {tuple(weights.shape)}; allowed: "
            f"{', '.join(map(str, FLOATS))} of shape {shape}"
        )
    if not x.device == ids.device == weights.device == device:
        for name, tensor in (("x", x), ("topk_ids", ids), ("topk_weights", weights)):
            _check_device(name + at, tensor, device)


def packed_tokens(
    config: DispatchConfig, device: torch.device, x: Any, scale: torch.Tensor | None, at: str = ""
) -> torch.Tensor:
    """Return the rows of a dispatch's payloads: x itself, unless the dispatcher has `payloads`.

    Args:
        x: a tensor, or with `payloads` a sequence of them.
        scale: the payload after those of `x`.
        at: as for `check_dispatch`, which is to follow.

    Raises:
        ArgumentError: not the payloads of the dispatcher.
    """
    if config.payloads is None:
        if scale is not None or not isinstance(x, torch.Tensor):
            given = f"{len(x)} payloads" if isinstance(x, Sequence) else shown(x)
            raise ArgumentError(
                f"x{at}: {given}{' and scale' if scale is not None else ''}; allowed: one tensor; for others construct "
                "the dispatcher with options=DispatchOptions(payloads=…)"
            )
        return x
    assert config.packed is not None
    payloads: list[Any] = [*x] if isinstance(x, list | tuple) else [x]
    payloads += [] if scale is None else [scale]
    if len(payloads) != len(config.packed.dtypes):
        raise ArgumentError(f"x{at}: {len(payloads)} payloads; allowed: {len(config.packed.dtypes)}, as in payloads=")
    for i, (payload, dtype, shape) in enumerate(zip(payloads, config.packed.dtypes, config.packed.shapes, strict=True)):
        name = f"payloads[{i}]{at}"
        _check_tensors("", **{name: payload})
        tokens = len(payloads[0]) if i else "T"
        wrong = payload.dim() == 0 or (i > 0 and len(payload) != tokens)
        if wrong or payload.dtype is not dtype or tuple(payload.shape[1:]) != shape:
            allowed = ", ".join(map(str, (tokens, *shape)))
            raise ArgumentError(
                f"{name}: {payload.dtype} of shape {tuple(payload.shape)}; allowed: {dtype} of shape [{allowed}]"
            )
        _check_device(name, payload, device)
    with below_modes():
        return config.packed.pack(payloads)


def check_combine(
    config: DispatchConfig,
    device: torch.device,
    source: tuple[int, int],
    values: torch.Tensor,
    routed: RoutedTokens,
    out: torch.Tensor | None,
    add: torch.Tensor | None,
    weighted: bool,
    at: str = "",
) -> None:
    """Check the arguments of combine on one rank.

    Args:
        source: the handle of the dispatcher and the index of the rank.

    Raises:
        ArgumentError: unsupported shape, dtype or device, or a `routed` of another dispatcher or rank.
    """
    if not isinstance(routed, RoutedTokens) or routed._source[0] != source[0]:
        given = f"of dispatcher {routed._source[0]}" if isinstance(routed, RoutedTokens) else shown(routed)
        raise ArgumentError(f"routed{at}: {given}; allowed: a result of this dispatcher's dispatch")
    if routed._source[1] != source[1]:
        raise ArgumentError(f"routed{at}: of rank {routed._source[1]}; allowed: of rank {source[1]}")
    if routed._config.active_ranks != config.active_ranks:
        raise ArgumentError(
            f"routed{at}: of a dispatch with the active ranks {ranks_text(routed._config)}; allowed: of one since "
            f"set_active_ranks, with {ranks_text(config)}"
        )
    if not isinstance(weighted, bool):
        raise ArgumentError(f"weighted: {shown(weighted)}; allowed: True, False")
    _check_tensors(at, expert_output=values)
    _check_device(f"expert_output{at}", values, device)
    wanted = *routed.weights.shape, config.hidden
    if values.shape != wanted or values.dtype is not config.dtype:
        of_x = "" if config.packed is not None else ", that of routed.x"
        raise ArgumentError(
            f"expert_output{at}: {values.dtype} of shape {tuple(values.shape)}; allowed: {config.dtype} of shape "
            f"{tuple(wanted)}{of_x}"
        )
    shape = routed.topk_weights.shape[0], config.hidden
    for name, tensor in (("out", out), ("add", add)):
        if tensor is None:
            continue
        _check_tensors(at, **{name: tensor})
        _check_device(name + at, tensor, device)
        adjacent = tensor.dim() != 2 or has_contiguous_rows(tensor)
        written_twice = name == "out" and overlaps_itself(tensor)
        if tensor.shape != shape or tensor.dtype is not config.dtype or not adjacent or written_twice:
            apart = ", rows that do not overlap" if name == "out" else ""
            raise ArgumentError(
                f"{name}{at}: {tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}; allowed: "
                f"{config.dtype} of shape {shape}, the elements of a row adjacent{apart}"
            )
    # Traced and fake tensors have no addresses.
    if out is not None and not torch.compiler.is_compiling() and not isinstance(out, FakeTensor):
        read = {f"expert_output{at}": values}
        if add is not None and (out.data_ptr(), out.stride()) != (add.data_ptr(), add.stride()):
            read[f"add{at}"] = add  # `out` itself is allowed
        check_writable(f"out{at}", out, read)
    if torch.is_grad_enabled():
        _check_gradients(routed, at, (values, routed.weights, routed.topk_weights, add), out, weighted)


def _check_gradients(
    routed: RoutedTokens,
    at: str,
    differentiated: tuple[torch.Tensor | None, ...],
    out: torch.Tensor | None,
    weighted: bool,
) -> None:
    if weighted and routed.topk_weights.requires_grad and not routed.weights.requires_grad:
        raise ArgumentError(
            f"routed{at}: of a dispatch without gradients, with topk_weights that require them; allowed: a dispatch "
            "with gradients enabled, or topk_weights.detach()"
        )
    needing = any(x is not None and x.requires_grad for x in differentiated)
    tokens, again = routed._tokens, routed._again
    if needing and again is not None and tokens is not None and again.is_written(tokens):
        raise ArgumentError(
            f"routed{at}: its x was written after the dispatch; allowed with save='redispatch': x as it was, until "
            "backward has dispatched it again"
        )
    if out is not None and (needing or out.requires_grad):
        raise ArgumentError(f"out{at}: gradients are recorded; allowed: None, or a tensor under torch.no_grad()")


def ranks_text(config: DispatchConfig) -> str:
    """Return the active ranks as text."""
    return "all" if config.active_ranks is None else str(list(config.active_ranks))


def check_writable(name: str, out: torch.Tensor, others: Mapping[str, torch.Tensor]) -> None:
    """Check that `out` can be written to here, and while `others`, by name and on its device, are in use.

    Raises:
        ArgumentError: an inference tensor outside of inference mode, memory of another tensor, or memory that does not
            hold the tensor's values.
    """
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(f"{name}: made in inference mode; allowed outside of it: a tensor made outside of it")
    if isinstance(out, AsyncCollectiveTensor) or out.is_neg():
        kind = "an AsyncCollectiveTensor" if isinstance(out, AsyncCollectiveTensor) else "with the negative bit"
        raise ArgumentError(f"{name}: {kind}; allowed: a tensor whose memory holds its values")
    if isinstance(out, FakeTensor):
        return  # it has no address
    for other, tensor in others.items():
        if ranges_overlap(out, tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor):
            raise ArgumentError(f"{name}: overlaps the memory of {other}; allowed: memory of its own")


def _check_tensors(at: str, **given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"{name}{at}: {shown(value)}; allowed: a tensor")
        if isinstance(value, DTensor):
            raise ArgumentError(f"{name}{at}: a DTensor; allowed: a local tensor, as {name}.to_local() returns")
        if value.is_nested or value.layout is not torch.strided:
            kind = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
            raise ArgumentError(f"{name}{at}: {kind}; allowed: a dense tensor, of layout torch.strided")
        if hasattr(type(value), "__tensor_flatten__"):  # the test saves a call
            check_memory(name + at, value)


def check_memory(name: str, x: torch.Tensor) -> None:
    """
    Raises:
        ArgumentError: the tensor is made of others.
    """
    if not isinstance(x, AsyncCollectiveTensor) and hasattr(type(x), "__tensor_flatten__"):
        raise ArgumentError(f"{name}: a {type(x).__name__}, without memory of its own; allowed: a torch.Tensor")


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ArgumentError(f"{name}: on {tensor.device}; allowed: {device}")
