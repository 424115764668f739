"""Dispatch and combine in two phases, over the ranks that this process has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ...errors import UnsupportedError
from ..executor.dispatch_modes import below_modes, under_modes
from . import operations
from .autograd import copied_weights, routed_tokens, start_combine, with_weights
from .dispatch_record import Tokens
from .engine import TokenEngine
from .operations import Arrived, payloads_of
from .pending import PendingTokens
from .routed import RoutedTokens

T = TypeVar("T")


def start_dispatch(
    engine: TokenEngine, tokens: Sequence[Tokens], result: Callable[[list[RoutedTokens]], T]
) -> PendingTokens[T]:
    """Start a dispatch of all ranks in this process. `result`: what `finish` returns of theirs."""
    refuse_compiled("dispatch_start", "dispatch")
    config = engine.config
    with below_modes():
        copies = [copied_weights(item.weights) for item in tokens]
    done: list[Arrived] | None = None
    if under_modes():
        done = operations.dispatch(engine, with_weights(tokens, copies), started=True)
    else:
        detached = [item._replace(x=item.x.detach()) for item in tokens]
        wait = engine._start_dispatch(with_weights(detached, [weights.detach() for weights in copies]))

    def finish() -> T:
        with below_modes():
            arrived = payloads_of(engine, config, wait()) if done is None else done
            return result(routed_tokens(engine, config, tokens, copies, arrived))

    return PendingTokens(engine.started, "dispatch", finish)


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
