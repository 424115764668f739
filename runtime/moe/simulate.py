"""VirtualTokenDispatcher: all ranks of a token dispatcher in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ...errors import ArgumentError, UnsupportedError, shown
from ...kernels import on_device
from ..executor.dispatch_modes import hidden_from_modes
from ..transports.in_process import InProcessTransport, run_all
from .autograd import combine_tokens, dispatch_tokens
from .check_calls import check_combine, check_dispatch, packed_tokens
from .config import DispatchConfig
from .dispatch_record import Tokens
from .engine import TokenEngine, device_of
from .options import DEFAULT_OPTIONS, DispatchOptions
from .pending import PendingTokens
from .phases import start_combines, start_dispatch
from .routed import RoutedTokens
from .transfer.base import Steps, TokenTransfer
from .transfer.levels import two_sided_transfer
from .transfer.push import PushTransfer

T = TypeVar("T")


class VirtualTokenDispatcher(TokenEngine):
    """All ranks of a TokenDispatcher in this process, on one device: for tests, and for kernels of W ranks on one GPU.

    Methods take and return lists with one item for each of `size` ranks, or of the active ones. Otherwise they are
    TokenDispatcher's, with bitwise equal results.

    Args:
        size: W, the number of ranks, at least 1.
        num_experts, top_k, hidden, max_tokens, dtype, device: as for TokenDispatcher.
        options: as for TokenDispatcher, but `dedupe`: None or False.
        one_sided: True: ranks write into each other's buffers; False: they send and receive, as over a network.
        nodes: with one_sided=False, the node of each rank, which decides the order of sums. With two_level=True ranks
            of a node write into each other's buffers.

    Raises:
        ArgumentError: a number or name that is not allowed.
        UnsupportedError: dedupe=True.
    """

    @hidden_from_modes
    def __init__(
        self,
        size: int,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        options: DispatchOptions = DEFAULT_OPTIONS,
        device: torch.device | str = "cpu",
        one_sided: bool = True,
        nodes: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(f"size: {size!r}; allowed: a number of ranks, at least 1")
        if nodes is not None and one_sided:
            raise ArgumentError(f"nodes: {shown(nodes)} with one_sided=True; allowed: None, for one node")
        config = DispatchConfig.of(
            size, nodes, num_experts=num_experts, top_k=top_k, hidden=hidden, max_tokens=max_tokens, dtype=dtype,
            options=options,
        )  # fmt: skip
        if config.dedupe:
            raise UnsupportedError("dedupe: True, but virtual ranks have no windows; allowed: False, None")
        transport, ranks, device = InProcessTransport(one_sided), tuple(range(size)), device_of(device)
        kind: type[TokenTransfer] = PushTransfer if one_sided else two_sided_transfer(config, True)
        with on_device(device):
            transfers = [kind(config, transport, ranks, r, device, config.fingerprint(0)) for r in ranks]
            super().__init__(config, transfers, "in process")
        self._all_ranks = self.transfers

    def run(self, operation: int, runs: Sequence[Steps[Any]]) -> list[Any]:
        results = run_all({transfer.me: run for transfer, run in zip(self.transfers, runs, strict=True)})
        return [results[transfer.me] for transfer in self.transfers]

    @hidden_from_modes
    def set_active_ranks(self, ranks: Sequence[int] | None) -> None:
        """TokenDispatcher.set_active_ranks on all ranks. Lists have one item for each active rank from then on.

        Raises:
            ArgumentError: no rank, or one that does not exist or is given twice.
            UnsupportedError: two_level=True.
        """
        config = replace(self.config, active_ranks=ranks)
        if config.active_ranks is not None and self._all_ranks[0].two_level:
            raise UnsupportedError("active ranks with two_level=True; allowed: False")
        self.transfers = self._all_ranks
        self._use_config(config)
        self.transfers = [t for t in self._all_ranks if config.is_active(t.me)]

    def dispatch(
        self,
        xs: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        *,
        scale: Sequence[torch.Tensor] | None = None,
    ) -> list[RoutedTokens]:
        """TokenDispatcher.dispatch on all ranks.

        Args:
            xs, topk_ids, topk_weights: [T, H], [T, K] and [T, K] of each rank; T may differ.
            scale: of each rank, as for TokenDispatcher.

        Raises:
            ArgumentError: lists of another length than the number of ranks; unsupported shape or dtype, with its rank.
            CapacityError: as for TokenDispatcher.
        """
        return dispatch_tokens(self, self._checked_tokens(xs, topk_ids, topk_weights, scale))

    def dispatch_start(
        self,
        xs: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        *,
        scale: Sequence[torch.Tensor] | None = None,
    ) -> PendingTokens[list[RoutedTokens]]:
        """TokenDispatcher.dispatch_start on all ranks, which run at once.

        Raises:
            ArgumentError, CapacityError: as for `dispatch`.
            UnsupportedError: in a graph of torch.compile.
        """
        return start_dispatch(self, self._checked_tokens(xs, topk_ids, topk_weights, scale), _all)

    def combine(
        self,
        expert_outputs: Sequence[torch.Tensor],
        routed: Sequence[RoutedTokens],
        *,
        out: Sequence[torch.Tensor] | None = None,
        add: Sequence[torch.Tensor] | None = None,
        weighted: bool = True,
    ) -> list[torch.Tensor]:
        """TokenDispatcher.combine on all ranks: [T, H] each.

        Raises:
            ArgumentError: lists of another length than the number of ranks; unsupported shape or dtype, with its rank.
        """
        outs, adds = self._checked_outputs(expert_outputs, routed, out, add, weighted)
        return combine_tokens(self, expert_outputs, routed, outs, adds, weighted)

    def combine_start(
        self,
        expert_outputs: Sequence[torch.Tensor],
        routed: Sequence[RoutedTokens],
        *,
        out: Sequence[torch.Tensor] | None = None,
        add: Sequence[torch.Tensor] | None = None,
        weighted: bool = True,
    ) -> PendingTokens[list[torch.Tensor]]:
        """TokenDispatcher.combine_start on all ranks, which run at once.

        Raises:
            ArgumentError: as for `combine`.
            UnsupportedError: in a graph of torch.compile.
        """
        outs, adds = self._checked_outputs(expert_outputs, routed, out, add, weighted)
        return start_combines(self, expert_outputs, routed, outs, adds, weighted, _all)

    def _checked_tokens(
        self,
        xs: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        scale: Sequence[torch.Tensor] | None,
    ) -> list[Tokens]:
        scales: Sequence[Any] = [None] * len(self.transfers) if scale is None else scale
        self._check_lists(x=xs, topk_ids=topk_ids, topk_weights=topk_weights, scale=scales)
        tokens = []
        for i, (t, x, ids, weights, s) in enumerate(
            zip(self.transfers, xs, topk_ids, topk_weights, scales, strict=True)
        ):
            tokens.append(Tokens(packed_tokens(self.config, t.device, x, s, f"[{i}]"), ids, weights))
            check_dispatch(self.config, t.device, tokens[-1], f"[{i}]")
        return tokens

    def _checked_outputs(
        self,
        values: Sequence[torch.Tensor],
        routed: Sequence[RoutedTokens],
        out: Sequence[torch.Tensor] | None,
        add: Sequence[torch.Tensor] | None,
        weighted: bool,
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the outputs and what is added, None for each rank without."""
        outs: Sequence[Any] = [None] * len(self.transfers) if out is None else out
        adds: Sequence[Any] = [None] * len(self.transfers) if add is None else add
        self._check_lists(expert_output=values, routed=routed, out=outs, add=adds)
        for i, (t, v, r, o, a) in enumerate(zip(self.transfers, values, routed, outs, adds, strict=True)):
            check_combine(self.config, t.device, (self.handle, t.me), v, r, o, a, weighted, f"[{i}]")
        return outs, adds

    def _check_lists(self, **lists: Sequence[Any]) -> None:
        for name, given in lists.items():
            ranks = len(self.transfers)
            if len(given) != ranks:
                raise ArgumentError(f"{name}: {len(given)} of them; allowed: one for each of {ranks} ranks")


def _all(of_ranks: list[T]) -> list[T]:
    return of_ranks
