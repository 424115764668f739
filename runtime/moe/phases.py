"""Dispatch and combine in two phases, over the ranks that this process has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ...errors import UnsupportedError
from .autograd import copied_weights, routed_tokens, start_combine
from .dispatch_record import Tokens
from .engine import TokenEngine
from .pending import PendingTokens
from .routed import RoutedTokens

T = TypeVar("T")


def start_dispatch(
    engine: TokenEngine, tokens: Sequence[Tokens], result: Callable[[list[RoutedTokens]], T]
) -> PendingTokens[T]:
    """Start a dispatch of all ranks in this process. `result`: what `finish` returns of theirs."""
    refuse_compiled("dispatch_start", "dispatch")
    config = engine.config
    tokens = [item._replace(weights=copied_weights(item.weights)) for item in tokens]
    wait = engine._start_dispatch([item._replace(x=item.x.detach(), weights=item.weights.detach()) for item in tokens])
    return PendingTokens(engine.started, "dispatch", lambda: result(routed_tokens(engine, config, tokens, wait())))


def start_combines(
    engine: TokenEngine,
    values: Sequence[torch.Tensor],
    routed: Sequence[RoutedTokens],
    outs: Sequence[torch.Tensor | None],
    adds: Sequence[torch.Tensor | None],
    weighted: bool,
    result: Callable[[list[torch.Tensor]], T],
) -> PendingTokens[T]:
    """Start a combine of all ranks in this process. `result`: what `finish` returns of theirs."""
    refuse_compiled("combine_start", "combine")
    wait = start_combine(engine, values, routed, outs, adds, weighted)
    return PendingTokens(engine.started, "combine", lambda: result(wait()))


def refuse_compiled(name: str, instead: str) -> None:
    """
    Raises:
        UnsupportedError: in a graph of torch.compile, which has no calls in the background.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(f"{name} in a graph of torch.compile; allowed: {instead}")
